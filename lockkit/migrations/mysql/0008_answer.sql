-- Answers that are stored in the transaction of the work: a request that is repeated gets the first one. Only the hash of the
-- request is stored. Rows that have expired are deleted.
-- Work outside of the database that has begun has a row without an answer. A row is also the lock of its key, so a
-- transaction that has not stored its answer yet has one without anything.
CREATE TABLE IF NOT EXISTS lockkit_answer (
    name          VARBINARY(255) NOT NULL PRIMARY KEY,
    fingerprint   BINARY(32) NULL,
    answer        LONGBLOB NULL,
    made_us       BIGINT NULL,
    keep_until_us BIGINT NOT NULL DEFAULT 0,
    KEY lockkit_answer_keep (keep_until_us)
) ENGINE = InnoDB;
