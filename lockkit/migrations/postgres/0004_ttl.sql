-- For how long the lease was last granted or renewed. NULL: not known, so its expiry is believed as it stands.
ALTER TABLE lockkit_lease ADD COLUMN IF NOT EXISTS ttl_us bigint;
