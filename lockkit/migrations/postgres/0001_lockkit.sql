-- One row per lease name, kept after release so that its fence goes on rising.
-- Times are microseconds since 1970 by the server's clock. No index on expires_us: a renewal then touches no index (HOT).
CREATE TABLE IF NOT EXISTS lockkit_lease (
    name        text COLLATE "C" NOT NULL PRIMARY KEY,
    token       bytea,
    holder      text NOT NULL,
    fence       bigint NOT NULL CHECK (fence > 0 AND fence < 4611686018427387904),
    acquired_us bigint NOT NULL,
    expires_us  bigint NOT NULL,
    renewals    bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
