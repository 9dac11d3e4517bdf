-- The fence guard: for each key of each source of fences, the greatest fence that a transaction has committed with.
-- `uses` counts the transactions, so that each of them changes the row: Galera detects no conflict on a row that is only locked.
-- No AUTO_INCREMENT: it would break LAST_INSERT_ID(expr).
CREATE TABLE IF NOT EXISTS lockkit_fence (
    domain VARBINARY(64) NOT NULL,
    name   VARBINARY(255) NOT NULL,
    fence  BIGINT NOT NULL,
    uses   BIGINT UNSIGNED NOT NULL DEFAULT 0,
    PRIMARY KEY (domain, name)
) ENGINE = InnoDB;
