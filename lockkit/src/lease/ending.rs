//! How a lease ends: released by its holder, released in the background on drop, or handed over to a waiter of this
//! process.
//!
//! A lease that is handed over keeps its row, its token and its renewals; the holder changes in memory. A key that many
//! tasks want costs two statements for 33 holders or more. Waiters of other processes wait for 32 holders, or as many
//! as 10 ms and the fences of the grant allow, and for half of the ttl at most. Then it is released in the store, and
//! their tickets are looked at before this process takes it again.
//!
//! Not handed over: semaphores, readers and writers, several keys, fair requests (their order is that of all
//! processes), an unfinished `min_hold`, requests for another ttl, and anything where a node may lag behind
//! ([`Profile::shows_writes_at_once`](crate::store::Profile)): a token that the store grants exists only where the last
//! holder's work has arrived. A theft is known to the next renewal; until then the lease may be handed over.

use std::{pin::pin, sync::Arc};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::{
    batch,
    bounded::{limit_for, retry_pause},
    held::Lease,
    inner::Inner,
    leftovers::while_awaited,
    life::{
        keeper::Unfinished,
        kept::{Kept, Wants, release_failed},
        state::{Event, Pin},
    },
    queue::Queue,
    store::{Answer, BUSY_PAUSE, LeaseStore},
};
use crate::{
    body::guard::{Guard, Hold},
    observe::{self, Strategy},
    value::error::{LossReason, Result},
};

/// The result of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lease was held until now. It is free.
    WhileHeld,
    /// The lease was already lost. All work since the loss ran without it. The release changed nothing.
    AlreadyLost,
}

/// The obligation to release a lease.
pub(in crate::lease) struct Owned<S: LeaseStore> {
    pub(in crate::lease) kept: Arc<Kept>,
    pub(in crate::lease) inner: Arc<Inner<S>>,
    /// The queue of those to whom it may be handed over.
    pub(in crate::lease) queue: Option<Arc<Queue<Lease<S>>>>,
}

impl<S: LeaseStore> Owned<S> {
    /// Hands the lease over instead of releasing it, if somebody in this process waits for it.
    pub(in crate::lease) fn hand_over(&self) -> bool {
        let Self { inner, kept, queue } = self;
        queue.as_ref().is_some_and(|queue| hand_over_to_first(inner, kept, queue, Event::HandingOver))
    }
}

impl<S: LeaseStore> Hold for Owned<S> {
    fn abandon(self) {
        if self.hand_over() {
            return;
        }
        let Self { kept, inner, queue: _ } = self;
        let unfinished = inner.keeper.unfinished();
        inner.keeper.leave_to_store(&kept);
        // Nothing to release: the body under the lease or `close` has released it.
        if matches!(kept.lost(), Some(LossReason::Released | LossReason::Closed)) {
            return;
        }
        release_later(inner, kept, unfinished, Vec::new());
    }
}

/// Hands the lease over to the first caller who waits for it in this process, with the next fence. Asks no store. `how`
/// is the event for the lease: of a holder who ends it, or whose commit has succeeded.
pub(in crate::lease) fn hand_over_to_first<S: LeaseStore>(
    inner: &Arc<Inner<S>>,
    kept: &Arc<Kept>,
    queue: &Arc<Queue<Lease<S>>>,
    how: Event,
) -> bool {
    // Before the queue is locked: the store is the user's code.
    let Some(hand_over) = inner.hand_over() else { return false };
    let next = |wants: &Wants| {
        if !kept.suits(wants, hand_over) {
            return None;
        }
        let next = inner.keeper.replace(kept, wants, how)?;
        let weak = Arc::downgrade(&next);
        Some((Lease::handed_over(inner.clone(), next, Some(queue.clone())), weak))
    };
    let is_handed_over = queue.hand_over(kept, next);
    if is_handed_over {
        observe::handed_over(Strategy::Lease, &kept.key);
        kept.report();
    }
    is_handed_over
}

