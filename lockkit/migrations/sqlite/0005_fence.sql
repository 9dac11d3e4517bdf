-- The fence guard: for each key of each source of fences, the greatest fence that a transaction has committed with.
CREATE TABLE IF NOT EXISTS lockkit_fence (
    domain TEXT NOT NULL,
    name   TEXT NOT NULL,
    fence  INTEGER NOT NULL,
    PRIMARY KEY (domain, name)
) STRICT, WITHOUT ROWID;
