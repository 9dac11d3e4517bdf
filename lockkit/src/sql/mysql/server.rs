//! What kind of server a pool is connected to, asked once for each server.

use std::{
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sqlx::{MySql, MySqlConnection, Pool, Row};

use crate::observe;

/// A server that was used in this process.
struct Server {
    host: String,
    port: u16,
    socket: Option<PathBuf>,
    /// Whether it is no node of a Galera cluster or of a replication group. `None` until it has answered.
    is_alone: Option<bool>,
}

static SERVERS: Mutex<Vec<Server>> = Mutex::new(Vec::new());

const OF_A_CLUSTER: &str = "the server is a node of a Galera cluster: row locks, named locks and session locks exclude nobody who uses another \
     node; of two transactions that write the same row, one is a deadlock victim, at the latest in its commit";

const LOGS_STATEMENTS: &str = "the server writes its binary log as statements, and refuses writes in the READ COMMITTED transactions of `begin` \
     (error 1665): set `binlog_format` to ROW or MIXED";

/// Asks the server what it is if this is its first use, and warns of uses for which it is not suited.
pub(super) async fn look_at(conn: &mut MySqlConnection, pool: &Pool<MySql>) {
    if !is_first_use(pool) {
        return;
    }
    let _asking = Asking(pool);
    let asked = "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'; \
                 SHOW VARIABLES WHERE Variable_name IN \
                 ('wsrep_on', 'group_replication_group_name', 'log_bin', 'binlog_format')";
    let Ok(rows) = sqlx::raw_sql(asked).fetch_all(conn).await else { return };
    let (mut nodes, mut is_alone, mut has_log, mut logs_statements) = (0, true, false, false);
    for row in rows {
        let (Ok(name), Ok(value)) = (row.try_get::<String, _>(0), row.try_get::<String, _>(1)) else { return };
        match &*name.to_ascii_lowercase() {
            "wsrep_cluster_size" => nodes = value.parse().unwrap_or(0),
            // A cluster of one node may grow, and a node that has lost the others knows no size.
            "wsrep_on" => is_alone &= value != "ON",
            "group_replication_group_name" => is_alone &= value.is_empty(),
            "log_bin" => has_log = value == "ON",
            "binlog_format" => logs_statements = value == "STATEMENT",
            _ => {}
        }
    }
    if has_log && logs_statements {
        observe::caveat(LOGS_STATEMENTS);
    }
    if nodes > 1 {
        observe::caveat(OF_A_CLUSTER);
    }
    if let Some(it) = find(&mut servers(), pool) {
        it.is_alone = Some(is_alone && nodes == 0);
    }
}

/// A question to a server. If it ends without an answer, the next use asks again.
struct Asking<'p>(&'p Pool<MySql>);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        servers().retain(|it| it.is_alone.is_some() || !it.is_at(self.0));
    }
}

/// Whether the server is known to be no node of a cluster.
pub(super) fn is_alone(pool: &Pool<MySql>) -> bool {
    find(&mut servers(), pool).and_then(|it| it.is_alone) == Some(true)
}

fn is_first_use(pool: &Pool<MySql>) -> bool {
    let mut servers = servers();
    if find(&mut servers, pool).is_some() {
        return false;
    }
    let options = pool.connect_options();
    let (host, port, socket) = (options.get_host().to_owned(), options.get_port(), options.get_socket().cloned());
    servers.push(Server { host, port, socket, is_alone: None });
    true
}

fn find<'s>(servers: &'s mut [Server], pool: &Pool<MySql>) -> Option<&'s mut Server> {
    servers.iter_mut().find(|it| it.is_at(pool))
}

impl Server {
    fn is_at(&self, pool: &Pool<MySql>) -> bool {
        let options = pool.connect_options();
        self.port == options.get_port()
            && self.host == options.get_host()
            && self.socket.as_ref() == options.get_socket()
    }
}

/// Ignores poisoning: no code panics while it holds the lock.
fn servers() -> MutexGuard<'static, Vec<Server>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}
