-- The statements themselves keep a fence below 2^62. The server parses and plans a CHECK constraint anew in each statement that
-- writes, which was a tenth of the cost of a lease.
ALTER TABLE lockkit_lease DROP CONSTRAINT IF EXISTS lockkit_lease_fence_check;
