-- Some rows per stock, its segments, so that many can take from it at once. Their sum is what is left.
-- No AUTO_INCREMENT: it would break LAST_INSERT_ID(expr).
CREATE TABLE IF NOT EXISTS lockkit_stock (
    name     VARBINARY(255) NOT NULL,
    segment  INT UNSIGNED NOT NULL,
    quantity BIGINT NOT NULL CHECK (quantity >= 0),
    PRIMARY KEY (name, segment)
) ENGINE = InnoDB;
