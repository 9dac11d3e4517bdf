//! `MariaDB` and `MySQL`: making and deleting databases, and what their system tables say about other sessions.

use std::time::{Duration, Instant};

use sqlx::{Connection, MySqlConnection, Result};
use url::Url;

use crate::throwaway::{GALERA_NODES, SharedServer};
use crate::{PlainSql, Server};

/// `MariaDB`, a throwaway one or the one at `LOCKKIT_MARIADB_URL`.
#[derive(Clone, Copy, Debug)]
pub struct MariaDb;

/// Oracle's `MySQL`, a throwaway one or the one at `LOCKKIT_MYSQL_URL`.
#[derive(Clone, Copy, Debug)]
pub struct MySql;

/// A cluster of `MariaDB` nodes that Galera replicates between: a throwaway one, or the one whose first node is at
/// `LOCKKIT_GALERA_URL` and whose others are at the ports that follow. A test's database is reached by the first node.
#[derive(Clone, Copy, Debug)]
pub struct Galera;

static MARIADB: SharedServer = SharedServer::new("mariadb", "LOCKKIT_MARIADB_URL");
static MYSQL: SharedServer = SharedServer::new("mysql", "LOCKKIT_MYSQL_URL");
static GALERA: SharedServer = SharedServer::new("galera", "LOCKKIT_GALERA_URL");

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

impl Server for Galera {
    type DB = sqlx::MySql;

    const NAME: &'static str = "Galera";

    const VERSION: &'static str = "
        SELECT CONCAT(variable_value, ' in ', VERSION()) FROM information_schema.global_status
        WHERE variable_name = 'WSREP_PROVIDER_VERSION'";

    fn left_out() -> Option<String> {
        std::env::var("LOCKKIT_WITHOUT_GALERA").ok().filter(|reason| !reason.is_empty())
    }

    async fn create_database() -> String {
        let url = GALERA.create_database::<sqlx::MySql>().await;
        for node in Self::nodes(&url) {
            wait_for_node(&node).await;
        }
        url
    }

    async fn drop_database(url: &str) -> Result<()> {
        GALERA.drop_database::<sqlx::MySql>(url, drop_sql).await
    }

    async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
        leftovers(conn).await
    }
}

impl Galera {
    /// The URLs of the database with this URL, by way of each node.
    ///
    /// # Panics
    /// If the URL is none of [`Server::create_database`].
    pub fn nodes(url: &str) -> Vec<String> {
        let url = Url::parse(url).expect("a URL");
        let port = url.port().expect("a URL with a port");
        let node = |number| {
            let mut url = url.clone();
            url.set_port(Some(port + number)).expect("a URL with a port");
            url.into()
        };
        (0..GALERA_NODES).map(node).collect()
    }

    /// A connection to this node on which each statement waits for what all nodes have committed before it. Without the
    /// wait, a node may not have applied yet what another one has answered as committed.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn caught_up(url: &str) -> Result<MySqlConnection> {
        let mut conn = MySqlConnection::connect(url).await?;
        sqlx::MySql::execute(&mut conn, "SET SESSION wsrep_sync_wait = 15").await?;
        // A wait of its own: a table that is not there yet is an error.
        sqlx::MySql::execute(&mut conn, "SELECT 1").await?;
        Ok(conn)
    }
}

/// Waits until the node has the database and takes statements.
async fn wait_for_node(url: &str) {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match Galera::caught_up(url).await {
            Ok(_) => return,
            Err(err) => assert!(Instant::now() < deadline, "{url} is not ready: {err}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn drop_sql(name: &str) -> String {
    // Without the timeout a transaction that a test left open would block this for a day.
    format!("SET lock_wait_timeout = 5; DROP DATABASE IF EXISTS {name}")
}

async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
    // Not from information_schema.innodb_trx, which is a cached copy for as long as anybody asks more often than every
    // 0.1 s: https://dev.mysql.com/doc/refman/8.4/en/innodb-information-schema-internal-data.html
    let sql = "
        WITH others AS (
            SELECT * FROM performance_schema.threads
            WHERE processlist_db = DATABASE() AND processlist_id <> CONNECTION_ID()
        )
        SELECT CONCAT_WS(
            ' ', 'session', processlist_id, 'is in', processlist_command, processlist_state, processlist_info
        )
        FROM others
        WHERE processlist_command <> 'Sleep'
        UNION ALL
        SELECT CONCAT_WS(' ', 'session', processlist_id, 'has an open transaction')
        FROM performance_schema.events_transactions_current JOIN others USING (thread_id)
        WHERE state = 'ACTIVE'
        UNION ALL
        SELECT CONCAT_WS(
            ' ', 'session', processlist_id, 'has a lock:', object_type, object_name, lock_type, lock_status
        )
        FROM performance_schema.metadata_locks JOIN others ON thread_id = owner_thread_id";
    Ok(sqlx::MySql::fetch_texts(conn, sql).await?.into_iter().flatten().collect())
}
