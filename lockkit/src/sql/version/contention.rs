//! What attempts do about conflicts: which row it was, and the lock on it in the transactions of further attempts.
//!
//! The lock (`then_lock`) is off by default: the body was not written with that lock in mind, and with the locks that
//! it takes itself it can make a cycle, which PostgreSQL notices after a second. The read of a further attempt is a
//! bounded lock in the attempt's transaction and returns what it locked, so the attempt cannot conflict. A lock that is
//! not free in time is a conflict, like the one that it replaces. It is skipped without an index, since it would lock
//! other rows.

use std::{
    any::TypeId,
    hash::{DefaultHasher, Hash, Hasher},
};

use tokio::time::Instant;

use crate::{
    observe::{Strategy, observed},
    policy::Wait,
    retry::context,
    sql::{
        Columns, RowQuery, Strength, Values, VersionOps, VersionQuery, depth, failed,
        row::plan::{self, PlanCheck},
    },
    value::{
        error::{Error, Fault, Raced, Result},
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

/// The error of a write that expected another version of the row.
pub(crate) fn conflict(table: Key, row: Row, expected: Version, found: Option<Version>) -> Error {
    Error::Conflict { table: Some(table), expected: Some(expected), found, source: Raced { row: Some(row) } }
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

/// Locks the row in the caller's transaction if the running attempt locks it ([`then_lock`](crate::RetryPolicy::then_lock)).
/// Returns the locked row with its version, or `None` if it is still to be read.
pub(crate) async fn lock_if_asked<DB: VersionOps>(
    conn: &mut DB::Connection,
    query: &VersionQuery,
    table: &Key,
    values: &Values<DB>,
) -> Result<Option<(DB::Row, Version)>> {
    match context::lock_wait(|| row_of(query, values)) {
        // Boxed: it is larger than a read, and rarely runs.
        Some(wait) => Box::pin(lock(conn, query, table, values, wait)).await,
        None => Ok(None),
    }
}

async fn lock<DB: VersionOps>(
    conn: &mut DB::Connection,
    query: &VersionQuery,
    table: &Key,
    values: &Values<DB>,
    wait: Wait,
) -> Result<Option<(DB::Row, Version)>> {
    // Outside a transaction the lock would end with its statement.
    if depth::<DB>(conn).await? == 0 {
        context::cannot_lock(row_of(query, values));
        return Ok(None);
    }
    let lock = RowQuery {
        table: query.table.clone(),
        by: query.by.clone(),
        order_by: query.by.iter().map(|it| it.column.clone()).collect(),
        limit: None,
        skip_locked: false,
        strength: Strength::Update,
        wait,
        columns: Columns::All,
    };
    let access = match plan::access::<DB>(conn, &lock, values, table, PlanCheck::Deny).await {
        Ok(access) => access,
        // A lock that scans would be on other rows too.
        Err(Error::FullScan { .. } | Error::InvalidOption { .. }) => {
            context::cannot_lock(row_of(query, values));
            return Ok(None);
        }
        Err(err) => return Err(err),
    };
    let started = Instant::now();
    let locking = async {
        let err = match DB::row_lock(conn, &lock, values.clone(), &access).await {
            Ok(mut rows) => return Ok(rows.pop()),
            Err(err) => err,
        };
        if DB::row_plan_is_old(&err) {
            plan::forget::<DB>(&lock, values);
            return Ok(None);
        }
        if DB::fault(&err) == Fault::Contended {
            return Err(Error::Contended { key: table.clone(), waited: started.elapsed(), holder: None });
        }
        Err(failed::<DB>("locking a row of", Some(table), err))
    };
    match observed(Strategy::Row, table, locking).await {
        // As without the lock, the retry decides whether there is another attempt.
        Err(Error::Contended { .. }) => Err(not_read(table, row_of(query, values))),
        Err(err) => Err(err),
        // A timestamp has to be read again, as text.
        Ok(row) => Ok(row.and_then(|row| DB::version_of(&row, query).map(|it| (row, Version::Number(it))))),
    }
}
