//! Checks that a dropped future leaves nothing in a database: no lease, and no pooled connection in a transaction.

use std::{collections::HashSet, future::Future, pin::Pin, time::Duration};

use sqlx::{Connection, Pool};
use tokio::time::{Instant, sleep, timeout};

use super::cancel::{Check, Checked, DropAtEveryAwait};
use crate::{
    lease::store::LeaseStore,
    sql::{LeaseOps, counted_depth, tx::begin},
    value::{
        error::{Error, Result},
        token::Token,
    },
};

/// Time limit of the cleanup in the background after a drop.
const CLEAN_UP: Duration = Duration::from_secs(5);

/// Time limit for the pool to hand out all of its connections.
const WHOLE: Duration = Duration::from_secs(20);

impl<Prepare> DropAtEveryAwait<'_, Prepare> {
    /// After each drop, checks the database for leftovers. A leftover is a lease that was not held before and is not
    /// released within 5 s, or a connection of the pool that has an open transaction, is broken or was not returned.
    ///
    /// Takes all connections of the pool each time, so use a small pool. It checks only the connections of this pool,
    /// not other sessions.
    pub fn checking<DB: LeaseOps>(mut self, pool: &Pool<DB>) -> Self {
        self.checks.push(Box::new(NothingLeft { pool: pool.clone(), before: HashSet::new() }));
        self
    }
}

struct NothingLeft<DB: LeaseOps> {
    pool: Pool<DB>,
    /// The leases that were held before.
    before: HashSet<Token>,
}

impl<DB: LeaseOps> Check for NothingLeft<DB> {
    fn begin(&mut self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(async {
            let held = held_leases(&self.pool).await.unwrap_or_else(|err| panic!("cannot list leases: {err}"));
            self.before = held.into_iter().map(|(token, _)| token).collect();
        })
    }

    fn check(&mut self, _completed: bool) -> Checked<'_> {
        Box::pin(async {
            no_lease_is_left(&self.pool, &self.before).await?;
            match timeout(WHOLE, pool_is_whole(&self.pool)).await {
                Ok(checked) => checked,
                Err(_) => Err(format!("the pool is not whole after {WHOLE:?}")),
            }
        })
    }
}

async fn no_lease_is_left<DB: LeaseOps>(pool: &Pool<DB>, before: &HashSet<Token>) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let held = held_leases(pool).await.map_err(|err| format!("cannot list leases: {err}"))?;
        let left: Vec<_> = held.into_iter().filter(|(token, _)| !before.contains(token)).map(|(_, key)| key).collect();
        if left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > CLEAN_UP {
            return Err(format!("leases are held after {CLEAN_UP:?}: {}", left.join(", ")));
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// The leases with a holder. A key that stays taken for its `min_hold` has none.
async fn held_leases<DB: LeaseOps>(pool: &Pool<DB>) -> Result<Vec<(Token, String)>> {
    match pool.lease_list("", 10_000).await {
        Ok(held) => {
            let held = held.into_iter().filter(|it| !it.token.is_nobody());
            Ok(held.map(|it| (it.token, it.info.key.to_string())).collect())
        }
        Err(Error::NotMigrated { .. }) => Ok(Vec::new()),
        Err(err) => Err(err),
    }
}

async fn pool_is_whole<DB: LeaseOps>(pool: &Pool<DB>) -> Result<(), String> {
    let size = pool.options().get_max_connections();
    let mut connections = Vec::new();
    for number in 1..=size {
        let conn = pool.acquire().await;
        connections.push(conn.map_err(|err| format!("connection {number} of {size} cannot be had: {err}"))?);
    }
    for conn in &mut connections {
        conn.ping().await.map_err(|err| format!("a connection of the pool is broken: {err}"))?;
        if counted_depth::<DB>(conn) > 0 || !DB::is_idle(conn).await {
            return Err("a connection of the pool is inside a transaction".to_owned());
        }
    }
    drop(connections);
    let tx = begin(pool).await.map_err(|err| format!("cannot begin a transaction: {err}"))?;
    tx.rollback().await.map_err(|err| format!("cannot roll back: {err}"))
}

#[cfg(all(test, any(feature = "sqlite", feature = "sqlite-unbundled")))]
mod tests {
    use tokio::task::yield_now;

    use crate::testing::drop_at_every_await;

    /// More awaits than a statement has: its thread may be done before it is polled, so their number changes, and one
    /// drop after another could miss a single await.
    async fn yields() {
        for _ in 0..8 {
            yield_now().await;
        }
    }

    #[tokio::test]
    #[should_panic(expected = "inside a transaction")]
    async fn a_connection_that_is_left_in_a_transaction_is_found() {
        use sqlx::Executor;

        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
        let work = || async {
            let mut conn = pool.acquire().await.unwrap();
            // Sent without sqlx's transaction type, so that sqlx does not roll back.
            conn.execute("BEGIN").await.unwrap();
            yields().await;
            conn.execute("COMMIT").await.unwrap();
        };
        drop_at_every_await(work).checking(&pool).await;
    }

    #[tokio::test]
    #[should_panic(expected = "leases are held")]
    async fn a_lease_that_is_left_is_found() {
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
        crate::sql::schema::migrate(&pool).await.unwrap();
        let leases = crate::lease::leases::Leases::new(pool.clone());
        let work = || async {
            let lease = leases.lease("k").try_acquire().await.unwrap();
            std::mem::forget(lease);
            yields().await;
        };
        drop_at_every_await(work).checking(&pool).await;
    }
}
