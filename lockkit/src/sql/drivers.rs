//! The fault of an error, whichever driver it is of.

use std::error::Error as StdError;

use sqlx::error::DatabaseError;

use crate::value::error::{Fault, chain};

/// The fault of an error of any kind: the first that a driver reported, down its chain of sources.
pub(crate) fn fault_in_chain(err: &(dyn StdError + 'static)) -> Option<Fault> {
    chain(err).find_map(driver_fault)
}

/// The fault of a driver's own error.
pub(crate) fn driver_fault(err: &(dyn StdError + 'static)) -> Option<Fault> {
    let err = match err.downcast_ref::<Box<dyn DatabaseError>>() {
        Some(boxed) => boxed.as_error(),
        None => err,
    };
    #[cfg(feature = "postgres")]
    if let Some(err) = err.downcast_ref() {
        return Some(super::postgres::fault_of(err));
    }
    #[cfg(feature = "mysql")]
    if let Some(err) = err.downcast_ref() {
        return Some(super::mysql::fault_of(err));
    }
    #[cfg(any(feature = "sqlite", feature = "sqlite-unbundled"))]
    if let Some(err) = err.downcast_ref() {
        return Some(super::sqlite::fault_of(err));
    }
    None
}
