//! Every pool of a supported database is a store of leases: borrow a connection, run one operation, give it back.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};

use super::{Dialect, LeaseOps, failed, failed_on_own_table};
use crate::{
    error::{Error, Result},
    key::Key,
    store::{Acquired, AcquiredAll, Claim, Held, LeaseStore, Renewal, Scoped, Token},
};

/// How many callers wait for a connection, by pool: for [`Error::PoolStarved`] to tell. A pool that nobody waits at is
/// not in it.
static WAITING: LazyLock<Mutex<HashMap<usize, u32>>> = LazyLock::new(Mutex::default);

/// A connection of the pool, whose database is known.
pub(crate) async fn connection<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    let mut conn = checkout(pool, doing, key).await?;
    DB::greet(&mut conn, pool).await;
    Ok(conn)
}

/// A connection of the pool.
pub(crate) async fn checkout<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    let _waiting = Waiting::at(pool);
    pool.acquire().await.map_err(|err| match err {
        sqlx::Error::PoolTimedOut => starved(pool).unwrap_or_else(|| failed::<DB>(doing, key, err)),
        err => failed_on_own_table::<DB>(doing, key, err),
    })
}

/// The error that says so when all connections of the pool are in use.
pub(crate) fn starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    let (held, size) = (pool.size(), pool.options().get_max_connections());
    let waiting = waiting().get(&address(pool)).copied().unwrap_or(0).max(1);
    (held >= size && pool.num_idle() == 0).then_some(Error::PoolStarved { held, waiting, size })
}

/// One caller that waits for a connection.
struct Waiting(usize);

impl Waiting {
    fn at<DB: Dialect>(pool: &Pool<DB>) -> Self {
        *waiting().entry(address(pool)).or_default() += 1;
        Self(address(pool))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Entry::Occupied(mut waiters) = waiting().entry(self.0) {
            *waiters.get_mut() -= 1;
            if *waiters.get() == 0 {
                waiters.remove();
            }
        }
    }
}

/// What all handles to one pool have in common.
fn address<DB: Dialect>(pool: &Pool<DB>) -> usize {
    std::ptr::from_ref(pool.options()).addr()
}

/// No code panics while it holds the lock.
fn waiting() -> MutexGuard<'static, HashMap<usize, u32>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `otherwise` where the database would have had to wait for another transaction, or undid the statement for one.
fn unless_locked<T>(result: Result<T>, otherwise: T) -> Result<T> {
    match result {
        Err(Error::Database { fault, .. }) if fault.is_of_the_moment() => Ok(otherwise),
        result => result,
    }
}

impl<DB: LeaseOps> LeaseStore for Pool<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let (doing, key) = ("acquiring lease", Some(&claim.key));
        let mut conn = connection(self, doing, key).await?;
        let answer =
            DB::lease_acquire(&mut conn, claim).await.map_err(|err| failed_on_own_table::<DB>(doing, key, err));
        unless_locked(answer, Acquired::Held { free_in: None })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let (doing, key) = ("acquiring leases", claims.first().map(|it| &it.key));
        let mut conn = connection(self, doing, key).await?;
        let answer =
            DB::lease_acquire_all(&mut conn, claims).await.map_err(|err| failed_on_own_table::<DB>(doing, key, err));
        match key {
            Some(key) => unless_locked(answer, AcquiredAll::Held { key: key.clone(), free_in: None }),
            None => answer,
        }
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<Held>> {
        let doing = "looking at lease";
        let mut conn = connection(self, doing, Some(key)).await?;
        DB::lease_look(&mut conn, key).await.map_err(|err| failed_on_own_table::<DB>(doing, Some(key), err))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Scoped>> {
        let (doing, key) = ("renewing leases", renewals.first().map(|it| &it.key));
        let mut conn = connection(self, doing, key).await?;
        let answer = DB::lease_renew(&mut conn, renewals).await;
        let answer = answer.map_err(|err| failed_on_own_table::<DB>(doing, key, err));
        unless_locked(answer, vec![Scoped::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Scoped> {
        let doing = "releasing lease";
        let mut conn = connection(self, doing, Some(key)).await?;
        let answer = DB::lease_release(&mut conn, key, token, min_hold).await;
        unless_locked(answer.map_err(|err| failed_on_own_table::<DB>(doing, Some(key), err)), Scoped::Busy)
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<Held>> {
        let doing = "listing leases";
        let mut conn = connection(self, doing, None).await?;
        DB::lease_list(&mut conn, prefix, limit).await.map_err(|err| failed_on_own_table::<DB>(doing, None, err))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        let doing = "sweeping leases";
        let mut conn = connection(self, doing, None).await?;
        DB::lease_sweep(&mut conn, retention, limit).await.map_err(|err| failed_on_own_table::<DB>(doing, None, err))
    }

    fn unanswered(&self) -> Option<Error> {
        starved(self)
    }
}
