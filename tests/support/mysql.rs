//! `MariaDB` and `MySQL`: making and deleting databases, and what their system tables say about other sessions.

use sqlx::{MySqlConnection, Result};

use crate::throwaway::SharedServer;
use crate::{PlainSql, Server};

/// `MariaDB`, a throwaway one or the one at `LOCKKIT_MARIADB_URL`.
#[derive(Clone, Copy, Debug)]
pub struct MariaDb;

/// Oracle's `MySQL`, a throwaway one or the one at `LOCKKIT_MYSQL_URL`.
#[derive(Clone, Copy, Debug)]
pub struct MySql;

static MARIADB: SharedServer = SharedServer::new("mariadb", "LOCKKIT_MARIADB_URL");
static MYSQL: SharedServer = SharedServer::new("mysql", "LOCKKIT_MYSQL_URL");

impl Server for MariaDb {
    type DB = sqlx::MySql;

    const NAME: &'static str = "MariaDB";

    async fn create_database() -> String {
        MARIADB.create_database::<sqlx::MySql>().await
    }

    async fn drop_database(url: &str) -> Result<()> {
        MARIADB.drop_database::<sqlx::MySql>(url, drop_sql).await
    }

    async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
        leftovers(conn).await
    }
}

impl Server for MySql {
    type DB = sqlx::MySql;

    const NAME: &'static str = "MySQL";

    fn left_out() -> Option<String> {
        std::env::var("LOCKKIT_WITHOUT_MYSQL").ok().filter(|reason| !reason.is_empty())
    }

    async fn create_database() -> String {
        MYSQL.create_database::<sqlx::MySql>().await
    }

    async fn drop_database(url: &str) -> Result<()> {
        MYSQL.drop_database::<sqlx::MySql>(url, drop_sql).await
    }

    async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
        leftovers(conn).await
    }
}

fn drop_sql(name: &str) -> String {
    // Without the timeout a transaction that a test left open would block this for a day.
    format!("SET lock_wait_timeout = 5; DROP DATABASE IF EXISTS {name}")
}

async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
    // Not from information_schema.innodb_trx, which is a cached copy for as long as anybody asks more often than every 0.1 s:
    // https://dev.mysql.com/doc/refman/8.4/en/innodb-information-schema-internal-data.html
    let sql = "
        WITH others AS (
            SELECT * FROM performance_schema.threads
            WHERE processlist_db = DATABASE() AND processlist_id <> CONNECTION_ID()
        )
        SELECT CONCAT_WS(' ', 'session', processlist_id, 'is in', processlist_command, processlist_state, processlist_info)
        FROM others
        WHERE processlist_command <> 'Sleep'
        UNION ALL
        SELECT CONCAT_WS(' ', 'session', processlist_id, 'has an open transaction')
        FROM performance_schema.events_transactions_current JOIN others USING (thread_id)
        WHERE state = 'ACTIVE'
        UNION ALL
        SELECT CONCAT_WS(' ', 'session', processlist_id, 'has a lock:', object_type, object_name, lock_type, lock_status)
        FROM performance_schema.metadata_locks JOIN others ON thread_id = owner_thread_id";
    Ok(sqlx::MySql::fetch_texts(conn, sql).await?.into_iter().flatten().collect())
}
