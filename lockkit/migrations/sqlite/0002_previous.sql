-- Whom a lease was taken over from, for the next holder to know.
ALTER TABLE lockkit_lease ADD COLUMN previous_holder TEXT;
ALTER TABLE lockkit_lease ADD COLUMN previous_fence INTEGER;
ALTER TABLE lockkit_lease ADD COLUMN previous_token BLOB;
ALTER TABLE lockkit_lease ADD COLUMN previous_expires_us INTEGER;
