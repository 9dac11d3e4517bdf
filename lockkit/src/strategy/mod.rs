//! The ways to exclude others: one module each, generic over the database or store.

pub(crate) mod lease;
pub(crate) mod named;
pub(crate) mod row;
pub(crate) mod session;
pub(crate) mod version;
