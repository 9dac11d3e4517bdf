//! The queues of one process: one for each key that somebody waits for.
//!
//! Only the first of a queue asks the store. The others wait in the order of their arrival, without a connection. A
//! holder of the same process hands its lease to the first of them without asking the store.
//!
//! What happens is decided by three state machines without clock, I/O or lock: [`state`] (who is first, and who is
//! called), [`asking`] (when the first asks again) and [`recent`] (when it checks for other processes' tickets).

mod asking;
mod recent;
mod state;
pub(crate) mod wait;

use std::{
    collections::HashMap,
    hash::Hash,
    pin::pin,
    sync::{Arc, Weak},
};

use tokio::{sync::Notify, time::Instant};

use self::{
    recent::RecentRelease,
    state::{Standing, State},
};
use crate::{
    fifo::Place,
    lease::life::kept::{Kept, Wants},
    mutex::Mutex,
    value::{fence::Fence, key::Key, token::Token},
};

/// The queues of one process. `L` is what a holder hands over to the next caller.
#[derive(Debug)]
pub(crate) struct Queues<L> {
    queues: Mutex<HashMap<Key, Weak<Queue<L>>>>,
    recent: Mutex<HashMap<Key, RecentRelease>>,
}

/// The queue of one key.
#[derive(Debug)]
pub(crate) struct Queue<L> {
    state: Mutex<State<Arc<Caller>, L, Holder>>,
    /// Told when the lease may be free.
    freed: Notify,
    /// Told when its first caller has learned who has the lease.
    answered: Notify,
}

/// Somebody who waits for a lease.
#[derive(Debug)]
struct Caller {
    wants: Option<Wants>,
    /// The leases that it runs under.
    under: Vec<Key>,
    /// Told when this caller is the first, or was handed a lease.
    called: Notify,
}

/// A holder of this process whose lease is handed over to the next caller when it is released.
#[derive(Debug)]
struct Holder(Weak<Kept>);

/// A place in a queue. Dropping it leaves the queue.
#[derive(Debug)]
struct Queued<L> {
    queue: Arc<Queue<L>>,
    caller: Arc<Caller>,
    place: Place,
    /// The numbers of answers when this caller joined.
    answers: u64,
    shares: u64,
}

/// What a holder hands over.
pub(crate) trait HandedOver {
    fn is_trusted(&self) -> bool;
}

impl<L> Queues<L> {
    /// This process released the lease. Wakes callers as [`freed`](Self::freed) does, and remembers the release.
    pub(crate) fn released(&self, key: &Key) {
        let now = Instant::now();
        {
            let mut recent = self.recent.lock();
            if !recent.get_mut(key).is_some_and(|it| it.released_again(now)) {
                make_room(&mut recent, |_, it| it.is_recent(now));
                recent.insert(key.clone(), RecentRelease::released(now));
            }
        }
        self.freed(key);
    }

    /// Whether this process must check for tickets before it takes a lease again that it released a moment ago.
    pub(crate) fn looks_for_tickets(&self, key: &Key) -> bool {
        let now = Instant::now();
        self.recent.lock().get(key).is_some_and(|it| it.must_check(now))
    }

    /// Records the result of a check for tickets.
    pub(crate) fn looked_for_tickets(&self, key: &Key, has_tickets: bool) {
        if let Some(it) = self.recent.lock().get_mut(key) {
            it.checked(Instant::now(), has_tickets);
        }
    }

    /// Wakes the first caller of the key's queue, and the requests for several keys that include this key.
    pub(crate) fn freed(&self, key: &Key) {
        if let Some(queue) = self.known(key) {
            queue.freed.notify_waiters();
        }
    }

    /// As [`Queue::granted`], of a lease that will not be handed over to the next caller.
    pub(crate) fn granted_otherwise(&self, key: &Key, fence: Fence) -> bool {
        self.known(key).is_none_or(|it| it.state.lock().granted(fence, None, Holder::is_lost))
    }

    /// The fence of the last holder of this process to whom the lease with this token was granted or handed over.
    pub(super) fn fence_of(&self, key: &Key, token: Token) -> Option<Fence> {
        let holder = self.known(key)?.state.lock().holder()?.0.upgrade();
        holder.filter(|it| it.token == token).map(|it| it.grant.fence)
    }

    /// The queue of this key, if somebody waits in it for a lease of this process.
    pub(super) fn queue_with_waiter(&self, key: &Key, suits: impl FnOnce(&Wants) -> bool) -> Option<Arc<Queue<L>>> {
        let queue = self.known(key)?;
        let first = queue.state.lock().first();
        first?.wants.as_ref().is_some_and(suits).then_some(queue)
    }

