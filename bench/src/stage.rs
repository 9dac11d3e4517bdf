//! The database of a run: made, put back to its start before each sample, and asked for what it has afterwards.

use std::time::Duration;

use anyhow::{Context, Result};
use lockkit::Stock;
use sqlx::{Connection, Database, MySql, Pool, Postgres, Sqlite};

use crate::floors::{Counted, Floor, STOCK};
use crate::scenarios;
use crate::servers::{Kind, Server};

/// The tables that a sample writes.
const TABLES: [&str; 7] =
    ["bench_answer", "bench_lease", "bench_row", "bench_stock", "lockkit_answer", "lockkit_lease", "lockkit_stock"];

/// What the database says after a sample.
#[derive(Debug, Clone, Copy)]
pub(crate) struct After {
    /// The value of row 0.
    pub(crate) value: u64,
    /// What is left of the guarded counter, and of lockkit's stock.
    pub(crate) counter_left: u64,
    pub(crate) stock_left: u64,
    pub(crate) counted: Option<Counted>,
}

/// A database on a server, by its kind.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    pub(crate) kind: Kind,
    pub(crate) url: String,
    pub(crate) version: String,
}

/// Calls a function that is generic over the database.
macro_rules! on {
    ($kind:expr, $function:ident($($argument:expr),*)) => {
        match $kind {
            Kind::Postgres => $function::<Postgres>($($argument),*).await,
            Kind::MariaDb | Kind::MySql => $function::<MySql>($($argument),*).await,
            Kind::Sqlite => $function::<Sqlite>($($argument),*).await,
        }
    };
}

impl Stage {
    /// Makes a database with all tables.
    pub(crate) async fn make(server: &Server) -> Result<Self> {
        let name = format!("lockkit_bench_{}", std::process::id());
        let (kind, url) = (server.kind, server.database(&name)?);
        if kind != Kind::Sqlite {
            let sql = format!("CREATE DATABASE {name}");
            on!(kind, execute(server.administrator(), &sql)).with_context(|| format!("cannot use {}", kind.name()))?;
        }
        let version = on!(kind, set_up(&url, kind))?;
        Ok(Self { kind, url, version })
    }

    /// Deletes the database.
    pub(crate) async fn strike(self, server: &Server) -> Result<()> {
        if self.kind == Kind::Sqlite {
            let path = self.url.trim_start_matches("sqlite://").trim_end_matches("?mode=rwc");
            for ending in ["", "-wal", "-shm"] {
                let _ = std::fs::remove_file(format!("{path}{ending}"));
            }
            return Ok(());
        }
        let name = format!("lockkit_bench_{}", std::process::id());
        let sql = match self.kind {
            Kind::Postgres => format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"),
            _ => format!("DROP DATABASE IF EXISTS {name}"),
        };
        on!(self.kind, execute(server.administrator(), &sql))
    }

    /// Puts everything back to its start, with rows for so many keys.
    pub(crate) async fn reset(&self, rows: u32) -> Result<()> {
        on!(self.kind, reset(&self.url, rows))
    }

    /// What the server has counted so far.
    pub(crate) async fn counted(&self) -> Result<Option<Counted>> {
        on!(self.kind, counted(&self.url))
    }

    pub(crate) async fn after(&self) -> Result<After> {
        on!(self.kind, after(&self.url))
    }
}

async fn execute<DB: Floor>(url: &str, sql: &str) -> Result<()> {
    // A pool, because it keeps trying while a server that listens is not ready yet.
    let pool: Pool<DB> = pool(url).await?;
    DB::execute(&mut *pool.acquire().await?, sql).await?;
    pool.close().await;
    Ok(())
}

async fn pool<DB: Database>(url: &str) -> sqlx::Result<Pool<DB>> {
    sqlx::pool::PoolOptions::new().max_connections(2).acquire_timeout(Duration::from_secs(20)).connect(url).await
}

async fn set_up<DB: Floor>(url: &str, kind: Kind) -> Result<String> {
    let pool: Pool<DB> = pool(url).await?;
    let mut conn = pool.acquire().await?;
    if kind == Kind::Sqlite {
        DB::execute(&mut conn, "PRAGMA journal_mode = WAL").await?;
    }
    for table in DB::TABLES {
        DB::execute(&mut conn, table).await?;
    }
    let version = DB::fetch_texts(&mut conn, kind.version()).await?.into_iter().next().flatten().unwrap_or_default();
    drop(conn);
    lockkit::migrate(&pool).await?;
    pool.close().await;
    Ok(version.split([' ', '-']).next().unwrap_or_default().to_owned())
}

async fn reset<DB: Floor>(url: &str, rows: u32) -> Result<()> {
    let pool: Pool<DB> = pool(url).await?;
    let mut conn = pool.acquire().await?;
    for table in TABLES {
        DB::execute(&mut conn, &format!("DELETE FROM {table}")).await?;
    }
    let expired = if DB::NAME == "PostgreSQL" {
        "'-infinity'"
    } else if DB::NAME == "SQLite" {
        "0"
    } else {
        "'2000-01-01'"
    };
    let leases: Vec<_> = (0..rows).map(|key| format!("('{}', NULL, 1, {expired})", crate::floors::name(key))).collect();
    let values: Vec<_> = (0..rows).map(|key| format!("({key}, 0, 1)")).collect();
    DB::execute(&mut conn, &format!("INSERT INTO bench_lease VALUES {}", leases.join(", "))).await?;
    DB::execute(&mut conn, &format!("INSERT INTO bench_row VALUES {}", values.join(", "))).await?;
    DB::execute(&mut conn, &format!("INSERT INTO bench_stock VALUES (0, {STOCK})")).await?;
    if DB::NAME == "PostgreSQL" {
        // So that no sample pays for the rows of the one before.
        for table in TABLES {
            DB::execute(&mut conn, &format!("VACUUM ANALYZE {table}")).await?;
        }
    }
    drop(conn);
    Stock::new(pool.clone(), scenarios::STOCK).put(STOCK).await?;
    pool.close().await;
    Ok(())
}

async fn counted<DB: Floor>(url: &str) -> Result<Option<Counted>> {
    let mut conn = DB::Connection::connect(url).await?;
    let counted = DB::counted(&mut conn).await?;
    conn.close().await?;
    Ok(counted)
}

async fn after<DB: Floor>(url: &str) -> Result<After> {
    let pool: Pool<DB> = pool(url).await?;
    let mut conn = pool.acquire().await?;
    // PostgreSQL publishes what a session did when it ends.
    let mut counted = DB::counted(&mut conn).await?;
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(25)).await;
        let again = DB::counted(&mut conn).await?;
        if DB::NAME != "PostgreSQL" || again.is_some() && again == counted {
            break;
        }
        counted = again;
    }
    let value = number::<DB>(&mut conn, "SELECT value FROM bench_row WHERE id = 0").await?;
    let counter_left = number::<DB>(&mut conn, "SELECT quantity FROM bench_stock WHERE id = 0").await?;
    drop(conn);
    let stock_left = Stock::new(pool.clone(), scenarios::STOCK).left().await?;
    pool.close().await;
    Ok(After { value, counter_left, stock_left, counted })
}

async fn number<DB: Floor>(conn: &mut DB::Connection, sql: &str) -> Result<u64> {
    let text = DB::fetch_texts(conn, sql).await?.into_iter().next().flatten();
    text.with_context(|| format!("no row: {sql}"))?.parse().with_context(|| sql.to_owned())
}
