-- The last batch of takes of each process that combines them: one row for each batch that the process has in flight at once. It tells
-- whether a batch whose answer was lost has taken. Rows unused for a day are deleted.
-- No AUTO_INCREMENT: it would break LAST_INSERT_ID(expr).
CREATE TABLE IF NOT EXISTS lockkit_stock_batch (
    id      BINARY(16) NOT NULL PRIMARY KEY,
    number  BIGINT NOT NULL,
    segment INT UNSIGNED NOT NULL,
    takers  INT UNSIGNED NOT NULL,
    used_us BIGINT NOT NULL
) ENGINE = InnoDB;