    /// The queue of this key.
    pub(crate) fn queue(&self, key: &Key) -> Arc<Queue<L>> {
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
    fn opposite(&self, keys: &[Key], under: &[Key]) -> Option<Key> {
        let waits_under = |it: &Arc<Caller>| it.under.iter().any(|held| keys.contains(held));
        let is_wanted = |it: &&Key| self.known(it).is_some_and(|queue| queue.state.lock().waiting().any(waits_under));
        under.iter().find(is_wanted).cloned()
    }

    fn known(&self, key: &Key) -> Option<Arc<Queue<L>>> {
        self.queues.lock().get(key).and_then(Weak::upgrade)
    }
}

impl<L> Queue<L> {
    /// Joins the end of the queue. With `wants`, holders of this process may hand their lease over to this caller.
    fn join(self: Arc<Self>, wants: Option<Wants>, under: Vec<Key>) -> Queued<L> {
        let caller = Arc::new(Caller { wants, under, called: Notify::new() });
        let mut state = self.state.lock();
        let ((place, is_first), answers, shares) = (state.join(caller.clone()), state.answers(), state.shares());
        drop(state);
        if is_first {
            caller.called.notify_one();
        }
        Queued { queue: self, caller, place, answers, shares }
    }

    /// Hands a lease over to the first caller of the queue, if that caller takes leases from others and `make` returns
    /// one. Otherwise returns `false`. Only the lease that was granted last is handed over: another one was stolen
    /// before.
    pub(super) fn hand_over(&self, kept: &Arc<Kept>, make: impl FnOnce(&Wants) -> Option<(L, Weak<Kept>)>) -> bool {
        let make = |caller: &Arc<Caller>| make(caller.wants.as_ref()?).map(|(lease, next)| (lease, Holder(next)));
        let served = self.state.lock().serve_first(&Holder(Arc::downgrade(kept)), make);
        served.inspect(|it| it.called.notify_one()).is_some()
    }

    /// Notes that the first caller of the queue has learned who has the lease.
    fn answered(&self) {
        self.state.lock().answered();
        self.answered.notify_waiters();
    }

    /// Notes that the first caller of the queue has got what the next one may have, too.
    fn shared(&self) {
        self.state.lock().shared();
    }

    /// A lease of this process that is handed over to the next caller when it is released.
    fn holder(&self) -> Option<Arc<Kept>> {
        let holder = self.state.lock().holder()?.0.upgrade();
        holder.filter(|it| !it.is_lost())
    }

    /// Notes that the store has granted the lease to this process. Returns `false` if it has granted a greater fence
    /// before: this answer is late, and its lease was stolen meanwhile.
    pub(super) fn granted(&self, fence: Fence, kept: Weak<Kept>) -> bool {
        self.state.lock().granted(fence, Some(Holder(kept)), Holder::is_lost)
    }
}

impl<L: HandedOver> Queued<L> {
    /// Completes with a lease that was handed over to this caller.
    async fn handed_over(&self) -> L {
        loop {
            // First, because the queue is locked only if there is something to see: others use it meanwhile.
            self.caller.called.notified().await;
            if let Some(lease) = self.take() {
                return lease;
            }
        }
    }

    /// Completes when this caller is the first, or with a lease that was handed over to it.
    async fn first_or_handed_over(&self) -> Option<L> {
        loop {
            self.caller.called.notified().await;
            match self.standing() {
                Standing::First => return None,
                Standing::HandedOver(lease) => return Some(lease),
                Standing::Behind => {}
            }
        }
    }

    /// The lease that was handed over to this caller.
    fn take(&self) -> Option<L> {
        if let Standing::HandedOver(lease) = self.standing() { Some(lease) } else { None }
    }

    /// A caller who was handed a lease that is lost meanwhile goes on as the first, and asks at once.
    fn standing(&self) -> Standing<L> {
        let standing = self.queue.state.lock().standing(self.place);
        match standing {
            Standing::HandedOver(lease) if !lease.is_trusted() => {
                self.queue.freed.notify_waiters();
                Standing::First
            }
            standing => standing,
        }
    }
}

impl<L> Queued<L> {
    /// Whether a caller of the queue has learned, since this one joined it, who has the lease.
    fn is_answered(&self) -> bool {
        self.queue.state.lock().answers() != self.answers
    }

    /// Whether a caller of the queue has got, since this one joined it, what others may have, too.
    fn others_share(&self) -> bool {
        self.queue.state.lock().shares() != self.shares
    }

