//! What kind of server a pool is connected to, asked once for each server.

use std::path::PathBuf;

use parking_lot::Mutex;
use sqlx::{MySql, MySqlConnection, Pool, Row};

use crate::observe;

/// A server that has answered what it is.
struct Server {
    host: String,
    port: u16,
    socket: Option<PathBuf>,
    kind: Kind,
}

/// What other servers a server works with.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// None that takes writes for it.
    Alone,
    /// It is a node of a Galera cluster.
    Galera,
    /// It is a member of a replication group.
    Group,
}

static SERVERS: Mutex<Vec<Server>> = Mutex::new(Vec::new());

const OF_A_CLUSTER: &str = "the server is a node of a Galera cluster: row locks, named locks and session locks exclude nobody who uses another \
     node; of two transactions that write the same row, one is a deadlock victim, at the latest in its commit";

const LOGS_STATEMENTS: &str = "the server writes its binary log as statements, and refuses writes in the READ COMMITTED transactions of `begin` \
     (error 1665): set `binlog_format` to ROW or MIXED";

/// Asks the server what it is, unless it has answered before, and warns once of uses for which it is not suited. Calls that
/// come before the first answer ask as well: none goes on without it.
pub(super) async fn look_at(conn: &mut MySqlConnection, pool: &Pool<MySql>) {
    if kind(pool).is_some() {
        return;
    }
    let asked = "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'; \
                 SHOW VARIABLES WHERE Variable_name IN \
                 ('wsrep_on', 'group_replication_group_name', 'log_bin', 'binlog_format')";
    let Ok(rows) = sqlx::raw_sql(asked).fetch_all(conn).await else { return };
    let (mut nodes, mut kind, mut has_log, mut logs_statements) = (0, Kind::Alone, false, false);
    for row in rows {
        let (Ok(name), Ok(value)) = (row.try_get::<String, _>(0), row.try_get::<String, _>(1)) else { return };
        match &*name.to_ascii_lowercase() {
            "wsrep_cluster_size" => nodes = value.parse().unwrap_or(0),
            // A cluster of one node may grow, and a node that has lost the others knows no size.
            "wsrep_on" if value == "ON" => kind = Kind::Galera,
            "group_replication_group_name" if !value.is_empty() => kind = Kind::Group,
            "log_bin" => has_log = value == "ON",
            "binlog_format" => logs_statements = value == "STATEMENT",
            _ => {}
        }
    }
    if !learn(pool, if nodes > 0 { Kind::Galera } else { kind }) {
        return;
    }
    if has_log && logs_statements {
        observe::caveat(LOGS_STATEMENTS);
    }
    if nodes > 1 {
        observe::caveat(OF_A_CLUSTER);
    }
}

/// Whether the server is known to be neither a node of a Galera cluster nor a member of a replication group.
pub(super) fn is_alone(pool: &Pool<MySql>) -> bool {
    kind(pool) == Some(Kind::Alone)
}

/// Whether the server is known to be a node of a Galera cluster.
pub(super) fn is_galera(pool: &Pool<MySql>) -> bool {
    kind(pool) == Some(Kind::Galera)
}

fn kind(pool: &Pool<MySql>) -> Option<Kind> {
    SERVERS.lock().iter().find(|it| it.is_at(pool)).map(|it| it.kind)
}

/// Returns whether this is news.
fn learn(pool: &Pool<MySql>, kind: Kind) -> bool {
    let mut servers = SERVERS.lock();
    if servers.iter().any(|it| it.is_at(pool)) {
        return false;
    }
    let options = pool.connect_options();
    let (host, port, socket) = (options.get_host().to_owned(), options.get_port(), options.get_socket().cloned());
    servers.push(Server { host, port, socket, kind });
    true
}

impl Server {
    fn is_at(&self, pool: &Pool<MySql>) -> bool {
        let options = pool.connect_options();
        self.port == options.get_port()
            && self.host == options.get_host()
            && self.socket.as_ref() == options.get_socket()
    }
}