/// Releases the lease. Waits for a transaction that pins it.
pub(in crate::lease) async fn release<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) -> Result<Released> {
    let pin = inner.keeper.begin_release(kept);
    let is_late = || {
        // A transaction may take this long.
        if pin == Pin::No {
            inner.leftovers.note_answered(&kept.key, kept.token);
        }
    };
    let released = while_awaited(pin!(release_in_store(inner, kept, pin, true)), is_late).await;
    note_released(inner, kept, &released);
    if released? {
        inner.queues.released(kept.queue_key());
        return Ok(Released::WhileHeld);
    }
    inner.queues.freed(kept.queue_key());
    Ok(Released::AlreadyLost)
}

/// Releases the lease of a request that does not deliver it: at once, and without waking waiters.
pub(in crate::lease) async fn back_out<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) -> Result<()> {
    let pin = inner.keeper.begin_release(kept);
    let released = release_in_store(inner, kept, pin, false).await;
    note_released(inner, kept, &released);
    released.map(drop)
}

/// Asks the store to release the lease, at first `with_others` if it can, until the row is not locked. Returns `false`
/// if the token no longer held it.
async fn release_in_store<S: LeaseStore>(
    inner: &Inner<S>,
    kept: &Kept,
    pin: Pin,
    mut with_others: bool,
) -> Result<bool> {
    let (release, ttl) = (kept.release(), kept.ttl());
    note_ending(inner, kept);
    loop {
        let is_alone = !kept.is_open();
        let call = kept.asks();
        let answer = if with_others {
            batch::release(&inner.calls, &inner.keeper, &release, pin, ttl).await?
        } else {
            inner.store().release_with_pin(&release, pin, limit_for(ttl)).await?
        };
        kept.answered(call);
        match answer {
            Answer::Done => return Ok(true),
            Answer::Gone => return Ok(false),
            Answer::Busy => {
                // Sent when all other calls were answered, it has found the row locked: by one that pins it.
                if is_alone && pin != Pin::No {
                    inner.leftovers.pinned(&kept.key, kept.token);
                }
                with_others = false;
                sleep(BUSY_PAUSE).await;
            }
        }
    }
}

/// The lease is released now, or soon. No caller got it, or what was sent before may have its row locked.
pub(in crate::lease) fn note_ending<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) {
    if kept.is_open() {
        inner.leftovers.note_open(&kept.key, kept.token);
    }
    if !kept.is_delivered() {
        inner.leftovers.note_answered(&kept.key, kept.token);
    }
}

/// The release has found the lease, or not, or failed. It may have left something.
fn note_released<S: LeaseStore>(inner: &Inner<S>, kept: &Kept, released: &Result<bool>) {
    match released {
        Ok(true) => {
            kept.released();
            inner.leftovers.released(&kept.key, kept.token, true);
        }
        Ok(false) => {
            kept.on(Event::Gone);
            // A transaction that pinned it may be in COMMIT.
            if kept.is_pinned() {
                inner.leftovers.note(&kept.key, kept.token);
            }
            inner.leftovers.released(&kept.key, kept.token, false);
        }
        Err(_) => inner.leftovers.note(&kept.key, kept.token),
    }
}

/// Releases the lease in the background. Retries until the store has answered or the lease has expired. Moves to
/// another runtime if the first one ends.
pub(in crate::lease) fn release_later<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    kept: Arc<Kept>,
    unfinished: Unfinished,
    mut tried: Vec<runtime::Id>,
) {
    note_ending(&inner, &kept);
    // Without a runtime, the ttl frees the lease.
    let Some(runtime) = inner.keeper.runtime(&tried) else { return };
    tried.push(runtime.id());
    let releasing = Guard::new(Releasing { inner: inner.clone(), kept: kept.clone(), unfinished, tried });
    runtime.spawn(async move {
        loop {
            let released = release(&inner, &kept).await;
            if released.is_ok() || Instant::now() >= kept.until() {
                release_failed(released);
                break;
            }
            sleep(retry_pause(kept.ttl())).await;
        }
        drop(releasing.defuse());
    });
}

/// A release in the background. If its runtime ends, it continues on another one.
struct Releasing<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    kept: Arc<Kept>,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
}

