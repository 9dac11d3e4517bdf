-- Answers that are stored in the transaction of the work: a request that is repeated gets the first one. Only the hash of the
-- request is stored. Rows that have expired are deleted.
-- Work outside of the database that has begun has a row without an answer.
CREATE TABLE IF NOT EXISTS lockkit_answer (
    name          TEXT NOT NULL PRIMARY KEY,
    fingerprint   BLOB NOT NULL,
    answer        BLOB NULL,
    made_us       INTEGER NOT NULL,
    keep_until_us INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS lockkit_answer_keep ON lockkit_answer (keep_until_us);
