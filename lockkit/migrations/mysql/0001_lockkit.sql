-- One row per lease name, kept after release so that its fence goes on rising.
-- Times are microseconds since 1970 by the server's clock. No AUTO_INCREMENT: it would break LAST_INSERT_ID(expr).
CREATE TABLE IF NOT EXISTS lockkit_lease (
    name        VARBINARY(255) NOT NULL PRIMARY KEY,
    token       BINARY(16) NULL,
    holder      VARBINARY(255) NOT NULL,
    fence       BIGINT NOT NULL CHECK (fence > 0 AND fence < 4611686018427387904),
    acquired_us BIGINT NOT NULL,
    expires_us  BIGINT NOT NULL,
    renewals    BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB;

-- One row per name ever locked by a named transaction lock.
CREATE TABLE IF NOT EXISTS lockkit_named (
    name VARBINARY(255) NOT NULL PRIMARY KEY
) ENGINE = InnoDB;
