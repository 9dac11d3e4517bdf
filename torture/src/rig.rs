//! What the rack needs of a database beyond `lockkit`: its tables, and statements that only an administrator sends.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lockkit::{RowLock, Session, SessionLock, Version, Versioned, VersionedRow};
use sqlx::{AssertSqlSafe, Connection as _, Database, Pool, raw_sql};
use support::{Backend, Cluster as _, Galera, MariaDb, MySql, Postgres, Sqlite};
use tokio::time::{Instant, sleep};
use url::Url;

use crate::probes::{self, Found, Ground};

type Connection<S> = <<S as support::Server>::DB as Database>::Connection;

/// Units in the stock at the start of a lane.
pub(crate) const STOCK: u64 = 1_000_000;
/// Cents in each account of the pairs at the start of a lane.
pub(crate) const CENTS: i64 = 1_000_000;

/// A database that can be put on the rack.
///
/// The functions that bind a value are written out for each database, so that nothing else needs bounds for it.
pub(crate) trait Rig: Backend {
    /// As the command line names it.
    const CODE: &'static str;
    const HAS_SERVER: bool = true;
    /// How many servers its clients may use alike; their ports follow each other.
    const NODES: u16 = 1;

    /// The URL for the rack itself, whose statements the server's own limit must not cancel.
    fn unlimited(url: &str) -> Result<String> {
        Ok(url.to_owned())
    }

    /// Ends all other sessions in this connection's database.
    fn terminate(conn: &mut Connection<Self>) -> impl Future<Output = Result<u64>>;

    /// Cancels the running statements of all other sessions in this connection's database.
    fn cancel(conn: &mut Connection<Self>) -> impl Future<Output = Result<u64>>;

    /// SQL for the server's clock in microseconds.
    const NOW: &'static str;

    fn lock_row(
        conn: &mut Connection<Self>,
        id: i64,
        wait: Duration,
    ) -> impl Future<Output = lockkit::Result<()>> + Send;

    fn read_version(conn: &mut Connection<Self>, id: i64) -> impl Future<Output = lockkit::Result<Version>> + Send;

    fn bump_version(
        conn: &mut Connection<Self>,
        id: i64,
        version: Version,
    ) -> impl Future<Output = lockkit::Result<()>> + Send;

    /// A session lock, where the database has them.
    fn session(
        pool: &Pool<Self::DB>,
        key: String,
        wait: Duration,
    ) -> impl Future<Output = lockkit::Result<Option<Session<Self::DB>>>> + Send;

    /// The probes that make sense on this database only.
    fn own_probes(ground: &Ground<Self>) -> impl Future<Output = Vec<Found>>;
}

macro_rules! binding_functions {
    () => {
        async fn lock_row(conn: &mut Connection<Self>, id: i64, wait: Duration) -> lockkit::Result<()> {
            RowLock::<Self::DB>::table("account").by("id", id).wait(wait).lock(conn).await.map(drop)
        }

        async fn read_version(conn: &mut Connection<Self>, id: i64) -> lockkit::Result<Version> {
            let row = VersionedRow::<Self::DB>::table("account").by("id", id);
            let Versioned { row: (), version, .. } = row.read(conn).await?;
            Ok(version)
        }

        async fn bump_version(conn: &mut Connection<Self>, id: i64, version: Version) -> lockkit::Result<()> {
            let row = VersionedRow::<Self::DB>::table("account").by("id", id);
            row.expected(version).bump(conn).await.map(drop)
        }
    };
}

macro_rules! session_function {
    () => {
        async fn session(
            pool: &Pool<Self::DB>,
            key: String,
            wait: Duration,
        ) -> lockkit::Result<Option<Session<Self::DB>>> {
            SessionLock::new(key).wait(wait).acquire(pool).await.map(Some)
        }
    };
}

impl Rig for Postgres {
    const CODE: &'static str = "postgres";
    const NOW: &'static str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

    fn unlimited(url: &str) -> Result<String> {
        let mut url = Url::parse(url)?;
        url.query_pairs_mut().append_pair("options[statement_timeout]", "0");
        Ok(url.into())
    }

    async fn terminate(conn: &mut Connection<Self>) -> Result<u64> {
        of_others(conn, "pg_terminate_backend").await
    }

    async fn cancel(conn: &mut Connection<Self>) -> Result<u64> {
        of_others(conn, "pg_cancel_backend").await
    }

    async fn own_probes(ground: &Ground<Self>) -> Vec<Found> {
        probes::of_postgres(ground).await
    }

    binding_functions!();
    session_function!();
}

async fn of_others(conn: &mut sqlx::PgConnection, function: &str) -> Result<u64> {
    let sql = format!(
        "SELECT count({function}(pid)) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()"
    );
    let ended = <Postgres as support::Server>::fetch_i64(conn, &sql).await?;
    Ok(u64::try_from(ended.unwrap_or(0))?)
}

