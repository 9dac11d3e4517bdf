//! Tests of leases in stores that can do less than a database, or other things. See [`Profile`].

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::time::{sleep, timeout};

use crate::{
    Key, Leases,
    lease::store::{Acquired, Answer, Claim, LeaseRecord, LeaseStore, Profile, Renewal},
    testing::MemoryStore,
    value::{
        error::{Error, Result},
        token::Token,
    },
};

const SECOND: Duration = Duration::from_secs(1);

/// A store in memory with another profile, which counts the releases of leases that no transaction has pinned.
#[derive(Debug, Clone)]
struct Profiled {
    store: MemoryStore,
    profile: Profile,
    unpinned: Arc<AtomicU32>,
}

impl LeaseStore for Profiled {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.store.lease_acquire(claim).await
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        self.store.lease_look(key).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        self.store.lease_renew(renewals).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        self.store.lease_release(key, token, min_hold).await
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        self.unpinned.fetch_add(1, Ordering::Relaxed);
        self.store.lease_release(key, token, Duration::ZERO).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        self.store.lease_list(prefix, limit).await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.store.lease_sweep(retention, limit).await
    }

    fn profile(&self) -> Profile {
        self.profile
    }
}

fn leases(profile: Profile) -> Leases<Profiled> {
    let store = Profiled { store: MemoryStore::new(), profile, unpinned: Arc::default() };
    Leases::builder(store).wait(60 * SECOND).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_a_transaction_may_have_pinned_or_that_stays_taken_is_not_released_the_cheap_way() {
    let leases = leases(Profile::default());
    let cheap = || leases.store().unpinned.load(Ordering::Relaxed);
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(cheap(), 1);
    drop(leases.lease("k").acquire().await.unwrap());
    sleep(SECOND).await;
    assert_eq!(cheap(), 2);

    leases.lease("stays").min_hold(SECOND).acquire().await.unwrap().release().await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    lease.verify_by(async { Ok(true) }).await.unwrap();
    lease.release().await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    assert!(timeout(SECOND, lease.verify_by(pending())).await.is_err(), "the transaction does not answer");
    drop(lease);
    sleep(SECOND).await;
    assert_eq!(cheap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_ttl_beyond_the_limits_of_the_store_is_refused() {
    let limits = Profile { least_ttl: SECOND, longest_ttl: Some(60 * SECOND), ..Profile::default() };
    let leases = leases(limits);
    let lease = leases.lease("k").acquire().await.unwrap();
    for (ttl, fits) in [(1, true), (60, true), (61, false)] {
        let (extended, acquired) =
            (lease.extend(ttl * SECOND).await, leases.lease("l").ttl(ttl * SECOND).acquire().await);
        for refused in [extended.err(), acquired.err()] {
            assert_eq!(refused.is_none(), fits, "{ttl} s: {refused:?}");
            assert!(fits || matches!(refused, Some(Error::InvalidOption { option: "ttl", .. })), "{refused:?}");
        }
    }
    assert!(lease.extend(SECOND / 2).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_shows_writes_late_grants_each_holder_itself() {
    let leases = leases(Profile { shows_writes_at_once: false, ..Profile::default() });
    let first = leases.lease("k").acquire().await.unwrap();
    let next = tokio::spawn(leases.lease("k").acquire());
    sleep(SECOND).await;
    let handed_over = first.fence().get() + 1;
    drop(first);
    assert!(next.await.unwrap().unwrap().fence().get() > handed_over, "a fence of the store's clock");
}

#[tokio::test(start_paused = true)]
async fn what_needs_further_leases_is_refused_by_a_store_that_keeps_one_for_each_key() {
    let leases = leases(Profile { side_leases: false, ..Profile::default() });
    let request = |option| match option {
        "any" => leases.any(["k", "l"]),
        "semaphore" => leases.semaphore("k", 1),
        "rw" => leases.rw("k").read(),
        "fair" => leases.lease("k").fair(),
        _ => leases.lease("k"),
    };
    for option in ["any", "semaphore", "rw", "fair"] {
        let err = request(option).acquire().await.unwrap_err();
        assert!(matches!(err, Error::InvalidOption { option: refused, .. } if refused == option), "{err:?}");
    }
    let held = request("lease").acquire().await.unwrap();
    // The request takes no ticket, however long it waits.
    request("lease").wait(SECOND).acquire().await.unwrap_err();
    assert_eq!(leases.list("k/").await.unwrap(), []);
    drop(held);
    drop(leases.all(["k", "l"]).acquire().await.unwrap());
}
