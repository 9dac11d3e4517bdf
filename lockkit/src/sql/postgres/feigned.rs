//! Detects a server behind PostgreSQL's protocol that only pretends to have advisory locks: it grants each request, and
//! holds nothing (as `CockroachDB` did: <https://github.com/cockroachdb/cockroach/issues/13546>).
//!
//! The first transaction that lockkit begins in a pool looks for that. A connection does not know its pool, so once
//! such a server was found, each named lock of this process is looked for after it was granted.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use sqlx::{AssertSqlSafe, Connection, PgConnection, Pool, Postgres, Row, raw_sql};

use super::pooler::query;
use crate::sql::{pool_state::of_pool, statement::statement};

/// What the servers of this process do.
static FOUND: AtomicU8 = AtomicU8::new(NOTHING);

const NOTHING: u8 = 0;
const LOCKS: u8 = 1;
const PRETENDS: u8 = 2;

/// Whether the server of a pool was probed.
#[derive(Default)]
struct Probed(AtomicBool);

/// Whether this session holds the advisory lock with this number.
fn holds(number: &str) -> String {
    format!(
        "EXISTS (
             SELECT 1 FROM pg_locks
             WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = pg_backend_pid()
               AND (classid::bigint << 32 | objid::bigint) = {number}
         )"
    )
}

/// Probes the server of this pool, unless that was done. One round trip, if the server shows its locks.
pub(super) async fn look_for(conn: &mut PgConnection, pool: &Pool<Postgres>) {
    let probed = of_pool::<Probed, _>(pool);
    if probed.0.load(Ordering::Relaxed) {
        return;
    }
    match pretends(conn, pool).await {
        Ok(true) => FOUND.store(PRETENDS, Ordering::Relaxed),
        Ok(false) => found_locks(),
        // Its answer is no better the next time.
        Err(sqlx::Error::Database(_)) => {}
        // The next statement fails in the same way, and the probe runs again after it.
        Err(_) => return,
    }
    probed.0.store(true, Ordering::Relaxed);
}

fn found_locks() {
    // A server that pretends stays known.
    let _ = FOUND.compare_exchange(NOTHING, LOCKS, Ordering::Relaxed, Ordering::Relaxed);
}

async fn pretends(conn: &mut PgConnection, pool: &Pool<Postgres>) -> sqlx::Result<bool> {
    let number = format!("'{}'::bigint", fastrand::i64(..));
    let lock = format!("SELECT pg_try_advisory_xact_lock({number}) AS granted");
    // One message is one transaction.
    let rows = raw_sql(AssertSqlSafe(format!("{lock}; SELECT {}", holds(&number)))).fetch_all(conn).await?;
    let mut answers = rows.iter().map(|row| row.try_get::<bool, _>(0));
    let (granted, is_held) = (answers.next().transpose()?, answers.next().transpose()?);
    if granted != Some(true) || is_held == Some(true) {
        return Ok(false);
    }
    // A server may lock, and not show it. So another session requests the same lock. Neither of the two is of the pool,
    // which must not get back an open transaction.
    let options = pool.connect_options();
    let mut holder = PgConnection::connect_with(&options).await?;
    raw_sql(AssertSqlSafe(format!("BEGIN; {lock}"))).execute(&mut holder).await?;
    let mut other = PgConnection::connect_with(&options).await?;
    raw_sql(AssertSqlSafe(lock)).fetch_one(&mut other).await?.try_get("granted")
}

/// What the server calls itself, if it granted the lock with this number in the transaction and does not hold it.
pub(super) async fn feigned(conn: &mut PgConnection, number: i64) -> sqlx::Result<Option<String>> {
    if FOUND.load(Ordering::Relaxed) == LOCKS {
        return Ok(None);
    }
    let sql = statement!("SELECT {holds} AS is_held, version() AS server", holds = holds("$1"));
    let row = query(sql).bind(number).fetch_one(conn).await?;
    if row.try_get("is_held")? {
        found_locks();
        return Ok(None);
    }
    row.try_get("server").map(Some)
}