macro_rules! rig_of_the_mysql_family {
    ($server:ty, $code:literal, $nodes:expr) => {
        impl Rig for $server {
            const CODE: &'static str = $code;
            const NODES: u16 = $nodes;
            const NOW: &'static str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

            async fn terminate(conn: &mut Connection<Self>) -> Result<u64> {
                kill(conn, "KILL").await
            }

            async fn cancel(conn: &mut Connection<Self>) -> Result<u64> {
                kill(conn, "KILL QUERY").await
            }

            async fn own_probes(ground: &Ground<Self>) -> Vec<Found> {
                probes::of_the_mysql_family(ground).await
            }

            binding_functions!();
            session_function!();
        }
    };
}

rig_of_the_mysql_family!(MariaDb, "mariadb", 1);
rig_of_the_mysql_family!(MySql, "mysql", 1);
rig_of_the_mysql_family!(Galera, "galera", support::throwaway::GALERA_NODES);

async fn kill(conn: &mut sqlx::MySqlConnection, statement: &str) -> Result<u64> {
    let sql = "SELECT CAST(id AS CHAR)
               FROM /*!80000 performance_schema.processlist */ /*M! information_schema.processlist */
               WHERE db = DATABASE() AND id <> CONNECTION_ID()";
    // Sessions that end meanwhile are no failure; the next round will do.
    let ids = <sqlx::MySql as support::PlainSql>::fetch_texts(conn, sql).await.unwrap_or_default();
    let mut killed = 0;
    for id in ids.into_iter().flatten() {
        // A session that ended by itself in the meantime is no failure.
        killed += u64::from(raw_sql(AssertSqlSafe(format!("{statement} {id}"))).execute(&mut *conn).await.is_ok());
    }
    Ok(killed)
}

impl Rig for Sqlite {
    const CODE: &'static str = "sqlite";
    const HAS_SERVER: bool = false;
    const NOW: &'static str = "CAST(unixepoch('subsec') * 1000000 AS INTEGER)";

    async fn terminate(_conn: &mut Connection<Self>) -> Result<u64> {
        Ok(0)
    }

    async fn cancel(_conn: &mut Connection<Self>) -> Result<u64> {
        Ok(0)
    }

    async fn own_probes(ground: &Ground<Self>) -> Vec<Found> {
        probes::of_sqlite(ground).await
    }

    async fn session(_: &Pool<Self::DB>, _: String, _: Duration) -> lockkit::Result<Option<Session<Self::DB>>> {
        Ok(None)
    }

    binding_functions!();
}

/// A connection that belongs to no pool.
pub(crate) async fn connect<S: Rig>(url: &str) -> Result<Connection<S>> {
    Ok(Connection::<S>::connect(&S::unlimited(url)?).await?)
}

/// Waits until the server answers, as after its start or recovery.
pub(crate) async fn answers<S: Rig>(url: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match execute::<S>(url, "SELECT 1").await {
            Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)).await,
            result => return result.map(drop),
        }
    }
}

/// Runs one statement on a connection of its own.
pub(crate) async fn execute<S: Rig>(url: &str, sql: &str) -> Result<u64> {
    let mut conn = connect::<S>(url).await?;
    let changed = S::execute(&mut conn, sql).await?;
    conn.close().await?;
    Ok(changed)
}

/// Waits until each node of a cluster has what the others have committed, so that no read misses it.
pub(crate) async fn catch_up<S: Rig>(url: &str) -> Result<()> {
    if S::NODES > 1 {
        for node in nodes::<S>(url)? {
            Galera::caught_up(&node).await.with_context(|| format!("{node} does not catch up"))?;
        }
    }
    Ok(())
}

/// The URLs of the nodes, which are at the ports that follow the first one's.
pub(crate) fn nodes<S: Rig>(url: &str) -> Result<Vec<String>> {
    let first = Url::parse(url)?;
    let node = |number| {
        let mut url = first.clone();
        url.set_port(Some(first.port().context("a port")? + number)).ok().context("a URL with a port")?;
        Ok(url.into())
    };
    (0..S::NODES).map(node).collect()
}

/// The URL of another database on the same server.
pub(crate) fn in_database(url: &str, name: &str) -> Result<String> {
    let mut url = Url::parse(url)?;
    url.set_path(name);
    Ok(url.into())
}

/// The tables that the work is done on, with all accounts in them.
pub(crate) async fn make_tables<S: Rig>(conn: &mut Connection<S>, accounts: &[i64]) -> Result<()> {
    S::execute(
        conn,
        "CREATE TABLE account (id BIGINT NOT NULL PRIMARY KEY, value BIGINT NOT NULL, version BIGINT NOT NULL,
                               fence BIGINT NOT NULL, cents BIGINT NOT NULL)",
    )
    .await?;
    S::execute(
        conn,
        "CREATE TABLE ledger (op BIGINT NOT NULL, account BIGINT NOT NULL, seen BIGINT NOT NULL,
                              fence BIGINT NOT NULL, PRIMARY KEY (op, account))",
    )
    .await?;
    let rows: Vec<_> = accounts.iter().map(|id| format!("({id}, 0, 1, 0, {CENTS})")).collect();
    let sql = format!("INSERT INTO account (id, value, version, fence, cents) VALUES {}", rows.join(", "));
    S::execute(conn, &sql).await?;
    Ok(())
}
