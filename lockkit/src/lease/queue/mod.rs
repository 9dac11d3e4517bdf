//! The queues of one process: one for each key that somebody waits for.
//!
//! Only the first of a queue asks the store. The others wait in the order of their arrival, without a connection. A
//! holder of the same process hands its lease to the first of them without asking the store.

pub(crate) mod wait;

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    fifo::{Fifo, Place},
    lease::life::kept::{Kept, Wants},
    value::{fence::Fence, key::Key, token::Token},
};

/// How long a process remembers that it released a lease.
const LATELY: Duration = Duration::from_secs(1);

/// How often a process that reacquires the same lease in a loop checks for queued requests. Each check that finds none
/// doubles the pause, up to [`LOOK_AT_LEAST_EVERY`].
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// See [`LOOK_EVERY`].
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_millis(100);

/// The queues of one process. `H` is what a holder hands to the next caller.
#[derive(Debug)]
pub(crate) struct Queues<H> {
    queues: Mutex<HashMap<Key, Weak<Queue<H>>>>,
    lately: Mutex<HashMap<Key, Lately>>,
}

/// A lease that this process released within [`LATELY`].
#[derive(Debug)]
struct Lately {
    given_back: Instant,
    /// The last time that a check found tickets.
    queued: Option<Instant>,
    /// When to check again, after a check that found no tickets.
    look_at: Option<Instant>,
    look_every: Duration,
}

/// The queue of one key.
#[derive(Debug)]
pub(crate) struct Queue<H> {
    state: Mutex<State<H>>,
    /// Told when the lease may be free.
    pub(super) freed: Notify,
}

#[derive(Debug)]
struct State<H> {
    waiting: Fifo<Arc<Waiter<H>>>,
    /// How often the first of them was answered, or was handed a lease.
    answers: u64,
    /// The greatest fence that the store has granted to this process.
    fence: Fence,
    /// The last lease of this process that hands itself on when it is released.
    holder: Weak<Kept>,
}

/// Somebody who waits for a lease.
#[derive(Debug)]
struct Waiter<H> {
    wants: Option<Wants>,
    /// The leases that it runs under.
    under: Vec<Key>,
    given: Mutex<Option<H>>,
    /// Told when this caller is the first, or has been given a lease.
    called: Notify,
}

/// A place in a queue. Dropping it leaves the queue.
#[derive(Debug)]
pub(super) struct Queued<H> {
    pub(super) queue: Arc<Queue<H>>,
    caller: Arc<Waiter<H>>,
    place: Place,
    /// The number of answers when this caller joined.
    answers: u64,
}

impl<H> Queues<H> {
    /// This process released the lease. Wakes callers as [`freed`](Self::freed) does, and remembers the release for
    /// [`LATELY`].
    pub(crate) fn given_back(&self, key: &Key) {
        let now = Instant::now();
        {
            let mut lately = self.lately.lock();
            match lately.get_mut(key) {
                Some(it) if it.given_back + LATELY > now => it.given_back = now,
                _ => {
                    make_room(&mut lately, |_, it| it.given_back + LATELY > now);
                    let (queued, look_at) = (None, None);
                    lately.insert(key.clone(), Lately { given_back: now, queued, look_at, look_every: LOOK_EVERY });
                }
            }
        }
        self.freed(key);
    }

    /// Whether this process must check for tickets before it takes a lease again that it released a moment ago. A
    /// process that reacquires in a loop checks after [`LOOK_EVERY`], or every time if tickets were found within
    /// [`LATELY`].
    pub(crate) fn looks_for_tickets(&self, key: &Key) -> bool {
        let now = Instant::now();
        self.lately.lock().get(key).is_some_and(|it| {
            let is_contended = it.queued.is_some_and(|then| then + LATELY > now);
            it.given_back + LATELY > now && (is_contended || it.look_at.is_none_or(|at| at <= now))
        })
    }

