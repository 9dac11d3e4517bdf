-- One row per lease name, kept after release so that its fence goes on rising.
-- Times are microseconds since 1970 by the clock of the machine that runs SQLite.
CREATE TABLE IF NOT EXISTS lockkit_lease (
    name        TEXT NOT NULL PRIMARY KEY,
    token       BLOB,
    holder      TEXT NOT NULL,
    fence       INTEGER NOT NULL CHECK (fence > 0 AND fence < 4611686018427387904),
    acquired_us INTEGER NOT NULL,
    expires_us  INTEGER NOT NULL,
    renewals    INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