    /// Completes when one has learned who has the lease.
    async fn answered(&self) {
        loop {
            let mut answered = pin!(self.queue.answered.notified());
            answered.as_mut().enable();
            if self.is_answered() {
                return;
            }
            answered.await;
        }
    }
}

impl<L> Drop for Queued<L> {
    fn drop(&mut self) {
        let left = self.queue.state.lock().leave(self.place);
        if let Some(next) = left.next {
            next.called.notify_one();
        }
        // A lease that was handed over to a caller who has gone is handed over to the next when it is dropped, after
        // the mutex is unlocked.
        drop(left.handed_over);
    }
}

impl Holder {
    fn is_lost(&self) -> bool {
        self.0.upgrade().is_none_or(|it| it.is_lost())
    }
}

impl PartialEq for Holder {
    fn eq(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }
}

impl<L> Default for Queues<L> {
    fn default() -> Self {
        Self { queues: Mutex::default(), recent: Mutex::default() }
    }
}

impl<L> Default for Queue<L> {
    fn default() -> Self {
        Self { state: Mutex::default(), freed: Notify::new(), answered: Notify::new() }
    }
}

/// Removes what is not to be kept whenever the map is full, so that its size stays in proportion to what is kept. The
/// room that it makes is as large as the rest, so that an insertion costs the same however many are kept.
pub(super) fn make_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>, keep: impl FnMut(&K, &mut V) -> bool) {
    if map.len() == map.capacity() {
        map.retain(keep);
        map.reserve(map.len());
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, thread, time::Duration};

    use tokio::{
        runtime::{self, Runtime},
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
            // A drop hands it over, too.
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
    async fn within_a_moment_a_lease_is_handed_on_for_as_long_as_its_fences_last() {
        const CALLERS: u64 = 600;
        let store = MemoryStore::new();
        let leases = leases(&store);
        let mut last = leases.lease("k").acquire().await.unwrap();
        let callers: Vec<_> = (0..CALLERS).map(|_| waiting(leases.lease("k"))).collect();
        sleep(SECOND / 1000).await;
        let before = leases.store().faults().calls(Operation::Release);
        for caller in callers {
            let fence = last.fence();
            drop(last);
            last = caller.await.unwrap();
            assert!(last.fence() > fence);
        }
        drop(last);
        sleep(SECOND).await;
        let released = leases.store().faults().calls(Operation::Release) - before;
        assert_eq!(released, (CALLERS + 1).div_ceil(256), "a grant has 256 fences");
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
    async fn a_caller_whose_lease_was_lost_before_it_had_it_keeps_its_place() {
        let store = MemoryStore::new();
        let leases = leases(&store);
        let first = leases.lease("k").acquire().await.unwrap();
        let served = Mutex::new(Vec::new());
        let caller = |number| {
            let request = leases.lease("k").acquire();
            let served = &served;
            Box::pin(async move {
                let lease = request.await.unwrap();
                served.lock().push(number);
                assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
            })
        };
        let (mut second, mut third) = (caller(2), caller(3));
        for caller in [&mut second, &mut third] {
            assert!(timeout(SECOND / 1000, caller).await.is_err());
        }
        leases.store().faults().partition();
        drop(first);
        sleep(40 * SECOND).await;
        assert_eq!(Leases::new(store.client()).show("k").await.unwrap(), None, "it has expired");
        leases.store().faults().heal();
        tokio::join!(third, second);
        assert_eq!(*served.lock(), [2, 3]);
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

    fn runtime() -> Runtime {
        runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    }

    /// A lease that `first` has granted, and that is handed over to a caller on `second`. Its ttl leaves a busy machine
    /// two thirds of it for the first renewal.
    fn handed_over(first: &Runtime, second: &Runtime) -> (Leases<MemoryStore>, Lease<MemoryStore>) {
        let leases = Leases::builder(MemoryStore::new()).ttl(10 * SECOND).wait(60 * SECOND).build().unwrap();
        let held = first.block_on(leases.lease("k").acquire()).unwrap();
        let next = second.spawn(leases.lease("k").acquire());
        while leases.0.queues.known(&"k".into()).is_none_or(|it| it.state.lock().waiting().count() == 0) {
            thread::yield_now();
        }
        let handed_over = held.fence().get() + 1;
        first.block_on(async { drop(held) });
        let lease = second.block_on(next).unwrap().unwrap();
        assert_eq!(lease.fence().get(), handed_over);
        (leases, lease)
    }

    /// Waits for a renewal. Without one, the lease is lost.
    fn is_renewed(leases: &Leases<MemoryStore>, lease: &Lease<MemoryStore>) {
        let renewals = || leases.store().faults().calls(Operation::Renew);
        let before = renewals();
        while renewals() == before {
            assert!(lease.is_trusted());
            thread::sleep(SECOND / 100);
        }
    }

    /// The runtime on which a lease was granted ends, and with it the task that renews the lease.
    #[test]
    fn a_lease_that_was_handed_to_another_runtime_is_renewed_there() {
        let (first, second) = (runtime(), runtime());
        let (leases, lease) = handed_over(&first, &second);
        drop(first);
        is_renewed(&leases, &lease);
    }

    /// The runtime on which a lease was granted is not driven any more.
    #[test]
    fn a_lease_that_was_handed_on_by_a_runtime_that_stands_still_is_renewed() {
        let first = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let second = runtime();
        let (leases, lease) = handed_over(&first, &second);
        is_renewed(&leases, &lease);
        drop(first);
    }

    #[test]
    fn leaving_keeps_the_order_and_forgets_the_caller() {
        let queues = Queues::<()>::default();
        let key = Key::from("k");
        let queue = queues.queue(&key);
        let mut places: Vec<_> = (0..1000).map(|_| queue.clone().join(None, Vec::new())).collect();
        let last = places.pop().unwrap();
        assert_eq!((places[0].standing(), last.standing()), (Standing::First, Standing::Behind));
        for queued in places.drain(1..) {
            drop(queued);
        }
        assert_eq!(queue.state.lock().waiting().count(), 2);
        places.clear();
        assert_eq!(last.standing(), Standing::First);
        drop(last);
        assert!(queue.state.lock().first().is_none());
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
    async fn a_theft_of_a_permit_wakes_the_next_request() {
        let leases = leases(&MemoryStore::new());
        let _held = leases.semaphore("k", 1).acquire().await.unwrap();
        let next = tokio::spawn(leases.semaphore("k", 1).acquire());
        sleep(30 * SECOND).await;
        let permit = leases.list("k/permit/").await.unwrap().remove(0);
        let stolen = Instant::now();
        leases.steal(permit.key).await.unwrap().unwrap();
        let _next = next.await.unwrap().unwrap();
        assert_eq!(stolen.elapsed(), Duration::ZERO, "it does not poll");
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

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_extended_by_its_own_ttl_is_still_handed_on() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").ttl(10 * SECOND).acquire().await.unwrap();
        lease.extend(10 * SECOND).await.unwrap();
        let next = waiting(leases.lease("k").ttl(10 * SECOND));
        sleep(SECOND).await;
        lease.release().await.unwrap();
        let _next = next.await.unwrap();
        assert_eq!(leases.store().faults().calls(Operation::Release), 0);
    }

    #[test]
    fn queues_that_nobody_uses_are_forgotten() {
        let (queues, used) = (Queues::<u32>::default(), Key::from("used"));
        let queue = queues.queue(&used);
        for number in 0..10_000 {
            drop(queues.queue(&format!("k{number}").into()));
        }
        assert!(queues.queues.lock().len() < 100);
        assert!(Arc::ptr_eq(&queue, &queues.queue(&used)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lower_fence_is_late_while_the_holder_lives_and_a_new_beginning_after_it() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").acquire().await.unwrap();
        let (queues, key) = (Queues::<u32>::default(), Key::from("k"));
        let queue = queues.queue(&key);
        assert!(queue.granted(Fence::from(9), Arc::downgrade(&lease.kept)));
        assert_eq!(queues.fence_of(&key, lease.kept.token), Some(lease.fence()));
        assert_eq!(queues.fence_of(&key, Token::random()), None);
        assert!(!queues.granted_otherwise(&key, Fence::from(5)) && !queues.granted_otherwise(&key, Fence::from(6)));
        drop(lease);
        sleep(SECOND).await;
        // It may have been late. The next one was granted by a store that was set up anew.
        assert!(!queues.granted_otherwise(&key, Fence::from(5)) && queues.granted_otherwise(&key, Fence::from(6)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_alone_seldom_looks_for_the_tickets_of_others() {
        let leases = leases(&MemoryStore::new());
        for _ in 0..1000 {
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
            sleep(SECOND / 1000).await;
        }
        let looks = leases.store().faults().calls(Operation::List);
        assert!((10..=30).contains(&looks), "{looks}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_of_several_leases_wakes_the_requests_for_one_of_them() {
        let leases = leases(&MemoryStore::new());
        let both = leases.all(["k", "l"]).acquire().await.unwrap();
        let next = waiting(leases.lease("l"));
        sleep(10 * SECOND).await;
        let released = Instant::now();
        both.release().await.unwrap();
        let _next = next.await.unwrap();
        assert_eq!(released.elapsed(), Duration::ZERO, "it does not poll");
    }
}