    /// Records the result of a check for tickets.
    pub(crate) fn looked_for_tickets(&self, key: &Key, somebody_queues: bool) {
        if let Some(it) = self.lately.lock().get_mut(key) {
            let now = Instant::now();
            if somebody_queues {
                (it.queued, it.look_every) = (Some(now), LOOK_EVERY);
            } else {
                it.look_at = Some(now + it.look_every);
                it.look_every = (2 * it.look_every).min(LOOK_AT_LEAST_EVERY);
            }
        }
    }

    /// Wakes the first caller of the key's queue, and the requests for several keys that include this key.
    pub(crate) fn freed(&self, key: &Key) {
        if let Some(queue) = self.known(key) {
            queue.freed.notify_waiters();
        }
    }

    /// As [`Queue::granted`], of a lease that will not be handed on.
    pub(crate) fn granted_otherwise(&self, key: &Key, fence: Fence) -> bool {
        self.known(key).is_none_or(|it| it.granted(fence, Weak::new()))
    }

    /// The fence of the last holder of this process to whom the lease with this token was granted or handed on.
    pub(super) fn fence_of(&self, key: &Key, token: Token) -> Option<Fence> {
        let holder = self.known(key)?.state.lock().holder.upgrade();
        holder.filter(|it| it.token == token).map(|it| it.grant.fence)
    }

    /// The queue of this key, if somebody waits in it for a lease of this process.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(super) fn queue_with_waiter(&self, key: &Key, suits: impl FnOnce(&Wants) -> bool) -> Option<Arc<Queue<H>>> {
        let queue = self.known(key)?;
        let first = queue.state.lock().first();
        first?.wants.as_ref().is_some_and(suits).then_some(queue)
    }

    /// The queue of this key.
    pub(crate) fn queue(&self, key: &Key) -> Arc<Queue<H>> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(key).and_then(Weak::upgrade) {
            return queue;
        }
        make_room(&mut queues, |_, it| it.strong_count() > 0);
        let queue = Arc::new(Queue::default());
        queues.insert(key.clone(), Arc::downgrade(&queue));
        queue
    }

    /// The lease among `under` for which another caller waits that runs under one of `keys`: a caller under `under`
    /// that waits for `keys` and that other caller wait for each other.
    pub(super) fn opposite(&self, keys: &[Key], under: &[Key]) -> Option<Key> {
        let waits_under = |it: &Arc<Waiter<H>>| it.under.iter().any(|held| keys.contains(held));
        let is_wanted =
            |it: &&Key| self.known(it).is_some_and(|queue| queue.state.lock().waiting.iter().any(waits_under));
        under.iter().find(is_wanted).cloned()
    }

    fn known(&self, key: &Key) -> Option<Arc<Queue<H>>> {
        self.queues.lock().get(key).and_then(Weak::upgrade)
    }
}

impl<H> Queue<H> {
    /// Joins the end of the queue. With `wants`, holders of this process may hand their lease to this caller.
    pub(super) fn join(self: Arc<Self>, wants: Option<Wants>, under: Vec<Key>) -> Queued<H> {
        let caller = Arc::new(Waiter { wants, under, given: Mutex::default(), called: Notify::new() });
        let mut state = self.state.lock();
        let (place, answers) = (state.waiting.join(caller.clone()), state.answers);
        drop(state);
        Queued { queue: self, caller, place, answers }
    }

    /// Notes that the store has answered the first caller of the queue.
    pub(super) fn answered(&self) {
        self.state.lock().answers += 1;
    }

    /// Hands a lease to the first caller of the queue, if that caller takes leases from others and `make` returns one.
    /// Otherwise returns `false`. Only the lease that was granted last is handed on: another one was stolen before.
    pub(super) fn hand_on(&self, kept: &Arc<Kept>, make: impl FnOnce(&Wants) -> Option<(H, Weak<Kept>)>) -> bool {
        let mut state = self.state.lock();
        if !std::ptr::eq(state.holder.as_ptr(), Arc::as_ptr(kept)) {
            return false;
        }
        let Some(wants) = state.waiting.first().and_then(|(_, it)| it.wants.as_ref()) else { return false };
        let Some((handed, next_holder)) = make(wants) else { return false };
        let Some((_, first)) = state.waiting.take_first() else { unreachable!("BUG: it was there") };
        state.answers += 1;
        state.holder = next_holder;
        *first.given.lock() = Some(handed);
        // It waits for a lease of this process from now on, and looks after it.
        let next = state.first();
        drop(state);
        first.called.notify_one();
        next.inspect(|it| it.called.notify_one());
        true
    }

