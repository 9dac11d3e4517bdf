-- The last batch of takes of each process that combines them: one row for each batch that the process has in flight at once. It tells
-- whether a batch whose answer was lost has taken. Rows unused for a day are deleted.
-- No index on used_us, and pages left half empty: an update then stays on its page (HOT).
CREATE TABLE IF NOT EXISTS lockkit_stock_batch (
    id      bytea NOT NULL PRIMARY KEY,
    number  bigint NOT NULL,
    segment integer NOT NULL,
    takers  integer NOT NULL,
    used_us bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
