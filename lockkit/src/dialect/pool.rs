//! Every pool of a supported database is a store of leases: borrow a connection, run one operation, give it back.

use std::time::Duration;

use sqlx::{Pool, pool::PoolConnection};

use super::{Dialect, LeaseOps, failed_on_own_table};
use crate::{
    error::{Error, Fault, Result},
    key::Key,
    store::{Acquired, AcquiredAll, Claim, Held, LeaseStore, Renewal, Scoped, Token},
};

async fn connection<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    pool.acquire().await.map_err(|err| failed_on_own_table::<DB>(doing, key, err))
}

/// `otherwise` where the database would have had to wait for another transaction, or undid the statement for one.
fn unless_locked<T>(result: Result<T>, otherwise: T) -> Result<T> {
    match result {
        Err(Error::Database { fault: Fault::Contended | Fault::Deadlock | Fault::Serialization, .. }) => Ok(otherwise),
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
}
