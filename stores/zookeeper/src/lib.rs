//! Leases of lockkit in zookeeper.
