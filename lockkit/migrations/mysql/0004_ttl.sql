-- For how long the lease was last granted or renewed. NULL: not known, so its expiry is believed as it stands.
-- MySQL has no ADD COLUMN IF NOT EXISTS, so a migration that was cut short asks before it runs again.
SET @lockkit_ddl = IF(
    EXISTS (SELECT 1 FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 'lockkit_lease' AND column_name = 'ttl_us'),
    'DO 0',
    'ALTER TABLE lockkit_lease ADD COLUMN /*M! IF NOT EXISTS */ ttl_us BIGINT NULL'
);
PREPARE lockkit_ddl FROM @lockkit_ddl;
EXECUTE lockkit_ddl;
DEALLOCATE PREPARE lockkit_ddl;