impl<S: LeaseStore> Hold for Releasing<S> {
    fn abandon(self) {
        let Self { inner, kept, unfinished, tried } = self;
        release_later(inner, kept, unfinished, tried);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use crate::{
        Error, LeaseStore, Leases,
        testing::{Failure, MemoryStore, Operation},
    };

    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    fn leases() -> Leases<MemoryStore> {
        Leases::builder(MemoryStore::new().client()).ttl(TTL).wait(60 * TTL).build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_of_a_lease_that_the_caller_awaits() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        leases.store().faults().slow(TTL / 10);
        let releasing = tokio::spawn(lease.release());
        tokio::task::yield_now().await;
        leases.close().await.unwrap();
        leases.store().faults().heal();
        assert_eq!(leases.show("k").await.unwrap(), None);
        assert_eq!(releasing.await.unwrap().unwrap(), Released::WhileHeld);
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_after_a_body() {
        let leases = leases();
        let running = tokio::spawn({
            let leases = leases.clone();
            async move {
                let body = async |_| {
                    leases.store().faults().slow(TTL / 10);
                    Ok::<_, Error>(())
                };
                leases.lease("k").run(body).await
            }
        });
        while leases.store().faults().calls(Operation::Release) == 0 {
            tokio::task::yield_now().await;
        }
        leases.close().await.unwrap();
        leases.store().faults().heal();
        assert_eq!(leases.show("k").await.unwrap(), None);
        running.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_that_a_body_drops_goes_on_and_close_waits_for_it() {
        let leases = leases();
        let body = async |lease: Lease<_>| {
            leases.store().faults().slow(TTL / 10);
            assert!(timeout(TTL / 100, lease.release()).await.is_err());
            leases.close().await?;
            leases.store().faults().heal();
            assert_eq!(leases.show("k").await?, None);
            Ok::<_, Error>(())
        };
        leases.lease("k").run(body).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_lease_is_released_again_until_the_store_answers() {
        let leases = leases();
        let lease = leases.lease("k").ttl(60 * TTL).acquire().await.unwrap();
        leases.store().faults().partition();
        drop(lease);
        sleep(20 * TTL).await;
        leases.store().faults().heal();
        // The limit of a call, and the pause after it.
        sleep(6 * TTL).await;
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_of_the_ticket_and_the_gate_of_a_request_that_gave_up() {
        let store = MemoryStore::new();
        let here = Leases::new(store.client());
        let _held = (here.lease("k").acquire().await.unwrap(), here.rw("k").read().acquire().await.unwrap());
        for writes in [false, true] {
            let leases = Leases::builder(store.client()).wait(TTL).build().unwrap();
            let request = if writes { leases.rw("k").write() } else { leases.lease("k") };
            let waiting = tokio::spawn(request.acquire());
            sleep(TTL * 999 / 1000).await;
            let before = store.lease_list("k/", 100).await.unwrap().len();
            leases.store().faults().slow(TTL / 10);
            let released = leases.store().faults().calls(Operation::Release);
            while leases.store().faults().calls(Operation::Release) == released {
                sleep(Duration::from_micros(100)).await;
            }
            leases.close().await.unwrap();
            let after = store.lease_list("k/", 100).await.unwrap().len();
            assert_eq!((before, after), (2, 1), "the read lease alone is left");
            assert!(waiting.await.unwrap().is_err());
        }
    }

    #[test]
    fn a_release_whose_runtime_ends_goes_on_on_another() {
        let runtime = || runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let (first, second) = (runtime(), runtime());
        let leases = Leases::new(MemoryStore::new());
        let _kept = second.block_on(leases.lease("other").acquire()).unwrap();
        first.block_on(async {
            let lease = leases.lease("k").acquire().await.unwrap();
            leases.store().faults().script(Operation::Release, [Failure::Silent]);
            drop(lease);
            tokio::task::yield_now().await;
        });
        drop(first);
        second.block_on(async {
            sleep(TTL).await;
            assert_eq!(leases.show("k").await.unwrap(), None);
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_lease_is_released_once_if_the_store_answers() {
        let leases = leases();
        drop(leases.lease("k").acquire().await.unwrap());
        sleep(2 * TTL).await;
        assert_eq!(leases.store().faults().calls(Operation::Release), 1);
    }
}
