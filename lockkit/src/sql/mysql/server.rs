//! What kind of server a pool is connected to, asked once for each pool. The address of a server says little: another
//! one may have it later.

use std::{path::PathBuf, sync::OnceLock};

use sqlx::{MySql, MySqlConnection, Pool, Row};

use super::text::Grammar;
use crate::{mutex::Mutex, observe, sql::pool_state::of_pool};

/// What the server of a pool has answered.
type Known = OnceLock<(Grammar, Kind)>;

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

/// The servers whose limitations were reported.
static SERVERS: Mutex<Vec<Server>> = Mutex::new(Vec::new());

/// The host, port and socket of a server.
type Server = (String, u16, Option<PathBuf>);

const OF_A_CLUSTER: &str = "the server is a node of a Galera cluster: row locks, named locks and session locks \
                            exclude nobody who uses another node; of two transactions that write the same row, one is \
                            a deadlock victim, at the latest in its commit";

const OF_A_GROUP: &str = "the server is a member of a replication group with several primaries: row locks, named locks \
                          and session locks exclude nobody who uses another primary; of two transactions that write \
                          the same row, one is rolled back, at the latest in its commit";

const LOGS_STATEMENTS: &str = "the server writes its binary log as statements, and refuses writes in the READ \
                               COMMITTED transactions of `begin` (error 1665): set `binlog_format` to ROW or MIXED";

/// Asks the server of the pool what it is, unless it has answered before, and warns once of uses for which it is not
/// suited. Calls that come before the first answer ask as well: none goes on without it.
///
/// MariaDB alone has a variable `max_statement_time`. Its version is no mark: the configuration may set another one.
pub(super) async fn look_at(conn: &mut MySqlConnection, pool: &Pool<MySql>) -> sqlx::Result<Grammar> {
    let known = of_pool::<Known, _>(pool);
    if let Some((grammar, _)) = known.get() {
        return Ok(*grammar);
    }
    let asked = "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'; \
                 SHOW VARIABLES WHERE Variable_name IN \
                 ('max_statement_time', 'wsrep_on', 'group_replication_group_name', \
                  'group_replication_single_primary_mode', 'log_bin', 'binlog_format')";
    let (mut grammar, mut nodes, mut kind) = (Grammar::MySql, 0, Kind::Alone);
    let (mut has_log, mut logs_statements, mut one_primary) = (false, false, true);
    for row in sqlx::raw_sql(asked).fetch_all(conn).await? {
        let (name, value): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        match &*name.to_ascii_lowercase() {
            "max_statement_time" => grammar = Grammar::MariaDb,
            "wsrep_cluster_size" => nodes = value.parse().unwrap_or(0),
            // A cluster of one node may grow, and a node that has lost the others knows no size.
            "wsrep_on" if value == "ON" => kind = Kind::Galera,
            "group_replication_group_name" if !value.is_empty() => kind = Kind::Group,
            "group_replication_single_primary_mode" => one_primary = value == "ON",
            "log_bin" => has_log = value == "ON",
            "binlog_format" => logs_statements = value == "STATEMENT",
            _ => {}
        }
    }
    let kind = if nodes > 0 { Kind::Galera } else { kind };
    if known.set((grammar, kind)).is_err() || !is_new(pool) {
        return Ok(grammar);
    }
    if has_log && logs_statements {
        observe::caveat(LOGS_STATEMENTS);
    }
    if nodes > 1 {
        observe::caveat(OF_A_CLUSTER);
    }
    if kind == Kind::Group && !one_primary {
        observe::caveat(OF_A_GROUP);
    }
    Ok(grammar)
}

/// Whether the server is known to be neither a node of a Galera cluster nor a member of a replication group.
pub(super) fn is_alone(pool: &Pool<MySql>) -> bool {
    known(pool).is_some_and(|(_, kind)| kind == Kind::Alone)
}

/// Whether the server is known to be a node of a Galera cluster.
pub(super) fn is_galera(pool: &Pool<MySql>) -> bool {
    known(pool).is_some_and(|(_, kind)| kind == Kind::Galera)
}

fn known(pool: &Pool<MySql>) -> Option<(Grammar, Kind)> {
    of_pool::<Known, _>(pool).get().copied()
}

/// Whether no other pool was connected to this server.
fn is_new(pool: &Pool<MySql>) -> bool {
    let options = pool.connect_options();
    let server = (options.get_host().to_owned(), options.get_port(), options.get_socket().cloned());
    let mut servers = SERVERS.lock();
    let is_new = !servers.contains(&server);
    if is_new {
        servers.push(server);
    }
    is_new
}
