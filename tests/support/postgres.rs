//! `PostgreSQL`: making and deleting databases, and what its system views say about other sessions.

use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{PgConnection, Result};

use crate::throwaway::SharedServer;
use crate::{PlainSql, Server, TestDb};

/// `PostgreSQL`, a throwaway one or the one at `LOCKKIT_POSTGRES_URL`.
#[derive(Clone, Copy, Debug)]
pub struct Postgres;

static SERVER: SharedServer = SharedServer::new("postgres", "LOCKKIT_POSTGRES_URL");

impl Server for Postgres {
    type DB = sqlx::Postgres;

    const NAME: &'static str = "PostgreSQL";
    const VERSION: &'static str = "SHOW server_version";

    async fn create_database() -> String {
        SERVER.create_database::<sqlx::Postgres>().await
    }

    async fn drop_database(url: &str) -> Result<()> {
        let sql = |name: &str| format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
        SERVER.drop_database::<sqlx::Postgres>(url, sql).await
    }

    async fn leftovers(conn: &mut PgConnection) -> Result<Vec<String>> {
        // A session which is idle outside a transaction can hold advisory locks, so locks are asked for on their own.
        let sql = "
            WITH others AS (
                SELECT * FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
            )
            SELECT format('session %s is %s, waiting for %s: %s', pid, state, coalesce(wait_event, 'nothing'), query)
            FROM others
            WHERE state <> 'idle'
            UNION ALL
            SELECT format('session %s %s a %s lock, %s: %s', pid, CASE WHEN granted THEN 'holds' ELSE 'waits for' END,
                locktype, mode, coalesce(relation::regclass::text, concat_ws(', ', classid, objid, transactionid)))
            FROM pg_locks JOIN others USING (pid)
            WHERE locktype <> 'virtualxid'";
        Ok(sqlx::Postgres::fetch_texts(conn, sql).await?.into_iter().flatten().collect())
    }
}

/// A pool of the database whose server answers every request for an advisory lock with success, and locks nothing.
///
/// # Panics
/// If the server refuses.
pub async fn pool_of_a_pretender(db: &TestDb<Postgres>) -> PgPool {
    db.execute("CREATE SCHEMA pretender").await;
    for (function, returns, answer) in [
        ("pg_try_advisory_lock", "boolean", "SELECT true"),
        ("pg_advisory_lock", "void", "SELECT"),
        ("pg_try_advisory_xact_lock", "boolean", "SELECT true"),
        ("pg_advisory_xact_lock", "void", "SELECT"),
    ] {
        let sql = format!("CREATE FUNCTION pretender.{function}(bigint) RETURNS {returns} LANGUAGE sql AS '{answer}'");
        db.execute(&sql).await;
    }
    let options: PgConnectOptions = db.url.parse().expect("the URL of a test's database");
    let options = options.options([("search_path", "pretender,pg_catalog,public")]);
    PgPool::connect_with(options).await.expect("connect to the pretender")
}
