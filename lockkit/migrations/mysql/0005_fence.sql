-- The fence guard: for each key of each source of fences, the greatest fence that a transaction has committed with.
-- No AUTO_INCREMENT: it would break LAST_INSERT_ID(expr).
CREATE TABLE IF NOT EXISTS lockkit_fence (
    domain VARBINARY(64) NOT NULL,
    name   VARBINARY(255) NOT NULL,
    fence  BIGINT NOT NULL,
    PRIMARY KEY (domain, name)
) ENGINE = InnoDB;
