//! An oracle for tests: records all holders and reports when two held one key at the same time.
//!
//! It compares intervals in which a holder *trusts* its lease: from the grant to the release, the loss, or the end of
//! the trust. Trust never returns, so it is enough to check at each grant of a key whether another holder still trusts
//! it. A grant whose answer arrived after its trust had ended does not count.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    lease::{
        Yields,
        held::Lease,
        life::state::{Event, Life},
        store::{Acquired, AcquiredAll, Answer, Claim, Grant, LeaseStore, Previous, Profile, Release, Renewal},
    },
    mutex::Mutex,
    value::{error::Result, fence::Fence, key::Key, token::Token},
};

/// Records every grant and every end of a lease. Reports when two holders held one key at the same time, and when a
/// fence did not rise.
///
/// A lease counts as held from its grant until the earliest of these: the holder released it, the holder learned that
/// it was lost, or its trust ended ([`Lease::trusted_until`](crate::Lease::trusted_until)).
///
/// Clones are the same oracle. Either [`watch`](Self::watch) a store, which records everything that goes through the
/// store, or [`hold`](Self::hold) single leases, which also works for leases that end with
/// [`Lease::commit`](crate::Lease::commit).
///
/// The oracle sees only one process. If an operator steals a lease while its holder still trusts it, the lease has two
/// holders. `hold` reports that; `watch` records the theft as a release.
///
/// # Example
/// ```
/// use lockkit::{Leases, testing::{MemoryStore, Oracle}};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit::Result<()> {
/// let (store, oracle) = (MemoryStore::new(), Oracle::new());
/// let (here, there) = (Leases::new(oracle.watch(store.client())), Leases::new(oracle.watch(store.client())));
///
/// let lease = here.lease("k").acquire().await?;
/// here.store().inner().faults().partition();
/// there.lease("k").wait(std::time::Duration::from_secs(60)).acquire().await?;
/// assert!(oracle.assert_exclusive() >= 2); // grants: the lease twice, and a place in the queue of those who wait
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Oracle(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    /// Per key, the leases that may still be held.
    open: HashMap<Key, Vec<Entry>>,
    fences: HashMap<Key, Fence>,
    violations: Vec<Violation>,
    grants: u64,
}

struct Entry {
    token: Token,
    fence: Fence,
    granted: Instant,
    is_held: Box<dyn Fn() -> bool + Send + Sync>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token: _, fence, granted, is_held } = self;
        f.debug_struct("Entry").field("fence", fence).field("granted", granted).field("is_held", &is_held()).finish()
    }
}

/// A violation of the guarantees of leases.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A lease was granted while another holder held it.
    TwoHolders {
        /// The lease.
        key: Key,
        /// The fence of the first holder.
        holder: Fence,
        /// How long the first holder had held it.
        for_so_long: Duration,
        /// The fence of the second holder.
        intruder: Fence,
    },
    /// A lease was granted with a fence that is not greater than all earlier fences of its key.
    FenceDidNotRise {
        /// The lease.
        key: Key,
        /// The greatest earlier fence.
        before: Fence,
        /// The fence of the grant.
        granted: Fence,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TwoHolders { key, holder, for_so_long, intruder } => {
                write!(
                    f,
                    "`{key}` was granted with fence {intruder} while fence {holder} had held it for {for_so_long:?}"
                )
            }
            Self::FenceDidNotRise { key, before, granted } => {
                write!(f, "`{key}` was granted with fence {granted} after fence {before}")
            }
        }
    }
}

impl Oracle {
    /// An oracle without records.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wraps the store, so that this oracle records its grants and releases.
    pub fn watch<S: LeaseStore>(&self, store: S) -> Watched<S> {
        Watched { store, oracle: self.clone(), held: Arc::default() }
    }

    /// Records this lease, which was acquired just now, until the result is dropped or the lease ends.
    #[must_use = "the lease counts as released when this is dropped"]
    pub fn hold<S: LeaseStore>(&self, lease: &Lease<S>) -> Tracked {
        let (watched, let_go) = (lease.borrowed(), Arc::new(()));
        let is_held = {
            let let_go = Arc::downgrade(&let_go);
            move || let_go.strong_count() > 0 && watched.is_trusted()
        };
        self.granted(lease.key(), lease.token(), lease.fence(), is_held);
        Tracked { _let_go: let_go }
    }

