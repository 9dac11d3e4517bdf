//! The values that every lock knows: keys, fences, versions, holders, and the errors with their reasons.

pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod holder;
pub(crate) mod key;
pub(crate) mod reason;
pub(crate) mod token;
pub(crate) mod version;
