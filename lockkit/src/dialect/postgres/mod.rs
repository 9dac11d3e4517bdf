//! PostgreSQL 12 and later: the statements, and what its SQLSTATEs mean.

use sha2::{Digest, Sha256};
use std::time::Duration;

use sqlx::{
    Executor, PgConnection, Pool, Postgres, SqlStr,
    postgres::{PgDatabaseError, PgQueryResult, PgTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use super::{AsConnection, Dialect, RowsAffected, connection_fault};
use crate::{error::Fault, key::Key, policy::Wait};

/// The server's clock in microseconds, read anew wherever it stands: `now()` would be the start of the transaction,
/// long past in a statement that waited.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}

const MIGRATIONS: [(i64, &str, &str); 2] = [
    (1, "lockkit", include_str!("../../../migrations/postgres/0001_lockkit.sql")),
    (3, "stock", include_str!("../../../migrations/postgres/0003_stock.sql")),
];

/// Tells those who wait for the lease that it was given back, if there are any: they share the lease's bell, an advisory
/// lock, which then cannot be had alone. NOTIFY takes a lock of the whole server at commit, so it is not for every
/// release (<https://www.postgresql.org/docs/current/sql-notify.html>).
macro_rules! ring {
    ($bell:literal) => {
        concat!(
            "(SELECT count(pg_notify('lockkit_freed', $1)) FROM freed WHERE NOT pg_try_advisory_xact_lock(",
            $bell,
            ")) AS rung"
        )
    };
}

mod lease;
mod listen;
mod lock;
mod session;
mod stock;
mod version;

pub(super) fn fault_of(err: &PgDatabaseError) -> Fault {
    // https://www.postgresql.org/docs/current/errcodes-appendix.html
    match err.code() {
        "55P03" => Fault::Contended,
        "40P01" => Fault::Deadlock,
        "40001" => Fault::Serialization,
        "23505" => Fault::Duplicate,
        "42P01" | "42703" | "3F000" => Fault::NoTable,
        "25P01" | "25P02" => Fault::NoTransaction,
        "25006" => Fault::ReadOnly,
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "08006" | "08003" => Fault::Unavailable,
        _ => Fault::Other,
    }
}

impl super::sealed::Sealed for Postgres {}
impl super::sealed::Sealed for PgConnection {}

impl AsConnection<Postgres> for PgConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Dialect for Postgres {
    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn waits_for(_conn: &mut PgConnection) -> sqlx::Result<Option<Duration>> {
        Ok(None)
    }

    async fn wait_for(_conn: &mut PgConnection, _wait: Duration) -> sqlx::Result<()> {
        Ok(())
    }

    async fn begin(conn: &mut PgConnection, _wait: Wait) -> sqlx::Result<()> {
        PgTransactionManager::begin(conn, Some(SqlStr::from_static("BEGIN ISOLATION LEVEL READ COMMITTED"))).await
    }

    async fn commit(conn: &mut PgConnection) -> sqlx::Result<()> {
        // A COMMIT of a failed transaction answers success and rolls back. In one message with a SELECT before it,
        // the SELECT fails instead and the COMMIT is not run. The chained transaction is empty; it gives the queued
        // ROLLBACK that corrects sqlx's count of open transactions something to end.
        conn.execute("SELECT 1; COMMIT AND CHAIN").await?;
        PgTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn check_open(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit").await?;
        Ok(())
    }

    async fn is_idle(conn: &mut PgConnection) -> bool {
        // 25P01: there is no transaction to have a savepoint in. One that has failed would say 25P02.
        let err = Self::check_open(conn).await.err();
        err.and_then(sqlx::Error::into_database_error).is_some_and(|it| it.code().as_deref() == Some("25P01"))
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), sqlx::migrate::MigrateError> {
        let migrator = super::migrator(MIGRATIONS);
        if super::is_migrated(&mut *pool.acquire().await?, &migrator).await {
            return Ok(());
        }
        // On a pool of its own: a run that fails would leave its lock on a connection of the application's.
        let own = pool.options().clone().min_connections(0).max_connections(1);
        let own = own.connect_with((*pool.connect_options()).clone()).await?;
        let done = migrator.run(&own).await;
        own.close().await;
        done
    }
}

impl super::sealed::Sealed for PgQueryResult {}

impl RowsAffected for PgQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

/// How the driver writes the bound value with this number, from 1.
fn placeholder(number: usize) -> String {
    format!("${number}")
}

/// 64 bits of SHA-256 of the key, in a namespace of lockkit's own among the advisory locks of the database.
fn advisory_number(namespace: &str, key: &Key) -> i64 {
    let digest = Sha256::new().chain_update(format!("lockkit:{namespace}:")).chain_update(key.as_bytes()).finalize();
    let (first, _) = digest.as_slice().split_at(8);
    first.iter().fold(0, |number, byte| number << 8 | i64::from(*byte))
}

/// The advisory lock that those share who wait to hear that the lease is free.
fn bell(key: &Key) -> i64 {
    advisory_number("bell", key)
}