    /// All violations so far.
    pub fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }

    /// Asserts that there were no violations. Returns the number of recorded grants, so that a test can check that
    /// there were some.
    ///
    /// # Panics
    /// If there were violations. The message lists all of them.
    #[track_caller]
    pub fn assert_exclusive(&self) -> u64 {
        let Log { violations, grants, .. } = &*self.0.lock();
        let list: Vec<_> = violations.iter().map(Violation::to_string).collect();
        assert!(list.is_empty(), "leases broke their promises:\n{}", list.join("\n"));
        *grants
    }

    fn granted(&self, key: &Key, token: Token, fence: Fence, is_held: impl Fn() -> bool + Send + Sync + 'static) {
        let Log { open, fences, violations, grants } = &mut *self.0.lock();
        *grants += 1;
        // The answer came so late that the trust had already ended. Another holder may have had the lease since.
        if !is_held() {
            return;
        }
        let open = open.entry(key.clone()).or_default();
        open.retain(|it| (it.is_held)());
        let others = open.iter().filter(|it| (it.token, it.fence) != (token, fence));
        violations.extend(others.map(|it| Violation::TwoHolders {
            key: key.clone(),
            holder: it.fence,
            for_so_long: it.granted.elapsed(),
            intruder: fence,
        }));
        let is_repeated = open.iter().any(|it| (it.token, it.fence) == (token, fence));
        match fences.get(key) {
            Some(&before) if fence <= before && !is_repeated => {
                violations.push(Violation::FenceDidNotRise { key: key.clone(), before, granted: fence });
            }
            Some(&before) if fence <= before => {}
            _ => drop(fences.insert(key.clone(), fence)),
        }
        open.push(Entry { token, fence, granted: Instant::now(), is_held: Box::new(is_held) });
    }
}

/// A lease that an [`Oracle`] records as held until this is dropped.
#[derive(Debug)]
pub struct Tracked {
    _let_go: Arc<()>,
}

/// A store whose grants an [`Oracle`] records, made by [`Oracle::watch`].
#[derive(Debug, Clone)]
pub struct Watched<S> {
    store: S,
    oracle: Oracle,
    held: Arc<Mutex<HashMap<Token, Arc<Mutex<Life>>>>>,
}

impl<S> Watched<S> {
    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.store
    }

    fn granted(&self, claim: &Claim, grant: &Grant, called: Instant) {
        let Claim { key, token, ttl, .. } = claim;
        let ttl = grant.ttl.map_or(*ttl, |most| most.min(*ttl));
        let life = Arc::new(Mutex::new(Life::new(grant.since(called), ttl)));
        self.held.lock().insert(*token, life.clone());
        self.oracle.granted(key, *token, grant.fence, move || life.lock().lost(Instant::now()).is_none());
    }

    fn of(&self, token: Token) -> Option<Arc<Mutex<Life>>> {
        self.held.lock().get(&token).cloned()
    }

    fn ended(&self, token: Token) {
        let life = self.held.lock().remove(&token);
        if let Some(life) = life {
            life.lock().on(Instant::now(), Event::Released);
        }
    }
}

