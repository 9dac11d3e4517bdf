//! Every pool of a supported database is a store of leases.

use std::{sync::OnceLock, time::Duration};

use sqlx::Pool;
use tokio::time::Instant;

use super::LeaseOps;
use crate::{
    lease::{
        life::state::Pin,
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, LeaseStore, Previous, Profile, Release, Renewal},
    },
    sql::{
        lease::{LastClaims, SweptTo, answers_sweep, lease_sweep},
        locked::{database_locked, read, unless_held, unless_locked},
        pool::{Reach, call, on_living_connection, tried, write},
        pool_state::of_pool,
        starved::leases_starved,
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
        token::Token,
    },
};

/// Why a batch of claims is no answer to those that it did not take.
#[derive(Debug, thiserror::Error)]
#[error("an earlier connection ended before it answered the same claims, and may have taken their leases")]
struct SentBefore;

impl<DB: LeaseOps> LeaseStore for Pool<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let last = of_pool::<LastClaims, _>(self);
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(claim.ttl), "acquiring lease", Some(&claim.key), async |conn, grammar, tries| {
                let sent = Instant::now();
                let acquired: sqlx::Result<_> = tried!(tries, DB::lease_acquire(conn, grammar, claim, &last));
                acquired.map(|it| it.sent(sent))
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

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        let Some(first) = claims.first() else { return Ok(Vec::new()) };
        let ttl = claims.iter().map(|it| it.ttl).min().unwrap_or(first.ttl);
        let sent = OnceLock::new();
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(ttl), "acquiring leases", Some(&first.key), async |conn, grammar, tries| {
                let is_first = sent.get().is_none();
                let sent = *sent.get_or_init(Instant::now);
                let acquired: sqlx::Result<Vec<_>> = tried!(tries, DB::lease_acquire_each(conn, grammar, claims));
                let answer = |it: Option<Acquired>| it.map(|it| it.sent(sent));
                acquired.map(|it| (is_first, it.into_iter().map(answer).collect::<Vec<_>>()))
            })
        );
        let (is_first, answers) = unless_held::<DB, _>(answer, &first.key, (true, vec![None; claims.len()]))?;
        // A later attempt may find what the first one has taken, or will take. After this error, each is sent alone.
        if !is_first && !answers.iter().all(|it| matches!(it, Some(Acquired::Granted(_)))) {
            return Err(Error::database("acquiring leases", Some(&first.key), Fault::Other, SentBefore));
        }
        Ok(answers)
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "looking at lease", Some(key), async |conn, _| DB::lease_look(conn, key).await)
        ))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let Some(first) = renewals.first() else { return Ok(Vec::new()) };
        let ttl = renewals.iter().map(|it| it.ttl).min().unwrap_or(first.ttl);
        let answer = on_living_connection!(
            self,
            write(self, Reach::renewal(ttl), "renewing leases", Some(&first.key), async |conn, _, tries| {
                tried!(tries, DB::lease_renew(conn, renewals))
            }),
            // The one before may have rows locked, which this one has then skipped.
            final: |it: &Vec<_>| it.iter().all(|it| *it == Answer::Done)
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
        release_all(self, releases, Pin::Possible).await
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        release_all(self, releases, Pin::No).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "listing leases", None, async |conn, _| DB::lease_list(conn, prefix, limit).await)
        ))
    }

    async fn lease_expired(&self, prefix: &str, limit: u32) -> Result<Vec<(Key, Previous)>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "listing leases", None, async |conn, _| {
                DB::lease_expired(conn, prefix, limit).await
            })
        ))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        on_living_connection!(
            self,
            call(self, Reach::LEASE, "sweeping leases", None, async |conn, _| {
                let swept = lease_sweep::<DB>(conn, &of_pool::<SweptTo, _>(self), retention, limit).await?;
                answers_sweep::<DB>(conn, limit).await?;
                Ok(swept)
            })
        )
    }

    async fn unanswered(&self) -> Option<Error> {
        let starved = leases_starved(self).await;
        // A database in this process always answers, unless a writer has it locked.
        starved.or_else(|| (!DB::IS_REMOTE).then(|| database_locked(None, None)))
    }

    fn profile(&self) -> Profile {
        let shows_writes_at_once = DB::shows_writes_at_once(self);
        Profile {
            // Where a read may not show the last writes, it cannot tell what a statement for many has done.
            batches: shows_writes_at_once && (DB::BATCHES_NEW || of_pool::<LastClaims, _>(self).were_of_released()),
            always_answers: !DB::IS_REMOTE,
            shows_writes_at_once,
            ..Profile::default()
        }
    }
}

async fn release_all<DB: LeaseOps>(pool: &Pool<DB>, releases: &[Release], pin: Pin) -> Result<Vec<Answer>> {
    let Some(first) = releases.first() else { return Ok(Vec::new()) };
    let answer = on_living_connection!(
        pool,
        write(pool, Reach::RELEASE, "releasing leases", Some(&first.key), async |conn, grammar, tries| {
            tried!(tries, DB::lease_release_all(conn, grammar, releases, pin))
        })
    );
    unless_locked(answer, vec![Answer::Busy; releases.len()])
}
