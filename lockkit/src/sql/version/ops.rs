//! The operations on versions that a database implements.

use std::future::Future;

use sqlx::{Arguments, Database, Encode, Type};

use crate::{
    sql::{Dialect, SaveQuery, Values, VersionQuery, dialect::sealed},
    value::version::Version,
};

/// Versions of rows.
pub trait VersionOps: Dialect + VersionStatements {}

/// The statements of versions. Hidden from the docs: users call the strategy.
pub trait VersionStatements: Database {
    /// Reads the row and its version.
    fn version_read(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
    ) -> impl Future<Output = sqlx::Result<Option<(Self::Row, Version)>>> + Send;

    /// Replaces the version `expected` by its successor and returns the successor. `None` when the row has another
    /// version.
    fn version_bump(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> impl Future<Output = sqlx::Result<Option<Version>>> + Send;

    /// Writes the columns and adds one to the version. `false` when the row does not have the version `expected`;
    /// nothing is written then. The values of the columns come before those of the key.
    fn version_save(
        conn: &mut Self::Connection,
        query: &SaveQuery,
        values: Values<Self>,
        expected: i64,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Deletes the row. `false` when the row does not have the version `expected`, or does not exist.
    fn version_delete(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;
}

/// Number of rows that a statement changed, on each database's query result.
pub trait RowsAffected: sealed::Sealed {
    /// The number of rows.
    fn affected(&self) -> u64;
}

/// The type of a version column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VersionKind {
    Number,
    Timestamp,
    /// A type that cannot be a version.
    Other,
}

impl VersionKind {
    pub(crate) fn of(version: &Version) -> Self {
        match version {
            Version::Number(_) => Self::Number,
            Version::Timestamp(_) => Self::Timestamp,
        }
    }
}

/// Parses the version that the database printed as `text`. `None` stands for NULL, which is an error.
pub(crate) fn parse_version(kind: VersionKind, text: Option<String>) -> sqlx::Result<Version> {
    let Some(text) = text else {
        return Err(sqlx::Error::Decode("the version of the row is NULL".into()));
    };
    match kind {
        VersionKind::Number => text.parse().map(Version::Number).map_err(|err| sqlx::Error::Decode(Box::new(err))),
        VersionKind::Timestamp => Ok(Version::Timestamp(text)),
        VersionKind::Other => {
            Err(sqlx::Error::Decode("the version of the row is neither an integer nor a timestamp".into()))
        }
    }
}

/// Binds the expected version, as the last value of a statement.
pub(crate) fn bind_expected<DB: Database>(arguments: &mut DB::Arguments, expected: &Version) -> sqlx::Result<()>
where
    for<'v> i64: Encode<'v, DB> + Type<DB>,
    for<'v> String: Encode<'v, DB> + Type<DB>,
{
    match expected {
        Version::Number(number) => arguments.add(*number),
        Version::Timestamp(text) => arguments.add(text.clone()),
    }
    .map_err(sqlx::Error::Encode)
}
