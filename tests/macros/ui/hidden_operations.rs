// A lease is released by its holder. The statement behind it cannot be called past the task that renews the lease.

use std::time::Duration;

use lockkit::{Key, dialect::LeaseOps, store::Token};
use sqlx::{Sqlite, SqliteConnection};

async fn release(conn: &mut SqliteConnection, key: &Key, token: Token) {
    let _ = Sqlite::lease_release(conn, (), key, token, Duration::ZERO).await;
    let _ = <Sqlite as LeaseOps>::lease_release(conn, (), key, token, Duration::ZERO).await;
    let _ = <Sqlite as lockkit::sql::LeaseStatements>::lease_release(conn, (), key, token, Duration::ZERO).await;
}

fn main() {}
