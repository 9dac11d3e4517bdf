//! The first free lease of several.
//!
//! The candidates are ordinary leases. A request claims the first one, and if that is held, reads which are held and
//! claims the first of the others: one statement when the first candidate is free, three when others are held. If that
//! claim is refused too, it takes any other one, at random. Where the list is cut, because too many other leases are
//! below the common prefix, it also reads the candidates that the list does not name, one by one until one is free. The
//! requests of one process for one set of candidates share a queue, in whatever order they prefer them; a release of
//! any of the candidates wakes it. The request takes no tickets.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use super::{
    LeaseRequest,
    mode::{MAX_PERMITS, Mode},
    pending::Pending,
    shared::TRIES,
};
use crate::lease::{held::Lease, leases::Leases};
use crate::{
    lease::{
        bounded::limit_for,
        queue::wait::Outcome,
        store::{LeaseRecord, LeaseStore},
    },
    value::{error::Result, key::Key},
};

/// How often a request claims a candidate in one try.
const CLAIMS: u32 = 2;

/// After so many claims, a try takes any candidate that is free. Of many requests that all claim the first one, one
/// would win at a time.
const IN_ORDER: u32 = 2;

impl<S: LeaseStore> Leases<S> {
    /// A request for the lease of one of these keys: the first one that is free.
    ///
    /// Use it to share long jobs among processes without a table of jobs: each process takes a job that no other one
    /// has. The keys are tried in the order given, and a repeated key counts once; [`Lease::key`] is the key that was
    /// taken. After two claims that were refused, any key that is free is claimed. Where the order does not matter,
    /// shuffle the keys, so that processes that ask at the same moment do not all claim the same one first. If the
    /// first key is free, the request sends one statement. Otherwise it reads the held leases below the longest common
    /// prefix of the keys, so give them one of their own, such as `report:`. If 10,000 leases or more are held below
    /// it, the request also reads, one by one until one is free, the keys that it has not seen among them.
    ///
    /// The request waits while all keys are held, without a place in the queues of the single keys: a request for one
    /// of them, or a process that asks more often, may take it first. It counts a key that the calling body itself
    /// holds as held, and is refused with [`Error::Reentrant`](crate::Error::Reentrant) if the body holds all of them.
    /// [`Error::Contended`](crate::Error::Contended) names the key that would be free first, with its holder. 1 to
    /// 1,000 keys.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let reports = ["report:emea", "report:apac"];
    /// let first = leases.any(reports).acquire().await?;
    /// let second = leases.any(reports).acquire().await?;
    /// assert_eq!((first.key().as_str(), second.key().as_str()), ("report:emea", "report:apac"));
    /// assert!(leases.any(reports).try_acquire().await?.is_none());
    /// first.release().await?;
    /// assert_eq!(leases.any(reports).acquire().await?.key(), "report:emea");
    /// # Ok(()) }
    /// ```
    pub fn any(&self, keys: impl IntoIterator<Item = impl Into<Key>>) -> LeaseRequest<S> {
        let (mut candidates, mut seen) = (Vec::new(), BTreeSet::new());
        for key in keys.into_iter().map(Into::into) {
            if seen.insert(key.clone()) {
                candidates.push(key);
            }
        }
        // It names the queue, so it is the same for every order, and not that of `Leases::all`.
        let key = seen.iter().map(Key::as_str).collect::<Vec<_>>().join(" | ");
        LeaseRequest::new(self.0.clone(), key.into(), Mode::Any(candidates))
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Tries to take one of the leases. If the first one is likely to be free, claims it, and then those that the store
    /// reports as free, the first [`IN_ORDER`] in the order of preference. Refused if none is free, or if others were
    /// faster [`TRIES`] times.
    ///
    /// A lease that the store reports as free may be refused nevertheless: another request was faster, or a transaction
    /// has its row locked. It is claimed again if it is still free and no other one is, [`CLAIMS`] times at most.
    pub(super) async fn try_any(
        &self,
        pending: &Pending<S>,
        candidates: &[Key],
        likely_free: bool,
    ) -> Result<Outcome<Vec<Lease<S>>>> {
        let mut refusals: BTreeMap<&Key, u32> = BTreeMap::new();
        let mut likely = candidates.first().filter(|_| likely_free);
        for claimed in 0..TRIES {
            let key = if let Some(key) = likely.take() {
                key
            } else {
                let claims = |key: &&Key| refusals.get(*key).copied().unwrap_or_default();
                let mut left: Vec<&Key> = candidates.iter().filter(|key| claims(key) < CLAIMS).collect();
                if claimed >= IN_ORDER {
                    fastrand::shuffle(&mut left);
                }
                // Stable: the order among those that were claimed equally often is kept.
                left.sort_by_key(claims);
                let (free, held) = self.first_free(candidates, left).await?;
                let Some(key) = free else {
                    return Ok(Outcome::Held { free_in: held.iter().map(|it| it.info.expires_in).min() });
                };
                key
            };
            match self.try_keys(pending, slice::from_ref(key), true).await? {
                Outcome::Held { .. } => *refusals.entry(key).or_default() += 1,
                outcome => return Ok(outcome),
            }
        }
        // Other requests were faster each time.
        Ok(Outcome::Held { free_in: None })
    }

    /// The first of these candidates that is free, and the held leases among the candidates that were read before it.
    ///
    /// One list shows all of them, unless more leases are held below their common prefix than a list names.
    pub(super) async fn first_free<'k>(
        &self,
        candidates: &[Key],
        in_order: impl IntoIterator<Item = &'k Key>,
    ) -> Result<(Option<&'k Key>, Vec<LeaseRecord>)> {
        let mut held = self.list(common_prefix(candidates), MAX_PERMITS).await?;
        let is_whole = held.len() < MAX_PERMITS as usize;
        let candidates: BTreeSet<&Key> = candidates.iter().collect();
        held.retain(|it| candidates.contains(&it.info.key));
        let listed: BTreeSet<Key> = held.iter().map(|it| it.info.key.clone()).collect();
        for key in in_order.into_iter().filter(|it| !listed.contains(*it)) {
            let unlisted = if is_whole { None } else { self.inner.store().look(key, limit_for(self.ttl)).await? };
            let Some(record) = unlisted else { return Ok((Some(key), held)) };
            held.push(record);
        }
        Ok((None, held))
    }
}

