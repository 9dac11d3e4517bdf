//! What a conflict tells its retry: the row, and that the attempt has to wait for its turn to write it.

use std::{
    any::TypeId,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::{
    retry::context,
    sql::{Values, VersionOps, VersionQuery, failed},
    value::{
        error::{Error, Raced, Result},
        key::Key,
        version::{Row, Version},
    },
};

/// The row of a query.
pub(crate) fn row_of<DB: VersionOps>(query: &VersionQuery, values: &Values<DB>) -> Row {
    let mut hash = DefaultHasher::new();
    (TypeId::of::<DB>(), query.table.to_string()).hash(&mut hash);
    query.by.iter().for_each(|it| it.column.as_str().hash(&mut hash));
    values.hash().hash(&mut hash);
    Row(hash.finish())
}

/// The error of a write that found no row with the expected version. Reads which version the row has instead.
pub(crate) async fn conflict<DB: VersionOps>(
    conn: &mut DB::Connection,
    query: &VersionQuery,
    values: Values<DB>,
    table: &Key,
    expected: Version,
    doing: &'static str,
) -> Error {
    let source = Raced { row: Some(row_of(query, &values)) };
    match DB::version_read(conn, query, values).await {
        Ok(found) => Error::Conflict {
            table: Some(table.clone()),
            expected: Some(expected),
            found: found.map(|(_, version)| version),
            source,
        },
        Err(err) => failed::<DB>(doing, Some(table), err),
    }
}

/// Fails if the running attempt has to wait for its turn first. To be called on a connection of the caller.
pub(crate) fn stand_back<DB: VersionOps>(query: &VersionQuery, table: &Key, values: &Values<DB>) -> Result<()> {
    if context::stands_back(|| row_of(query, values)) {
        return Err(not_read(table, row_of(query, values)));
    }
    Ok(())
}

/// The conflict of an attempt that has not come to read the row.
fn not_read(table: &Key, row: Row) -> Error {
    Error::Conflict { table: Some(table.clone()), expected: None, found: None, source: Raced { row: Some(row) } }
}