    /// A lease of this process that hands itself on when it is released.
    pub(super) fn holder(&self) -> Option<Arc<Kept>> {
        let holder = self.state.lock().holder.upgrade();
        holder.filter(|it| !it.is_lost())
    }

    /// Notes that the store has granted the lease to this process. Returns `false` if it has granted a greater fence
    /// before: this answer is late, and its lease was stolen meanwhile.
    pub(super) fn granted(&self, fence: Fence, kept: Weak<Kept>) -> bool {
        let mut state = self.state.lock();
        let is_latest = fence >= state.fence;
        if is_latest {
            (state.fence, state.holder) = (fence, kept);
        } else if state.holder.upgrade().is_none_or(|it| it.is_lost()) {
            // A store that was set up anew grants lower fences from now on: the next grant counts.
            state.fence = fence;
        }
        is_latest
    }
}

impl<H> State<H> {
    fn first(&self) -> Option<Arc<Waiter<H>>> {
        self.waiting.first().map(|(_, it)| it.clone())
    }

    /// Returns the caller that is the first thereby.
    fn leave(&mut self, place: Place) -> Option<Arc<Waiter<H>>> {
        let was_first = self.waiting.is_first(place);
        self.waiting.leave(place)?;
        if was_first { self.first() } else { None }
    }
}

impl<H> Queued<H> {
    /// Completes with a lease that was handed to this caller.
    pub(super) async fn handed(&self) -> H {
        loop {
            if let Some(handed) = self.take() {
                return handed;
            }
            self.caller.called.notified().await;
        }
    }

    /// Completes when this caller is the first, or with a lease that was handed to it.
    pub(super) async fn first_or_handed(&self) -> Option<H> {
        loop {
            if let Some(handed) = self.take() {
                return Some(handed);
            }
            if self.is_first() {
                return None;
            }
            self.caller.called.notified().await;
        }
    }

    /// The lease that was handed to this caller.
    pub(super) fn take(&self) -> Option<H> {
        self.caller.given.lock().take()
    }

    /// Whether the store has answered a caller of the queue since this one joined it.
    pub(super) fn is_answered(&self) -> bool {
        self.queue.state.lock().answers != self.answers
    }

    fn is_first(&self) -> bool {
        self.queue.state.lock().waiting.is_first(self.place)
    }
}

impl<H> Drop for Queued<H> {
    fn drop(&mut self) {
        let next = self.queue.state.lock().leave(self.place);
        if let Some(next) = next {
            next.called.notify_one();
        }
        // A lease that was handed to a caller who has gone is handed on when it is dropped, after the mutex is
        // unlocked.
        let handed = self.take();
        drop(handed);
    }
}

impl<H> Default for Queues<H> {
    fn default() -> Self {
        Self { queues: Mutex::default(), lately: Mutex::default() }
    }
}

impl<H> Default for Queue<H> {
    fn default() -> Self {
        let state = State { waiting: Fifo::default(), answers: 0, fence: Fence::from(0), holder: Weak::new() };
        Self { state: Mutex::new(state), freed: Notify::new() }
    }
}

