-- The fence guard: for each key of each source of fences, the greatest fence that a transaction has committed with.
-- Pages are left half empty: an update then stays on its page (HOT).
CREATE TABLE IF NOT EXISTS lockkit_fence (
    domain text COLLATE "C" NOT NULL,
    name   text COLLATE "C" NOT NULL,
    fence  bigint NOT NULL,
    PRIMARY KEY (domain, name)
) WITH (fillfactor = 50);
