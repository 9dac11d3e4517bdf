-- Some rows per stock, its segments, so that many can take from it at once. Their sum is what is left.
-- Pages are left mostly empty: an update then stays on its page (HOT), and neighbours do not queue for one page.
CREATE TABLE IF NOT EXISTS lockkit_stock (
    name     text COLLATE "C" NOT NULL,
    segment  integer NOT NULL CHECK (segment >= 0),
    quantity bigint NOT NULL CHECK (quantity >= 0),
    PRIMARY KEY (name, segment)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