/// The longest text that all of the keys start with.
fn common_prefix(keys: &[Key]) -> &str {
    let Some((first, others)) = keys.split_first() else { return "" };
    others.iter().fold(first.as_str(), |prefix, key| {
        let common = prefix.chars().zip(key.chars()).take_while(|(one, other)| one == other);
        &prefix[..common.map(|(one, _)| one.len_utf8()).sum()]
    })
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::{
        Error, Fault,
        lease::store::{Acquired, Claim, pass_on},
        testing::{Failure, MemoryStore, Operation},
    };

    const SECOND: Duration = Duration::from_secs(1);
    const JOBS: [&str; 3] = ["job:c", "job:a", "job:b"];

    fn calls(leases: &Leases<MemoryStore>) -> [u64; 3] {
        [Operation::Acquire, Operation::List, Operation::Look].map(|it| leases.store().faults().calls(it))
    }

    #[test]
    fn the_common_prefix_ends_at_a_whole_character() {
        let prefix = |keys: &[&'static str]| {
            let keys: Vec<Key> = keys.iter().map(|it| (*it).into()).collect();
            common_prefix(&keys).to_owned()
        };
        assert_eq!(prefix(&[]), "");
        assert_eq!(prefix(&["job:1"]), "job:1");
        assert_eq!(prefix(&["job:1", "job:12", "job:2"]), "job:");
        // `ä` and `ö` share their first byte.
        assert_eq!(prefix(&["jä", "jö"]), "j");
        assert_eq!(prefix(&["a", "b"]), "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_free_candidate_costs_one_statement_and_others_are_taken_in_the_order_of_preference() {
        let leases = Leases::new(MemoryStore::new());
        let first = leases.any(["job:c", "job:c", "job:a", "job:b"]).acquire().await.unwrap();
        assert_eq!((first.key().as_str(), calls(&leases)), ("job:c", [1, 0, 0]));
        let second = leases.any(JOBS).try_acquire().await.unwrap().unwrap();
        assert_eq!((second.key().as_str(), calls(&leases)), ("job:a", [3, 1, 0]));
        let third = leases.any(JOBS).acquire().await.unwrap();
        assert_eq!((third.key().as_str(), calls(&leases)), ("job:b", [5, 2, 0]));
        assert!(leases.any(JOBS).try_acquire().await.unwrap().is_none());
        drop((first, second, third));
        sleep(SECOND).await;
        let lease = leases.any(JOBS).ttl(3 * SECOND).min_hold(2 * SECOND).acquire().await.unwrap();
        lease.release().await.unwrap();
        let again = leases.any(JOBS).acquire().await.unwrap();
        assert_eq!(again.key(), "job:a", "`job:c` stays taken for its minimum hold");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_is_woken_by_a_release_of_any_candidate_in_its_process() {
        for (released, expected) in JOBS.into_iter().enumerate() {
            let leases = Leases::new(MemoryStore::new());
            let mut held = Vec::new();
            for key in JOBS {
                held.push(leases.lease(key).acquire().await.unwrap());
            }
            let waiting = tokio::spawn(leases.any(JOBS).wait(60 * SECOND).acquire());
            sleep(SECOND).await;
            let freed = Instant::now();
            held.remove(released).release().await.unwrap();
            let lease = waiting.await.unwrap().unwrap();
            assert_eq!((lease.key().as_str(), freed.elapsed()), (expected, Duration::ZERO), "it does not poll");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_takes_the_candidate_that_expires_first_at_once() {
        let store = MemoryStore::new();
        let (here, dead) = (Leases::new(store.client()), Leases::new(store.client()));
        let mut held = Vec::new();
        for (key, ttl) in JOBS.into_iter().zip([20, 5, 10]) {
            held.push(dead.lease(key).ttl(ttl * SECOND).acquire().await.unwrap());
        }
        dead.store().faults().partition();
        let asked = Instant::now();
        let refused = here.any(JOBS).wait(SECOND).acquire().await.unwrap_err();
        let Error::Contended { key, holder: Some(holder), .. } = refused else { panic!("{refused:?}") };
        assert_eq!((key.as_str(), holder.as_lease().unwrap().fence), ("job:a", held[1].fence()));
        let lease = here.any(JOBS).wait(60 * SECOND).acquire().await.unwrap();
        assert_eq!(lease.key(), "job:a");
        assert!(asked.elapsed() < 5 * SECOND + SECOND / 20, "{:?}", asked.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_one_process_share_a_queue_whatever_their_order() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let held = there.all(JOBS).acquire().await.unwrap();
        let mut orders = [JOBS; 4];
        for order in &mut orders {
            fastrand::shuffle(order);
        }
        let waiting = orders.map(|order| tokio::spawn(here.any(order).wait(60 * SECOND).acquire()));
        sleep(10 * SECOND).await;
        // One of them asks: 4 to 8 times a second after the first pauses. Each would have asked as often.
        assert!(calls(&here)[1] < 120, "{:?}", calls(&here));
        held.release().await.unwrap();
        sleep(SECOND).await;
        let finished = waiting.iter().filter(|it| it.is_finished()).count();
        assert_eq!((finished, here.health().held), (3, 3), "three candidates, four requests");
    }

    #[tokio::test(start_paused = true)]
    async fn processes_that_try_at_once_take_different_candidates() {
        let store = MemoryStore::new();
        let keys: Vec<String> = (0..4 * TRIES).map(|it| format!("job:{it}")).collect();
        let processes: Vec<_> = keys.iter().map(|_| Leases::new(store.client())).collect();
        let trying = processes.iter().map(|it| {
            it.store().faults().slow(SECOND / 1000);
            tokio::spawn(it.any(keys.clone()).try_acquire())
        });
        let mut taken = BTreeSet::new();
        let mut leases = Vec::new();
        for lease in trying.collect::<Vec<_>>() {
            let lease = lease.await.unwrap().unwrap().expect("there is one for each");
            assert!(taken.insert(lease.key().clone()));
            leases.push(lease);
        }
        assert_eq!(taken.len(), keys.len());
    }

    #[tokio::test(start_paused = true)]
    async fn candidates_that_a_list_is_too_short_to_name_are_looked_up() {
        let store = MemoryStore::new();
        let leases = Leases::new(store.client());
        let crowd = leases.all((0..MAX_PERMITS).map(|it| format!("a{it}"))).acquire().await.unwrap();
        let held: Vec<_> = (0..2 * TRIES).map(|it| format!("x{it:02}")).collect();
        let _held = leases.all(held.clone()).acquire().await.unwrap();
        let before = calls(&leases);
        let candidates = || held.clone().into_iter().chain(["y".to_owned(), "a1".to_owned()]);
        let lease = leases.any(candidates()).try_acquire().await.unwrap().unwrap();
        assert_eq!(lease.key(), "y");
        let [claims, lists, looks] = [0, 1, 2].map(|it| calls(&leases)[it] - before[it]);
        // The claim of the first one has told that it is held.
        assert_eq!((claims, lists, looks), (2, 1, u64::from(2 * TRIES)));
        assert!(leases.any(candidates()).try_acquire().await.unwrap().is_none());
        let refused = leases.any(["x00", "y"]).wait(SECOND).acquire().await.unwrap_err();
        assert!(matches!(refused, Error::Contended { holder: Some(_), .. }), "{refused:?}");
        // The crowd is not below this prefix.
        let _held = leases.lease("job:c").acquire().await.unwrap();
        let before = calls(&leases);
        assert_eq!(leases.any(JOBS).try_acquire().await.unwrap().unwrap().key(), "job:a");
        assert_eq!(calls(&leases)[2], before[2]);
        drop(crowd);
    }

    #[tokio::test(start_paused = true)]
    async fn a_candidate_that_became_free_after_its_claim_was_refused_is_taken() {
        let leases = Leases::new(MemoryStore::new());
        let held = leases.lease("job:c").acquire().await.unwrap();
        leases.store().faults().script(Operation::List, [Failure::Slow(SECOND)]);
        let trying = tokio::spawn(leases.any(["job:c"]).try_acquire());
        sleep(SECOND / 4).await;
        assert_eq!(calls(&leases), [2, 1, 0], "the claim was refused, and the list is on its way");
        held.release().await.unwrap();
        assert_eq!(trying.await.unwrap().unwrap().expect("it is free").key(), "job:c");
    }

    #[tokio::test(start_paused = true)]
    async fn a_candidate_that_became_free_after_the_wait_names_no_holder() {
        let leases = Leases::new(MemoryStore::new());
        let (held, _other) = (leases.lease("job:c").acquire().await.unwrap(), leases.lease("job:a").acquire().await);
        let millis = Duration::from_millis;
        leases.store().faults().script(Operation::List, [Failure::None, Failure::Slow(millis(20))]);
        let waiting = tokio::spawn(leases.any(["job:c", "job:a"]).wait(Duration::ZERO).acquire());
        sleep(millis(5)).await;
        assert_eq!(calls(&leases), [3, 2, 0], "it looks for the holder");
        held.release().await.unwrap();
        let refused = waiting.await.unwrap().unwrap_err();
        assert!(matches!(refused, Error::Contended { holder: None, .. }), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_claim_of_the_request_is_no_other_holder() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let _held = there.lease("job:a").ttl(5 * SECOND).acquire().await.unwrap();
        // The answers to the claim and to its release come too late.
        here.store().faults().script(Operation::Acquire, [Failure::Slow(8 * SECOND)]);
        here.store().faults().script(Operation::Release, [Failure::Silent; 1000]);
        let err = here.any(["job:c", "job:a"]).wait(20 * SECOND).acquire().await.unwrap_err();
        assert!(there.show("job:c").await.unwrap().is_some());
        assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn leases_that_are_no_candidates_are_in_nobodys_way() {
        let leases = Leases::new(MemoryStore::new());
        let _other = leases.lease("job:b2").ttl(SECOND).acquire().await.unwrap();
        let _held = leases.all(JOBS).acquire().await.unwrap();
        let refused = leases.any(JOBS).wait(SECOND).acquire().await.unwrap_err();
        let Error::Contended { key, .. } = refused else { panic!("{refused:?}") };
        assert!(JOBS.contains(&key.as_str()), "{key}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_for_any_does_not_queue_behind_one_for_all() {
        let leases = Leases::new(MemoryStore::new());
        let _held = leases.lease("job:a").acquire().await.unwrap();
        let all = tokio::spawn(leases.all(JOBS).wait(60 * SECOND).acquire());
        sleep(SECOND).await;
        let asked = Instant::now();
        let any = leases.any(JOBS).acquire().await.unwrap();
        assert_eq!((any.key().as_str(), asked.elapsed()), ("job:c", Duration::ZERO));
        assert!(!all.is_finished());
        all.abort();
    }

    /// A store that refuses the claims of some keys, as a database does while a transaction has pinned a lease that has
    /// expired, and shows them as free.
    #[derive(Clone)]
    struct Pinned {
        store: MemoryStore,
        pinned: Arc<Vec<Key>>,
    }

    impl LeaseStore for Pinned {
        pass_on!(lease_look, lease_renew, lease_release, lease_list, lease_sweep);

        async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
            let acquired = self.store.lease_acquire(claim).await?;
            if self.pinned.contains(&claim.key) {
                self.store.lease_release(&claim.key, claim.token, Duration::ZERO).await?;
                return Ok(Acquired::Held { free_in: Some(SECOND) });
            }
            Ok(acquired)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_candidate_that_looks_free_and_cannot_be_claimed_is_passed_over() {
        let store = MemoryStore::new();
        let leases = |pinned: &[&'static str]| {
            let pinned = pinned.iter().copied().map(Key::from).collect();
            Leases::new(Pinned { store: store.clone(), pinned: Arc::new(pinned) })
        };
        let claims = || store.faults().calls(Operation::Acquire);
        let lease = leases(&["job:c", "job:a"]).any(JOBS).try_acquire().await.unwrap().unwrap();
        assert_eq!((lease.key().as_str(), claims()), ("job:b", 3));
        lease.release().await.unwrap();
        assert!(leases(&JOBS).any(JOBS).try_acquire().await.unwrap().is_none());
        assert_eq!(claims(), 3 + 3 * u64::from(CLAIMS), "each a few times");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_holds_all_candidates_is_refused_and_one_that_holds_some_gets_another() {
        let leases = Leases::new(MemoryStore::new());
        let any = async || leases.any(["job:a", "job:b"]).wait(SECOND).acquire().await.map(|it| it.key().clone());
        assert_eq!(leases.lease("job:a").run(async |_| any().await).await.unwrap(), "job:b");
        assert_eq!(leases.all(["job:c", "job:d"]).run(async |_| any().await).await.unwrap(), "job:a");
        let held = leases.lease("job:b").acquire().await.unwrap();
        assert!(leases.lease("job:a").run(async |_| any().await).await.unwrap_err().is_contended());
        held.release().await.unwrap();
        let of_all = leases.all(JOBS).run(async |_| any().await).await;
        assert!(matches!(of_all, Err(Error::Reentrant { .. })), "{of_all:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn options_that_a_request_for_any_cannot_have_are_refused() {
        let leases = Leases::new(MemoryStore::new());
        let refused = async |request: LeaseRequest<MemoryStore>| match request.acquire().await.unwrap_err() {
            Error::InvalidOption { option, .. } => option,
            err => panic!("{err:?}"),
        };
        assert_eq!(refused(leases.any([""; 0])).await, "any");
        assert_eq!(refused(leases.any((0..1001).map(|it| format!("job:{it}")))).await, "any");
        let repeated = (0..1001).map(|it| format!("job:{}", it % 1000));
        assert_eq!(leases.any(repeated).acquire().await.unwrap().key(), "job:0");
        assert_eq!(refused(leases.any(JOBS).fair()).await, "fair");
        let permits = leases.any((0..100).map(|it| format!("job:{it}"))).take(2).acquire().await.unwrap_err();
        assert!(matches!(permits, Error::InvalidOption { option: "take", .. }), "{permits:?}");
        assert!(matches!(leases.any(["job:a", ""]).acquire().await, Err(Error::InvalidKey { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn where_no_claim_or_list_is_answered_nobody_is_said_to_hold_the_leases() {
        for (operation, wait) in [Operation::Acquire, Operation::List].into_iter().zip([SECOND, 20 * SECOND]) {
            let store = MemoryStore::new();
            let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
            let _held = there.lease("job:c").acquire().await.unwrap();
            here.store().faults().script(operation, [Failure::Silent; 1000]);
            let err = here.any(JOBS).wait(wait).acquire().await.unwrap_err();
            assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{operation:?}: {err:?}");
        }
        // Its own late claim is no other holder.
        let ttl = SECOND * 3 / 10;
        for wait in [Duration::ZERO, 2 * SECOND] {
            let leases = Leases::builder(MemoryStore::new()).ttl(ttl).build().unwrap();
            leases.store().faults().script(Operation::Acquire, [Failure::Slow(ttl + ttl / 3); 1000]);
            let err = leases.any(["job:a"]).wait(wait).acquire().await.unwrap_err();
            assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
        }
    }
}
