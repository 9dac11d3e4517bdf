//! `map_err`: functions whose error type is not `From<lockkit::Error>`.
//!
//! The expansion runs with the error type `Mapped<E>`, which is `From<lockkit::Error>` for every `E`, inside one more
//! block, and converts once, at its end. Every other function expands as before.

use std::{error::Error as StdError, fmt, future::Future};

use crate::{
    retry::is_retryable,
    value::error::{Error, Result},
};

/// The error of a function with `map_err`, until it is converted.
#[derive(Debug)]
pub enum Mapped<E> {
    /// An error of lockkit.
    Lock(Error),
    /// An error of the body.
    Body(E),
}

impl<E> From<Error> for Mapped<E> {
    fn from(err: Error) -> Self {
        Self::Lock(err)
    }
}

impl<E: fmt::Display> fmt::Display for Mapped<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(err) => err.fmt(f),
            Self::Body(err) => err.fmt(f),
        }
    }
}

impl<E: StdError + 'static> StdError for Mapped<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Lock(err) => Some(err),
            Self::Body(err) => Some(err),
        }
    }
}

/// As the error of the body. An error of lockkit is no answer.
#[cfg(feature = "idempotent")]
impl<E: serde::Serialize> serde::Serialize for Mapped<E> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Lock(err) => Err(serde::ser::Error::custom(err)),
            Self::Body(err) => err.serialize(serializer),
        }
    }
}

#[cfg(feature = "idempotent")]
impl<'de, E: serde::Deserialize<'de>> serde::Deserialize<'de> for Mapped<E> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        E::deserialize(deserializer).map(Self::Body)
    }
}

/// The body of a function with `map_err`.
pub async fn mapped<T, E>(body: impl Future<Output = Result<T, E>>) -> Result<T, Mapped<E>> {
    into_mapped(body.await)
}

/// A result of the user, in a function with `map_err`.
pub fn into_mapped<T, E>(result: Result<T, E>) -> Result<T, Mapped<E>> {
    result.map_err(Mapped::Body)
}

/// The result of a function with `map_err`.
pub fn map_err<T, E>(result: Result<T, Mapped<E>>, convert: impl FnOnce(Error) -> E) -> Result<T, E> {
    result.map_err(|err| match err {
        Mapped::Lock(err) => convert(err),
        Mapped::Body(err) => err,
    })
}

/// As `is_worth_another`, for a function with `map_err`.
pub fn is_worth_another_mapped<T, E>(ended: &Option<Result<T, Mapped<E>>>, test: impl Fn(&E) -> bool) -> bool {
    match ended {
        Some(Err(Mapped::Body(err))) => test(err),
        Some(Err(Mapped::Lock(err))) => is_retryable(err),
        Some(Ok(_)) | None => false,
    }
}
