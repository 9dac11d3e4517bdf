//! Every pool of a supported database is a store of leases.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::Instant;

use super::LeaseOps;
use crate::{
    lease::store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, Renewal},
    sql::{
        lease::{LastClaims, SweptTo, lease_sweep},
        locked::{database_locked, read, unless_held, unless_locked},
        pool::{Reach, call, on_living_connection, tried, write},
        pool_state::of_pool,
        starved::leases_starved,
    },
    value::{
        error::{Error, Result},
        key::Key,
        token::Token,
    },
};

impl<DB: LeaseOps> LeaseStore for Pool<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let last = of_pool::<LastClaims, _>(self);
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(claim.ttl), "acquiring lease", Some(&claim.key), async |conn, grammar, tries| {
                let sent = Instant::now();
                let acquired: sqlx::Result<_> = tried!(tries, DB::lease_acquire(conn, grammar, claim, &last));
                acquired.map(|it| match it {
                    Acquired::Granted(grant) => Acquired::Granted(grant.sent(sent)),
                    held @ Acquired::Held { .. } => held,
                })
            }),
            // The one before may hold it, and be committed only now.
            final: |it: &_| matches!(it, Acquired::Granted(_))
        );
        unless_held::<DB, _>(answer, &claim.key, Acquired::Held { free_in: None })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let Some(first) = claims.first() else { return Ok(AcquiredAll::Granted(Vec::new())) };
        let answer = on_living_connection!(
            self,
            call(self, Reach::lease(first.ttl), "acquiring leases", Some(&first.key), async |conn, grammar| {
                let sent = Instant::now();
                let acquired = DB::lease_acquire_all(conn, grammar, claims).await?;
                Ok(match acquired {
                    AcquiredAll::Granted(grants) => {
                        AcquiredAll::Granted(grants.into_iter().map(|it| it.sent(sent)).collect())
                    }
                    held @ AcquiredAll::Held { .. } => held,
                })
            }),
            final: |it: &_| matches!(it, AcquiredAll::Granted(_))
        );
        unless_held::<DB, _>(answer, &first.key, AcquiredAll::Held { key: first.key.clone(), free_in: None })
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "looking at lease", Some(key), async |conn, _| DB::lease_look(conn, key).await)
        ))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let Some(first) = renewals.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(first.ttl), "renewing leases", Some(&first.key), async |conn, _, tries| {
                tried!(tries, DB::lease_renew(conn, renewals))
            })
        );
        unless_locked(answer, vec![Answer::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, Reach::RELEASE, "releasing lease", Some(key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release(conn, grammar, key, token, min_hold))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, Reach::RELEASE, "releasing lease", Some(key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release_unpinned(conn, grammar, key, token))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let Some(first) = releases.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, Reach::RELEASE, "releasing leases", Some(&first.key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release_all(conn, grammar, releases))
            })
        );
        unless_locked(answer, vec![Answer::Busy; releases.len()])
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "listing leases", None, async |conn, _| DB::lease_list(conn, prefix, limit).await)
        ))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        on_living_connection!(
            self,
            call(self, Reach::LEASE, "sweeping leases", None, async |conn, _| {
                lease_sweep::<DB>(conn, &of_pool::<SweptTo, _>(self), retention, limit).await
            })
        )
    }

    async fn unanswered(&self) -> Option<Error> {
        let starved = leases_starved(self).await;
        // A database in this process always answers, unless a writer has it locked.
        starved.or_else(|| (!DB::IS_REMOTE).then(|| database_locked(None, None)))
    }

    fn profile(&self) -> Profile {
        Profile {
            always_answers: !DB::IS_REMOTE,
            shows_writes_at_once: DB::shows_writes_at_once(self),
            ..Profile::default()
        }
    }
}
