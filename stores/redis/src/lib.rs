//! Leases of lockkit in redis.
