//! `MariaDB` and `MySQL`: making and deleting databases, and what their system tables say about other sessions.

use std::time::{Duration, Instant};

use sqlx::{Connection, MySqlConnection, Result};
use tokio::time::sleep;
use url::Url;

use crate::throwaway::{GALERA_NODES, GROUP_MEMBERS, SharedServer};
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

/// A throwaway replication group of `MySQL` in which each member is a primary. The first has the database of a test.
#[derive(Clone, Copy, Debug)]
pub struct Group;

/// Servers that all take writes, and that replicate between themselves.
pub trait Cluster: Server<DB = sqlx::MySql> {
    /// How many there are. Their ports follow each other.
    const NODES: u16;

    /// SQL after which a session's statements wait for what all nodes have committed before them. Without the wait, a
    /// node may not have applied yet what another one has answered as committed.
    const CATCHES_UP: &'static str;

    /// The URLs of the database with this URL, by way of each node.
    ///
    /// # Panics
    /// If the URL is none of [`Server::create_database`].
    fn nodes(url: &str) -> Vec<String> {
        let url = Url::parse(url).expect("a URL");
        let port = url.port().expect("a URL with a port");
        let node = |number| {
            let mut url = url.clone();
            url.set_port(Some(port + number)).expect("a URL with a port");
            url.into()
        };
        (0..Self::NODES).map(node).collect()
    }

    /// A connection to this node on which each statement waits for what all nodes have committed before it.
    ///
    /// A node gets a minute for it. It lacks the database while it joins, and one of Galera that has no majority at the
    /// moment, for instance because a busy machine held it up, answers error 1205 at once.
    ///
    /// # Errors
    /// The last one of the database.
    fn caught_up(url: &str) -> impl Future<Output = Result<MySqlConnection>> + Send {
        async move {
            let deadline = Instant::now() + Duration::from_mins(1);
            loop {
                match catch_up(url, Self::CATCHES_UP).await {
                    Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)).await,
                    result => return result,
                }
            }
        }
    }
}

impl Cluster for Galera {
    const NODES: u16 = GALERA_NODES;

    const CATCHES_UP: &'static str = "SET SESSION wsrep_sync_wait = 15";
}

impl Cluster for Group {
    const NODES: u16 = GROUP_MEMBERS;

    const CATCHES_UP: &'static str = "SET SESSION group_replication_consistency = 'BEFORE'";
}

static MARIADB: SharedServer = SharedServer::new("mariadb", "LOCKKIT_MARIADB_URL");
static MYSQL: SharedServer = SharedServer::new("mysql", "LOCKKIT_MYSQL_URL");
static GALERA: SharedServer = SharedServer::new("galera", "LOCKKIT_GALERA_URL");
static GROUP: SharedServer = SharedServer::new("group", "LOCKKIT_GROUP_URL");

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
        wait_for_nodes::<Self>(&url).await;
        url
    }

    async fn drop_database(url: &str) -> Result<()> {
        GALERA.drop_database::<sqlx::MySql>(url, drop_sql).await
    }

    async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
        leftovers(conn).await
    }
}

impl Server for Group {
    type DB = sqlx::MySql;

    const NAME: &'static str = "group replication";

    fn left_out() -> Option<String> {
        let one = std::env::var_os("LOCKKIT_MYSQL_URL").map(|_| "LOCKKIT_MYSQL_URL is one server".to_owned());
        MySql::left_out().or(one)
    }

    async fn create_database() -> String {
        let mut first = GROUP.url().clone();
        first.set_path("");
        for node in Self::nodes(first.as_str()) {
            join(&node).await;
        }
        let url = GROUP.create_database::<sqlx::MySql>().await;
        wait_for_nodes::<Self>(&url).await;
        url
    }

    async fn drop_database(_url: &str) -> Result<()> {
        // A member that is still to write into it what another one has committed would leave the group.
        Ok(())
    }

    async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
        leftovers(conn).await
    }
}

/// Waits until a member takes part in the group. One that looked for the group before there was one is told again.
async fn join(url: &str) {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let state = async {
            let mut conn = MySqlConnection::connect(url).await?;
            let sql = "SELECT member_state FROM performance_schema.replication_group_members
                       WHERE member_id IN (@@server_uuid, '')";
            let state = Group::fetch_text(&mut conn, sql).await?.unwrap_or_default();
            if state == "OFFLINE" || state == "ERROR" {
                Group::execute(&mut conn, "START GROUP_REPLICATION").await?;
            }
            Ok::<_, sqlx::Error>(state)
        };
        match state.await {
            Ok(state) if state == "ONLINE" => return,
            state => assert!(Instant::now() < deadline, "{url} is not in the group: {state:?}"),
        }
        sleep(Duration::from_millis(100)).await;
    }
}

async fn catch_up(url: &str, catches_up: &str) -> Result<MySqlConnection> {
    let mut conn = MySqlConnection::connect(url).await?;
    sqlx::MySql::execute(&mut conn, catches_up).await?;
    // A wait of its own: a table that is not there yet is an error.
    sqlx::MySql::execute(&mut conn, "SELECT 1").await?;
    Ok(conn)
}

/// Waits until each node has the database and takes statements.
async fn wait_for_nodes<S: Cluster>(url: &str) {
    for node in S::nodes(url) {
        S::caught_up(&node).await.unwrap_or_else(|err| panic!("{node} is not ready: {err}"));
    }
}

fn drop_sql(name: &str) -> String {
    // Without the timeout a transaction that a test left open would block this for a day.
    format!("SET lock_wait_timeout = 5; DROP DATABASE IF EXISTS {name}")
}

async fn leftovers(conn: &mut MySqlConnection) -> Result<Vec<String>> {
    // Not from information_schema.innodb_trx, which is a cached copy for as long as anybody asks more often than every
    // 0.1 s: https://dev.mysql.com/doc/refman/8.4/en/innodb-information-schema-internal-data.html
    // A session that frees items has answered, and one that commits leaves nothing but what is listed below.
    let sql = "
        WITH others AS (
            SELECT * FROM performance_schema.threads
            WHERE processlist_db = DATABASE() AND processlist_id <> CONNECTION_ID()
        )
        SELECT CONCAT_WS(
            ' ', 'session', processlist_id, 'is in', processlist_command, processlist_state, processlist_info
        )
        FROM others
        WHERE processlist_command <> 'Sleep' AND NOT processlist_state <=> 'freeing items'
            AND NOT processlist_info <=> 'COMMIT'
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
