//! The first free lease of several.
//!
//! The candidates are ordinary leases. A request claims the first one, and if that is held, reads which are held and
//! claims the first of the others: one statement when the first candidate is free, three when others are held. The
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
        queue::wait::Outcome,
        store::{LeaseRecord, LeaseStore},
    },
    value::{error::Result, key::Key},
};

impl<S: LeaseStore> Leases<S> {
    /// A request for the lease of one of these keys: the first one that is free.
    ///
    /// Use it to share long jobs among processes without a table of jobs: each process takes a job that no other one
    /// has. The keys are tried in the order given, and a repeated key counts once; [`Lease::key`] is the key that was
    /// taken. Where the order does not matter, shuffle the keys, so that processes that ask at the same moment do not
    /// all claim the same one first. If the first key is free, the request sends one statement. Otherwise it reads the
    /// held leases below the longest common prefix of the keys, so give them one of their own, such as `report:`.
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
    /// Tries to take one of the leases. If the first one is likely to be free, claims it, and then the first that the
    /// store reports as free. Refused if none is free, or if others were faster [`TRIES`] times.
    pub(super) async fn try_any(
        &self,
        pending: &Pending<S>,
        candidates: &[Key],
        likely_free: bool,
    ) -> Result<Outcome<Vec<Lease<S>>>> {
        // Those that were found held by a claim. A list may be too short to name them.
        let mut refused = BTreeMap::new();
        let mut next = candidates.first().filter(|_| likely_free);
        for _ in 0..TRIES {
            if let Some(key) = next {
                match self.try_keys(pending, slice::from_ref(key), true).await? {
                    Outcome::Held { free_in } => refused.insert(key, free_in),
                    outcome => return Ok(outcome),
                };
            }
            let held = self.held_among(candidates).await?;
            let is_free = |key: &&Key| !refused.contains_key(key) && held.iter().all(|it| it.info.key != **key);
            next = candidates.iter().find(is_free);
            if next.is_none() {
                // A grant that came too late is being released. No other holder has that lease.
                if held.iter().any(|it| pending.has_claimed(it.token)) {
                    return Ok(Outcome::Silent);
                }
                let listed = held.iter().map(|it| it.info.expires_in);
                return Ok(Outcome::Held { free_in: listed.chain(refused.into_values().flatten()).min() });
            }
        }
        // Other requests were faster each time.
        Ok(Outcome::Held { free_in: None })
    }

    /// The held leases of these keys, in the order of the keys.
    pub(super) async fn held_among(&self, candidates: &[Key]) -> Result<Vec<LeaseRecord>> {
        let mut held = self.list(common_prefix(candidates), MAX_PERMITS).await?;
        let candidates: BTreeSet<&Key> = candidates.iter().collect();
        held.retain(|it| candidates.contains(&it.info.key));
        Ok(held)
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
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::{
        Error, Fault,
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
    async fn processes_that_ask_at_once_take_different_candidates() {
        let store = MemoryStore::new();
        let keys: Vec<String> = (0..8).map(|it| format!("job:{it}")).collect();
        let processes: Vec<_> = keys.iter().map(|_| Leases::new(store.client())).collect();
        let taking = processes.iter().map(|it| tokio::spawn(it.any(keys.clone()).wait(60 * SECOND).acquire()));
        let mut taken = BTreeSet::new();
        let mut leases = Vec::new();
        for lease in taking.collect::<Vec<_>>() {
            let lease = lease.await.unwrap().unwrap();
            assert!(taken.insert(lease.key().clone()));
            leases.push(lease);
        }
        assert_eq!(taken.len(), keys.len());
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_list_is_too_short_to_name_is_found_by_claims() {
        let store = MemoryStore::new();
        let leases = Leases::new(store.client());
        let crowd = leases.all((0..MAX_PERMITS).map(|it| format!("a{it}"))).acquire().await.unwrap();
        let _held = leases.lease("x").acquire().await.unwrap();
        let lease = leases.any(["x", "y", "a1"]).try_acquire().await.unwrap().unwrap();
        assert_eq!(lease.key(), "y");
        assert!(leases.any(["x", "y", "a1"]).try_acquire().await.unwrap().is_none());
        drop(crowd);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_holds_all_candidates_is_refused_and_one_that_holds_some_gets_another() {
        let leases = Leases::new(MemoryStore::new());
        let any = async || leases.any(["job:a", "job:b"]).wait(SECOND).acquire().await.map(|it| it.key().clone());
        assert_eq!(leases.lease("job:a").run(async |_| any().await).await.unwrap(), "job:b");
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
