-- Whom a lease was taken over from, for the next holder to know.
-- An index on the token alone: a transaction that pins its lease locks the entry there, and renewals write the row. Not
-- UNIQUE: the search for duplicates would lock the entry beside, which belongs to another lease.
-- MySQL has no ADD COLUMN IF NOT EXISTS, so a migration that was cut short asks before it runs again.
SET @lockkit_ddl = IF(
    EXISTS (SELECT 1 FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 'lockkit_lease' AND column_name = 'previous_fence'),
    'DO 0',
    'ALTER TABLE lockkit_lease
         ADD COLUMN /*M! IF NOT EXISTS */ previous_holder VARBINARY(255) NULL,
         ADD COLUMN /*M! IF NOT EXISTS */ previous_fence BIGINT NULL,
         ADD COLUMN /*M! IF NOT EXISTS */ previous_expires_us BIGINT NULL,
         ADD INDEX /*M! IF NOT EXISTS */ lockkit_token (token)'
);
PREPARE lockkit_ddl FROM @lockkit_ddl;
EXECUTE lockkit_ddl;
DEALLOCATE PREPARE lockkit_ddl;
