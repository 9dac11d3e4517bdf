-- Some rows per stock, its segments, as on the servers, where many can take from it at once. Their sum is what is left.
CREATE TABLE IF NOT EXISTS lockkit_stock (
    name     TEXT NOT NULL,
    segment  INTEGER NOT NULL CHECK (segment >= 0),
    quantity INTEGER NOT NULL CHECK (quantity >= 0),
    PRIMARY KEY (name, segment)
) STRICT, WITHOUT ROWID;
