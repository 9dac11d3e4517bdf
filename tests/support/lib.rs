//! What the tests stand on: a fresh database for every test, on every kind of server, and questions to ask it.
//!
//! - [`TestDb`] is one test's database; [`on_every_database!`] writes a test for each kind of it from one body.
//! - [`Server`] is a kind of database, and [`Backend`] one that `lockkit` has its locks in.
//! - [`PgBouncer`] is a pooler between a test and `PostgreSQL`.
//! - [`User`] is a user of a server with few rights, [`Process`] a program of the tests, [`Deadlock`] what a deadlock
//!   leaves.
//! - [`Proxy`] stands between a test and its server, counts round trips and breaks connections.
//!
//! The servers are throwaway ones, started by the first test that needs them; see `throwaway`. The environment
//! variables `LOCKKIT_POSTGRES_URL`, `LOCKKIT_MARIADB_URL`, `LOCKKIT_MYSQL_URL` and `LOCKKIT_GALERA_URL` name servers
//! to use instead.

mod answers;
mod deadlock;
pub mod draws;
mod example;
pub mod migrations;
mod mysql;
mod on_every_database;
pub mod passes;
mod pgbouncer;
mod plain_sql;
mod postgres;
mod process;
pub mod provider;
mod proxy;
mod refusal;
mod server;
mod sqlite;
mod task;
mod test_db;
pub mod throwaway;
mod user;

pub use crate::answers::assert_answers_cost;
pub use crate::deadlock::Deadlock;
pub use crate::example::run_example;
pub use crate::mysql::{Cluster, Galera, Group, MariaDb, MySql};
pub use crate::pgbouncer::PgBouncer;
pub use crate::plain_sql::PlainSql;
pub use crate::postgres::{Postgres, pool_of_a_pretender};
pub use crate::process::Process;
pub use crate::proxy::Proxy;
pub use crate::refusal::refusal;
pub use crate::server::{Backend, Server};
pub use crate::sqlite::Sqlite;
pub use crate::task::{JoinSet, spawn};
pub use crate::test_db::TestDb;
pub use crate::user::User;
