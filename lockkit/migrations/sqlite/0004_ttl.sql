-- For how long the lease was last granted or renewed. NULL: not known, so its expiry is believed as it stands.
-- SQLite has no ADD COLUMN IF NOT EXISTS, so the table is made anew, which can be repeated. Where the old table has no
-- ttl_us, the name in the inner SELECT means that of `unknown`. Nothing is renamed: ALTER TABLE fails where the schema has a
-- view or trigger on this table, or a view on a table that is gone (https://www.sqlite.org/lang_altertable.html).
DROP TABLE IF EXISTS lockkit_lease_old;
CREATE TABLE lockkit_lease_old AS
SELECT name, token, holder, fence, acquired_us, expires_us, renewals,
    (SELECT ttl_us FROM lockkit_lease AS same WHERE same.name = old.name) AS ttl_us
FROM lockkit_lease AS old, (SELECT NULL AS ttl_us) AS unknown;
DROP TABLE lockkit_lease;
CREATE TABLE lockkit_lease (
    name        TEXT NOT NULL PRIMARY KEY,
    token       BLOB,
    holder      TEXT NOT NULL,
    fence       INTEGER NOT NULL CHECK (fence > 0 AND fence < 4611686018427387904),
    acquired_us INTEGER NOT NULL,
    expires_us  INTEGER NOT NULL,
    renewals    INTEGER NOT NULL DEFAULT 0,
    ttl_us      INTEGER
) STRICT, WITHOUT ROWID;
INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, renewals, ttl_us)
SELECT name, token, holder, fence, acquired_us, expires_us, renewals, ttl_us FROM lockkit_lease_old;
DROP TABLE lockkit_lease_old;