/// Removes what is not to be kept whenever the map is full, so that its size stays in proportion to what is kept. The
/// room that it makes is as large as the rest, so that an insertion costs the same however many are kept.
fn make_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>, keep: impl FnMut(&K, &mut V) -> bool) {
    if map.len() == map.capacity() {
        map.retain(keep);
        map.reserve(map.len());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::{
        task::JoinHandle,
        time::{sleep, timeout},
    };

    use crate::{
        Lease, LeaseRequest, Leases, LossReason, Released,
        testing::{Failure, MemoryStore, Operation},
    };

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn leases(store: &MemoryStore) -> Leases<MemoryStore> {
        Leases::builder(store.client()).wait(60 * SECOND).build().unwrap()
    }

    fn waiting(request: LeaseRequest<MemoryStore>) -> JoinHandle<Lease<MemoryStore>> {
        tokio::spawn(async move { request.acquire().await.unwrap() })
    }

    /// How often the store was asked to grant or release a lease.
    fn asked(leases: &Leases<MemoryStore>) -> u64 {
        leases.store().faults().calls(Operation::Acquire) + leases.store().faults().calls(Operation::Release)
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_handed_on_in_order_with_rising_fences_and_the_store_is_not_asked() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let mut callers = Vec::new();
        for _ in 0..10 {
            callers.push(waiting(leases.lease("k")));
            sleep(SECOND / 1000).await;
        }
        let before = asked(&leases);
        let mut fence = first.fence();
        assert_eq!(first.release().await.unwrap(), Released::WhileHeld);
        for caller in callers {
            let lease = caller.await.unwrap();
            assert_eq!(lease.fence().get(), fence.get() + 1);
            assert!(lease.is_trusted() && lease.previous().is_none());
            assert_eq!(leases.show("k").await.unwrap().unwrap().fence, lease.fence(), "who really holds it");
            assert_eq!(leases.health().held, 1);
            fence = lease.fence();
            // A drop hands it on, too.
            drop(lease);
        }
        sleep(SECOND).await;
        assert_eq!(asked(&leases) - before, 1, "the last one is released in the store");
        let next = leases.lease("k").acquire().await.unwrap();
        assert!(next.fence() > fence, "the fences of the run are not given out again");
    }

    #[tokio::test(start_paused = true)]
    async fn other_processes_wait_for_a_bounded_number_of_holders() {
        for most in [0, 1, 32] {
            let store = MemoryStore::new();
            let leases = Leases::builder(store.client()).wait(60 * SECOND).hand_over(most).build().unwrap();
            let first = leases.lease("k").acquire().await.unwrap();
            let callers: Vec<_> = (0..40).map(|_| waiting(leases.lease("k"))).collect();
            sleep(SECOND / 1000).await;
            let before = leases.store().faults().calls(Operation::Release);
            drop(first);
            for caller in callers {
                drop(caller.await.unwrap());
            }
            sleep(SECOND).await;
            let released = leases.store().faults().calls(Operation::Release) - before;
            assert_eq!(released, 41_u64.div_ceil(u64::from(most) + 1), "{most}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn other_processes_wait_for_half_of_the_ttl_at_most() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let (mut lease, ttl) = (leases.lease("k").acquire().await.unwrap(), 30 * SECOND);
        let mut grants = 0;
        for _ in 0..20 {
            let next = waiting(leases.lease("k"));
            sleep(ttl / 8).await;
            let fence = lease.fence().get();
            drop(lease);
            lease = next.await.unwrap();
            grants += u64::from(lease.fence().get() != fence + 1);
        }
        assert_eq!(grants, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_handed_lease_is_renewed_and_its_loss_is_learned() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let next = waiting(leases.lease("k"));
        sleep(SECOND).await;
        drop(first);
        let lease = next.await.unwrap();
        sleep(100 * SECOND).await;
        assert!(lease.is_trusted(), "it is renewed");
        store.steal("k").unwrap();
        assert_eq!(timeout(30 * SECOND, lease.lost()).await.unwrap(), LossReason::Stolen);
        assert_eq!(lease.release().await.unwrap(), Released::AlreadyLost);
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_for_a_holder_of_this_process_is_granted_the_lease_when_the_holder_is_lost() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let (second, third) = (waiting(leases.lease("k")), waiting(leases.lease("k")));
        sleep(SECOND).await;
        drop(first);
        let second = second.await.unwrap();
        let calls = asked(&leases);
        sleep(SECOND / 2).await;
        assert_eq!(asked(&leases), calls);
        assert!(!third.is_finished());
        store.steal("k").unwrap();
        let third = timeout(3 * SECOND, third).await.unwrap().unwrap();
        assert!(third.fence() > second.fence());
        // It does not know yet. What it has is not handed to those who come now.
        assert!(second.is_trusted());
        let fourth = waiting(leases.lease("k"));
        sleep(SECOND / 10).await;
        assert_eq!(second.release().await.unwrap(), Released::AlreadyLost);
        sleep(SECOND / 10).await;
        assert!(!fourth.is_finished());
        drop(third);
        assert!(fourth.await.unwrap().is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_handed_to_a_dropped_caller_is_handed_on() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let mut gone = Box::pin(leases.lease("k").acquire());
        let is_ready = poll_fn(|cx| std::task::Poll::Ready(gone.as_mut().poll(cx).is_ready())).await;
        assert!(!is_ready);
        let mut left = Box::pin(leases.lease("k").acquire());
        poll_fn(|cx| std::task::Poll::Ready(left.as_mut().poll(cx).is_ready())).await;
        let last = waiting(leases.lease("k"));
        sleep(SECOND / 100).await;
        drop(left);
        let before = asked(&leases);
        drop(first);
        drop(gone);
        let last = timeout(SECOND, last).await.unwrap().unwrap();
        assert_eq!(asked(&leases), before);
        assert!(last.is_trusted());
        assert_eq!(leases.health().held, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_handed_on_is_released_in_the_store() {
        type Request = LeaseRequest<MemoryStore>;
        let other_ttl: fn(Request) -> Request = |it| it.ttl(7 * SECOND);
        let fair: fn(Request) -> Request = LeaseRequest::fair;
        let held_for: fn(Request) -> Request = |it| it.min_hold(3 * SECOND);
        let plain: fn(Request) -> Request = |it| it;
        for (first, second, passes) in [
            (plain, plain, true),
            (plain, other_ttl, false),
            (other_ttl, plain, false),
            (plain, fair, false),
            (fair, plain, false),
            (held_for, plain, false),
        ] {
            let store = MemoryStore::new();
            let leases = leases(&store);
            let lease = first(leases.lease("k")).acquire().await.unwrap();
            let next = waiting(second(leases.lease("k")));
            sleep(SECOND).await;
            let before = leases.store().faults().calls(Operation::Release);
            lease.release().await.unwrap();
            assert!(timeout(30 * SECOND, next).await.unwrap().unwrap().is_trusted());
            assert_eq!(leases.store().faults().calls(Operation::Release) - before == 0, passes);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_minimum_hold_counts_from_the_start_of_each_holder() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let next = waiting(leases.lease("k").min_hold(5 * SECOND));
        sleep(4 * SECOND).await;
        drop(first);
        let lease = next.await.unwrap();
        lease.release().await.unwrap();
        let begun = Instant::now();
        drop(leases.lease("k").acquire().await.unwrap());
        assert!(begun.elapsed() >= 5 * SECOND, "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_handle_to_a_lease_that_was_handed_on_does_nothing_to_the_next_holder() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let next = std::sync::OnceLock::new();
        let stale = leases
            .lease("k")
            .run(async |lease| {
                next.set(waiting(leases.lease("k"))).unwrap();
                sleep(SECOND).await;
                Ok::<_, crate::Error>(lease)
            })
            .await
            .unwrap();
        let lease = next.into_inner().unwrap().await.unwrap();
        assert!(lease.fence() > stale.fence());
        assert!(!stale.is_trusted());
        assert!(stale.extend(60 * SECOND).await.unwrap_err().is_lost());
        assert_eq!(stale.release().await.unwrap(), Released::AlreadyLost);
        sleep(100 * SECOND).await;
        assert!(lease.is_trusted());
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    }

    #[tokio::test(start_paused = true)]
    async fn closing_ends_the_handing_on() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let next = tokio::spawn(leases.lease("k").acquire());
        sleep(SECOND).await;
        leases.close().await.unwrap();
        drop(first);
        assert!(matches!(next.await.unwrap(), Err(crate::Error::Closed { .. })));
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_extended_lease_is_released_in_the_store() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        first.extend(600 * SECOND).await.unwrap();
        let next = waiting(leases.lease("k"));
        sleep(SECOND / 10).await;
        drop(first);
        drop(next.await.unwrap());
        assert!(leases.store().faults().calls(Operation::Release) >= 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_theft_returns_the_holder_which_is_notified_at_once() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let next = waiting(leases.lease("k"));
        sleep(SECOND / 10).await;
        let before = first.fence();
        drop(first);
        let lease = next.await.unwrap();
        assert_eq!(leases.steal_if("k", before).await.unwrap(), None);
        let taken = leases.steal_if("k", lease.fence()).await.unwrap().unwrap();
        assert!(taken.is_this_process && taken.fence == lease.fence());
        assert!(!lease.is_trusted());
    }

    /// The runtime on which a lease was granted ends, and with it the task that renews the lease.
    #[test]
    fn a_lease_that_was_handed_to_another_runtime_is_renewed_there() {
        let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (first_runtime, second_runtime) = (runtime(), runtime());
        let leases = Leases::builder(MemoryStore::new()).ttl(SECOND).wait(60 * SECOND).build().unwrap();
        let first = first_runtime.block_on(leases.lease("k").acquire()).unwrap();
        let next = second_runtime.spawn(leases.lease("k").acquire());
        second_runtime.block_on(async { sleep(SECOND / 20).await });
        first_runtime.block_on(async { drop(first) });
        let lease = second_runtime.block_on(next).unwrap().unwrap();
        drop(first_runtime);
        second_runtime.block_on(async { sleep(3 * SECOND).await });
        assert!(lease.is_trusted());
    }

    /// The runtime on which a lease was granted is not driven any more.
    #[test]
    fn a_lease_that_was_handed_on_by_a_runtime_that_stands_still_is_renewed() {
        let first_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let second_runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let leases = Leases::builder(MemoryStore::new()).ttl(SECOND).wait(60 * SECOND).build().unwrap();
        let first = first_runtime.block_on(leases.lease("k").acquire()).unwrap();
        let next = second_runtime.spawn(leases.lease("k").acquire());
        second_runtime.block_on(async { sleep(SECOND / 20).await });
        first_runtime.block_on(first.release()).unwrap();
        let lease = second_runtime.block_on(next).unwrap().unwrap();
        second_runtime.block_on(async { sleep(3 * SECOND).await });
        assert!(lease.is_trusted());
        drop(first_runtime);
    }

    #[test]
    fn leaving_keeps_the_order_and_forgets_the_caller() {
        let queues = Queues::<u32>::default();
        let key = Key::from("k");
        let queue = queues.queue(&key);
        let mut places: Vec<_> = (0..1000).map(|_| queue.clone().join(None, Vec::new())).collect();
        let last = places.pop().unwrap();
        assert!(places[0].is_first() && !last.is_first());
        for queued in places.drain(1..) {
            drop(queued);
        }
        assert_eq!(queue.state.lock().waiting.iter().count(), 2);
        places.clear();
        assert!(last.is_first());
        drop(last);
        assert!(queue.state.lock().waiting.first().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stolen_grant_that_arrives_after_a_later_one_is_not_handed_on() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        // The store grants it after a second, and the answer takes another.
        leases.store().faults().script(Operation::Acquire, [Failure::Slow(2 * SECOND)]);
        leases.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
        sleep(SECOND * 3 / 4).await;
        store.steal("k").expect("granted by now");
        let lease = leases.lease("k").acquire().await.unwrap();
        let next = waiting(leases.lease("k"));
        sleep(5 * SECOND).await;
        assert!(lease.is_trusted() && !next.is_finished());
        let fence = lease.fence();
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        let next = next.await.unwrap();
        assert!(next.fence() > fence && next.is_trusted());
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());
    }

    #[tokio::test(start_paused = true)]
    async fn a_theft_from_one_holder_does_not_take_the_lease_from_the_next() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let next = waiting(leases.lease("k"));
        sleep(SECOND).await;
        leases.store().faults().slow(SECOND / 100);
        let stealing = tokio::spawn({
            let (leases, fence) = (leases.clone(), first.fence());
            async move { leases.steal_if("k", fence).await.unwrap() }
        });
        // The look was answered, and the release is on its way.
        while leases.store().faults().calls(Operation::Release) == 0 {
            sleep(SECOND / 10_000).await;
        }
        drop(first);
        let next = next.await.unwrap();
        stealing.await.unwrap();
        sleep(20 * SECOND).await;
        assert!(next.is_trusted());
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());
    }
}
