//! Leases of lockkit in etcd.