impl<S: LeaseStore> LeaseStore for Watched<S> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let called = Instant::now();
        let answer = self.store.lease_acquire(claim).await?;
        if let Acquired::Granted(grant) = &answer {
            self.granted(claim, grant, called);
        }
        Ok(answer)
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let called = Instant::now();
        let answer = self.store.lease_acquire_all(claims).await?;
        if let AcquiredAll::Granted(grants) = &answer {
            claims.iter().zip(grants).for_each(|(claim, grant)| self.granted(claim, grant, called));
        }
        Ok(answer)
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        let called = Instant::now();
        let answers = self.store.lease_acquire_each(claims).await?;
        for (claim, answer) in claims.iter().zip(&answers) {
            if let Some(Acquired::Granted(grant)) = answer {
                self.granted(claim, grant, called);
            }
        }
        Ok(answers)
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<crate::lease::store::LeaseRecord>> {
        self.store.lease_look(key).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let sent = Instant::now();
        let answers = self.store.lease_renew(renewals).await?;
        for (Renewal { token, ttl, .. }, answer) in renewals.iter().zip(&answers) {
            match (answer, self.of(*token)) {
                (Answer::Done, Some(life)) => {
                    life.lock().on(Instant::now(), Event::Renewed { sent, ttl: *ttl });
                }
                (Answer::Gone, _) => self.ended(*token),
                _ => {}
            }
        }
        Ok(answers)
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        // A holder that releases a lease no longer acts as its holder, whatever the answer.
        self.ended(token);
        self.store.lease_release(key, token, min_hold).await
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        self.ended(token);
        self.store.lease_release_unpinned(key, token).await
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        for it in releases {
            self.ended(it.token);
        }
        self.store.lease_release_all(releases).await
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        for it in releases {
            self.ended(it.token);
        }
        self.store.lease_release_all_unpinned(releases).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<crate::lease::store::LeaseRecord>> {
        self.store.lease_list(prefix, limit).await
    }

    async fn lease_expired(&self, prefix: &str, limit: u32) -> Result<Vec<(Key, Previous)>> {
        self.store.lease_expired(prefix, limit).await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.store.lease_sweep(retention, limit).await
    }

    async fn unanswered(&self) -> Option<crate::value::error::Error> {
        self.store.unanswered().await
    }

    fn lease_freed(&self, key: &Key) -> impl Future<Output = ()> + Send {
        self.store.lease_freed(key)
    }

    fn profile(&self) -> Profile {
        self.store.profile()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        lease::leases::Leases,
        testing::{
            MemoryStore,
            mutants::{Bug, Mutant},
        },
    };

    #[tokio::test(start_paused = true)]
    async fn a_store_that_grants_a_lease_twice_is_caught() {
        for watched in [true, false] {
            let (store, oracle) = (Mutant::new(Bug::GrantsTwice), Oracle::new());
            let two = if watched {
                // From two processes: one waits for its own holder, and does not ask.
                let store = oracle.watch(store);
                let (here, there) = (Leases::new(store.clone()), Leases::new(store));
                let (a, b) = (here.lease("k").acquire().await, there.lease("k").acquire().await);
                drop((a.unwrap(), b.unwrap()));
                oracle.violations()
            } else {
                let (here, there) = (Leases::new(store.clone()), Leases::new(store));
                let first = here.lease("k").acquire().await.unwrap();
                let _first = oracle.hold(&first);
                let second = there.lease("k").acquire().await.unwrap();
                let _second = oracle.hold(&second);
                oracle.violations()
            };
            assert!(matches!(&*two, [Violation::TwoHolders { .. }]), "{two:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_whose_fences_repeat_is_caught() {
        let (store, oracle) = (Mutant::new(Bug::FenceRepeats), Oracle::new());
        let leases = Leases::new(oracle.watch(store));
        for _ in 0..2 {
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        }
        assert!(matches!(&*oracle.violations(), [Violation::FenceDidNotRise { .. }]), "{:?}", oracle.violations());
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "while fence")]
    async fn a_clock_that_jumps_ahead_makes_two_holders() {
        let (store, oracle) = (MemoryStore::new(), Oracle::new());
        let (here, there) = (Leases::new(oracle.watch(store.client())), Leases::new(oracle.watch(store.client())));
        let _first = here.lease("k").acquire().await.unwrap();
        store.step_forward(Duration::from_secs(3600));
        let _second = there.lease("k").acquire().await.unwrap();
        oracle.assert_exclusive();
    }

    #[tokio::test(start_paused = true)]
    async fn successive_holders_do_not_overlap() {
        let (store, oracle) = (MemoryStore::new(), Oracle::new());
        let (here, there) = (Leases::new(oracle.watch(store.client())), Leases::new(oracle.watch(store.client())));
        for round in 0..20 {
            let (one, other) = if round % 2 == 0 { (&here, &there) } else { (&there, &here) };
            let lease = one.lease("k").wait(Duration::from_secs(100)).acquire().await.unwrap();
            let held = oracle.hold(&lease);
            match round % 4 {
                0 => drop(lease.release().await.unwrap()),
                1 => drop(lease),
                _ => {
                    one.store().inner().faults().partition();
                    other.lease("k").wait(Duration::from_secs(100)).acquire().await.unwrap().release().await.unwrap();
                    one.store().inner().faults().heal();
                }
            }
            drop(held);
        }
        // The other tasks wait for the end of the ttl, with one ticket each.
        assert_eq!(oracle.assert_exclusive(), 60, "20 and 20 held ones, and 10 of the others with 10 tickets");
    }
}
