//! One algorithm for all requests: for one lease and for several, on stores that poll, tell or queue.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkit::lease::Yields;
use lockkit::store::{Acquired, Answer, Claim, LeaseRecord, Profile, Renewal, Token};
use lockkit::testing::{Failure, MemoryStore, Operation};
use lockkit::{Error, Key, LeaseRequest, LeaseStore, Leases, Result};
use support::spawn;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);
const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// A store in memory with abilities that the one in memory lacks.
#[derive(Clone)]
struct Able {
    store: MemoryStore,
    able: Arc<Abilities>,
}

#[derive(Default)]
struct Abilities {
    profile: Profile,
    /// The longest ttl that it grants.
    most_ttl: Option<Duration>,
    /// Tells waiting requests of releases.
    tells: bool,
    freed: Notify,
    claims: Mutex<Vec<Claim>>,
    releases: Mutex<Vec<Token>>,
}

impl Able {
    fn new(able: Abilities) -> Self {
        Self { store: MemoryStore::new(), able: Arc::new(able) }
    }

    /// As another process has it.
    fn client(&self) -> Self {
        Self { store: self.store.client(), able: self.able.clone() }
    }

    fn claims(&self) -> Vec<Claim> {
        self.able.claims.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn releases(&self) -> Vec<Token> {
        self.able.releases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl LeaseStore for Able {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.able.claims.lock().unwrap_or_else(PoisonError::into_inner).push(claim.clone());
        let mut acquired = self.store.lease_acquire(claim).await?;
        if let Acquired::Granted(grant) = &mut acquired {
            grant.ttl = self.able.most_ttl;
        }
        Ok(acquired)
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        self.store.lease_look(key).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        self.store.lease_renew(renewals).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        self.able.releases.lock().unwrap_or_else(PoisonError::into_inner).push(token);
        let answer = self.store.lease_release(key, token, min_hold).await;
        self.able.freed.notify_waiters();
        answer
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        self.store.lease_list(prefix, limit).await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.store.lease_sweep(retention, limit).await
    }

    async fn lease_freed(&self, _key: &Key) {
        if !self.able.tells {
            std::future::pending::<()>().await;
        }
        self.able.freed.notified().await;
    }

    fn profile(&self) -> Profile {
        self.able.profile
    }
}

/// How often a wait of 2 s that is refused claims and looks.
async fn questions<L: Yields<Store = MemoryStore>>(
    request: impl FnOnce(&Leases<MemoryStore>) -> LeaseRequest<MemoryStore, L>,
) -> (u64, u64, Error) {
    let store = MemoryStore::new();
    let there = Leases::new(store.client());
    let _lease = there.lease("b").acquire().await.unwrap();
    let here = Leases::new(store.client());
    let refused = request(&here).wait(2 * SECOND).acquire().await.err().expect("another process holds it");
    let faults = here.store().faults();
    (faults.calls(Operation::Acquire), faults.calls(Operation::Look), refused)
}

#[tokio::test(start_paused = true)]
async fn a_request_for_several_looks_before_it_claims_again() {
    let (claims, looks, refused) = questions(|leases| leases.all(["a", "b"])).await;
    assert_eq!(claims, 1, "a claim that is refused writes and takes locks");
    assert!(looks > 5, "{looks}");
    let Error::Contended { key, holder: Some(holder), .. } = &refused else { panic!("{refused:?}") };
    assert_eq!((key.as_str(), holder.as_lease().unwrap().key.as_str()), ("b", "b"));
}

#[tokio::test(start_paused = true)]
async fn a_request_for_several_that_never_had_its_turn_names_a_holder_too() {
    let store = MemoryStore::new();
    let there = Leases::new(store.client());
    let _lease = there.lease("b").acquire().await.unwrap();
    let here = Leases::new(store.client());
    let first = spawn({
        let request = here.all(["a", "b"]).wait(60 * SECOND);
        async move { request.acquire().await.map(drop) }
    });
    sleep(SECOND).await;
    let refused = here.all(["a", "b"]).wait(MILLIS(100)).acquire().await.unwrap_err();
    let Error::Contended { key, holder: Some(_), .. } = &refused else { panic!("{refused:?}") };
    assert_eq!(key, "b");
    first.abort();
}

/// How long after its release in another process a lease is granted to a request that waits.
async fn woken_after<L: Yields<Store = Able>>(
    request: impl FnOnce(&Leases<Able>) -> LeaseRequest<Able, L>,
) -> Duration {
    let store = Able::new(Abilities { tells: true, ..Abilities::default() });
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let lease = there.lease("b").acquire().await.unwrap();
    let waiting = async {
        let granted = request(&here).wait(60 * SECOND).acquire().await.unwrap();
        (Instant::now(), granted)
    };
    let release = async {
        // Not a multiple of any pause.
        sleep(MILLIS(10_007)).await;
        lease.release().await.unwrap();
        Instant::now()
    };
    let ((granted, _lease), freed) = tokio::join!(waiting, release);
    granted.duration_since(freed)
}

#[tokio::test(start_paused = true)]
async fn a_store_that_tells_of_releases_ends_the_pause_of_one_and_of_several() {
    assert_eq!(woken_after(|leases| leases.lease("b")).await, Duration::ZERO);
    assert_eq!(woken_after(|leases| leases.all(["a", "b"])).await, Duration::ZERO);
}

fn queueing() -> Abilities {
    let mut profile = Profile::default();
    profile.queues = true;
    Abilities { profile, tells: true, ..Abilities::default() }
}

#[tokio::test(start_paused = true)]
async fn a_claim_keeps_its_token_for_one_wait_and_gives_its_place_up_after_it() {
    let store = Able::new(queueing());
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let lease = there.lease("k").acquire().await.unwrap();
    let (first, others) = (store.claims().len(), store.releases().len());
    let waiting = here.lease("k").wait(10 * SECOND).acquire();
    let releases = async {
        for _ in 0..3 {
            sleep(SECOND).await;
            // Of another lease, so that the request claims again.
            store.able.freed.notify_waiters();
        }
    };
    let (refused, ()) = tokio::join!(waiting, releases);
    assert!(refused.unwrap_err().is_contended());
    sleep(MILLIS(1)).await;
    let claims = store.claims().split_off(first);
    assert_eq!(claims.len(), 4, "{claims:?}");
    assert!(claims.iter().all(|it| it.queue && it.token == claims[0].token), "{claims:?}");
    assert_eq!(store.releases().split_off(others), [claims[0].token], "the place in the store's queue");

    let tried = here.lease("k").try_acquire().await.unwrap();
    assert!(tried.is_none() && !store.claims().last().unwrap().queue, "a try keeps no place");
    lease.release().await.unwrap();
    let lease = here.lease("k").acquire().await.unwrap();
    assert_ne!(store.claims().last().unwrap().token, claims[0].token, "each wait has a token of its own");
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_granted_after_refusals_is_not_released() {
    let store = Able::new(queueing());
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let lease = there.lease("k").acquire().await.unwrap();
    let waiting = spawn({
        let request = here.lease("k").wait(60 * SECOND);
        async move { request.acquire().await.unwrap() }
    });
    sleep(SECOND).await;
    lease.release().await.unwrap();
    let lease = waiting.await.unwrap();
    sleep(60 * SECOND).await;
    assert!(lease.is_trusted());
    assert_eq!(here.show("k").await.unwrap().unwrap().fence, lease.fence());
}

#[tokio::test(start_paused = true)]
async fn a_grant_with_a_shorter_ttl_is_trusted_and_renewed_by_it() {
    let store = Able::new(Abilities { most_ttl: Some(SECOND), ..Abilities::default() });
    let leases = Leases::new(store.client());
    let lease = leases.lease("k").ttl(60 * SECOND).acquire().await.unwrap();
    assert!(lease.trusted_until() <= (Instant::now() + SECOND).into_std());
    sleep(10 * SECOND).await;
    assert!(lease.is_trusted(), "it is renewed within the shorter ttl");
    assert!(leases.show("k").await.unwrap().unwrap().renewals > 10);
}

#[tokio::test(start_paused = true)]
async fn a_ttl_below_the_least_of_the_store_is_refused() {
    let mut profile = Profile::default();
    profile.least_ttl = 2 * SECOND;
    let store = Able::new(Abilities { profile, ..Abilities::default() });
    let leases = Leases::new(store.client());
    for refused in [
        leases.lease("k").ttl(SECOND).acquire().await.map(drop),
        leases.all(["k"]).ttl(SECOND).acquire().await.map(drop),
        Leases::builder(store.client()).ttl(SECOND).build().map(drop),
    ] {
        assert!(matches!(refused, Err(Error::InvalidOption { option: "ttl", .. })), "{refused:?}");
    }
    drop(leases.lease("k").ttl(2 * SECOND).acquire().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_request_for_several_keeps_no_place_in_the_stores_queue_and_no_token() {
    let store = Able::new(queueing());
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let _lease = there.lease("b").acquire().await.unwrap();
    let first = store.claims().len();
    let waiting = here.all(["a", "b"]).wait(3 * SECOND).acquire();
    let releases = async {
        sleep(SECOND).await;
        store.able.freed.notify_waiters();
    };
    let (refused, ()) = tokio::join!(waiting, releases);
    assert!(refused.unwrap_err().is_contended());
    let claims = store.claims().split_off(first);
    let tokens: std::collections::HashSet<_> = claims.iter().map(|it| it.token).collect();
    assert!(
        claims.len() >= 4 && tokens.len() == claims.len(),
        "a token that was granted is not sent again: {claims:?}"
    );
    assert!(claims.iter().all(|it| !it.queue), "{claims:?}");
}

#[tokio::test(start_paused = true)]
async fn permits_take_tickets_on_a_store_that_queues_single_claims() {
    let store = Able::new(queueing());
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let permit = there.semaphore("s", 1).acquire().await.unwrap();
    let waiting = spawn({
        let request = here.semaphore("s", 1).wait(60 * SECOND);
        async move { request.acquire().await.map(drop) }
    });
    sleep(SECOND).await;
    let tickets = here.list("s/permit/queue/").await.unwrap();
    assert_eq!(tickets.len(), 1, "{:?}", here.list("").await.unwrap());
    permit.release().await.unwrap();
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_ticket_lives_as_long_as_the_store_needs() {
    let mut profile = Profile::default();
    profile.least_ttl = 10 * SECOND;
    let store = Able::new(Abilities { profile, ..Abilities::default() });
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let _lease = there.lease("k").acquire().await.unwrap();
    assert!(here.lease("k").wait(SECOND).acquire().await.unwrap_err().is_contended());
    let tickets: Vec<_> = store.claims().into_iter().filter(|it| it.key.starts_with("k/queue/")).collect();
    assert!(!tickets.is_empty() && tickets.iter().all(|it| it.ttl >= 10 * SECOND), "{tickets:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_claims_for_several_is_not_called_contended() {
    let store = MemoryStore::new();
    let here = Leases::new(store.client());
    here.store().faults().script(Operation::Acquire, [Failure::Silent; 8]);
    let silent = here.all(["a", "b"]).wait(MILLIS(300)).acquire().await.unwrap_err();
    assert!(!silent.is_contended(), "{silent:?}");
}
