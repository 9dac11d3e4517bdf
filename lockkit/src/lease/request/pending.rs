//! What a request holds while it waits, and releases when it stops waiting.

use std::{sync::OnceLock, time::Duration};

use tokio::time::{Instant, timeout};

use super::claim::OpenClaim;
use crate::lease::held::Lease;
use crate::{
    body::guard::Guard,
    lease::{
        ending::note_ending,
        life::kept::release_failed,
        store::{LeaseRecord, LeaseStore},
    },
    mutex::Mutex,
    value::{error::Error, fence::Fence, key::Key, token::Token},
};

/// Time limit for releasing what was taken while waiting. A release that takes longer continues in the background.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);

/// Minimum difference between two expiries that are treated as different. Smaller differences come from the varying
/// latency of answers.
const ANSWERS_DIFFER: Duration = Duration::from_millis(5);

/// The state of one waiting request. Dropping it releases in the background what the request took.
#[derive(Debug)]
pub(super) struct Pending<S: LeaseStore> {
    /// Whether the request asks until its wait is over.
    pub(super) waits: bool,
    asked: OnceLock<Instant>,
    taken: Mutex<Taken<S>>,
}

#[derive(Debug)]
struct Taken<S: LeaseStore> {
    ticket: Option<Ticket<S>>,
    /// The lease that lets one request of its kind keep other leases while it waits. For a writer it is the writer's
    /// lease, for a request that gathers permits the gather lease.
    gate: Option<Lease<S>>,
    /// Permits that were granted so far, until there are enough.
    gathered: Vec<Lease<S>>,
    /// The claim that has a place in the store's own queue.
    place_in_store: Option<Guard<OpenClaim<S>>>,
    /// The requested key that was last found held.
    in_the_way: Option<Key>,
    /// The reason why the last attempt got no answer, if the store gave one.
    silence_reason: Option<Error>,
    /// The holder that was last seen with less than half of its ttl left, and when that is over. A live holder renews
    /// earlier.
    late: Option<(String, Instant)>,
}

/// The place of this request in the queue of the processes.
#[derive(Debug)]
struct Ticket<S: LeaseStore> {
    lease: Lease<S>,
    progress: Progress,
}

/// What the owner of a ticket has seen of the queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// The number of older tickets, and the oldest of them. `None` before the first look.
    pub(super) seen: Option<(u32, Fence)>,
    /// The last time that `seen` changed or the lease got another holder.
    pub(super) moved: Instant,
    /// When the holder's lease expires.
    pub(super) expires: Option<Instant>,
    /// Since when the lease has been seen free, while no older ticket took it.
    pub(super) free_since: Option<Instant>,
}

impl Progress {
    /// Records that the lease is held. A new holder or a renewal has a later expiry. `None`: a row lock hides the
    /// expiry.
    pub(super) fn held(&mut self, free_in: Option<Duration>) {
        let now = Instant::now();
        let expires = free_in.map(|it| now + it);
        let changed = match (expires, self.expires) {
            (Some(expires), Some(before)) => expires > before + ANSWERS_DIFFER,
            (expires, before) => expires.is_some() != before.is_some(),
        };
        if changed {
            self.moved = now;
            self.expires = expires;
        }
    }
}

impl<S: LeaseStore> Pending<S> {
    /// The state of a request that asks until its wait is over.
    pub(super) fn waiting() -> Self {
        Self { waits: true, ..Self::default() }
    }

    /// Time since the first attempt. `None` if this is the first one.
    pub(super) fn waited(&self) -> Option<Duration> {
        if let Some(asked) = self.asked.get() {
            return Some(asked.elapsed());
        }
        self.asked.get_or_init(Instant::now);
        None
    }

    /// The fence and key of the ticket, if it is still trusted.
    pub(super) fn ticket(&self) -> Option<(Fence, Key)> {
        let taken = self.taken.lock();
        let ticket = taken.ticket.as_ref().filter(|it| it.lease.is_trusted())?;
        Some((ticket.lease.fence(), ticket.lease.key().clone()))
    }

    /// Sets the ticket, or replaces a lost one.
    pub(super) fn set_ticket(&self, lease: Lease<S>) {
        let progress = Progress { seen: None, moved: Instant::now(), expires: None, free_since: None };
        self.taken.lock().ticket = Some(Ticket { lease, progress });
    }

    /// Applies `change` to what the owner of the ticket has seen, and returns the result. `None` without a ticket.
    pub(super) fn progress(&self, change: impl FnOnce(&mut Progress)) -> Option<Progress> {
        let mut taken = self.taken.lock();
        let progress = &mut taken.ticket.as_mut()?.progress;
        change(progress);
        Some(*progress)
    }

    /// Releases the ticket in the background.
    pub(super) fn drop_ticket(&self) {
        // Dropped after the mutex is unlocked.
        let ticket = self.taken.lock().ticket.take();
        drop(ticket);
    }

    /// Whether the request holds the gate lease, and the lease is still trusted.
    pub(super) fn has_gate(&self) -> bool {
        self.taken.lock().gate.as_ref().is_some_and(Lease::is_trusted)
    }

    pub(super) fn set_gate(&self, gate: Lease<S>) {
        let before = self.taken.lock().gate.replace(gate);
        // Dropped after the mutex is unlocked.
        drop(before);
    }

    pub(super) fn take_gate(&self) -> Option<Lease<S>> {
        let gate = self.taken.lock().gate.take();
        gate.filter(Lease::is_trusted)
    }

    /// Keeps these permits.
    pub(super) fn gather(&self, leases: impl IntoIterator<Item = Lease<S>>) {
        self.taken.lock().gathered.extend(leases);
    }

    /// The number of kept permits that are still trusted. Drops the others.
    pub(super) fn gathered(&self) -> u32 {
        let lost: Vec<_> = self.taken.lock().gathered.extract_if(.., |it| !it.is_trusted()).collect();
        drop(lost);
        u32::try_from(self.taken.lock().gathered.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn take_gathered(&self) -> Vec<Lease<S>> {
        std::mem::take(&mut self.taken.lock().gathered)
    }

    pub(super) fn take_place_in_store(&self) -> Option<Guard<OpenClaim<S>>> {
        self.taken.lock().place_in_store.take()
    }

    pub(super) fn set_place_in_store(&self, claim: Option<Guard<OpenClaim<S>>>) {
        let before = std::mem::replace(&mut self.taken.lock().place_in_store, claim);
        // Drop outside the lock.
        drop(before);
    }

    pub(super) fn in_the_way(&self) -> Option<Key> {
        self.taken.lock().in_the_way.clone()
    }

    pub(super) fn set_in_the_way(&self, key: Key) {
        self.taken.lock().in_the_way = Some(key);
    }

    pub(super) fn set_silence_reason(&self, reason: Option<Error>) {
        let before = std::mem::replace(&mut self.taken.lock().silence_reason, reason);
        // Dropped after the mutex is unlocked.
        drop(before);
    }

    pub(super) fn take_silence_reason(&self) -> Option<Error> {
        self.taken.lock().silence_reason.take()
    }

    /// Notes who was seen to hold the requested lease.
    pub(super) fn saw(&self, held: &LeaseRecord) {
        let LeaseRecord { token, info } = held;
        // A lease that stays taken for its `min_hold` was released by a live process.
        let is_late = !token.is_nobody() && info.ttl.is_some_and(|it| info.expires_in < it / 2);
        self.taken.lock().late = is_late.then(|| (info.holder.clone(), Instant::now() + info.expires_in));
    }

    /// The last holder that was seen, if it let its lease expire.
    pub(super) fn let_expire(&self) -> Option<String> {
        let taken = self.taken.lock();
        let (holder, expires) = taken.late.as_ref()?;
        (*expires <= Instant::now()).then(|| holder.clone())
    }

    /// Releases what was taken while waiting, so that it blocks no other request after this one is answered. Returns
    /// its tokens.
    pub(super) async fn release(&self) -> Vec<Token> {
        let place = self.take_place_in_store();
        let leases: Vec<_> = {
            let mut taken = self.taken.lock();
            let Taken { ticket, gate, gathered, .. } = &mut *taken;
            gathered.drain(..).chain(gate.take()).chain(ticket.take().map(|it| it.lease)).collect()
        };
        let tokens = leases.iter().map(|it| it.kept.token).chain(place.as_ref().map(|it| it.token())).collect();
        drop(place);
        for lease in &leases {
            note_ending(&lease.inner, &lease.kept);
        }
        let releases = async {
            for lease in leases {
                release_failed(lease.release().await);
            }
        };
        // A release that takes longer continues in the background.
        drop(timeout(RELEASE_LIMIT, releases).await);
        tokens
    }
}

impl<S: LeaseStore> Default for Pending<S> {
    fn default() -> Self {
        let taken = Taken {
            ticket: None,
            gate: None,
            gathered: Vec::new(),
            place_in_store: None,
            in_the_way: None,
            silence_reason: None,
            late: None,
        };
        Self { waits: false, asked: OnceLock::new(), taken: Mutex::new(taken) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::time::sleep;

    use crate::{lease::store::LeaseInfo, testing::MemoryStore};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const TTL: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_later_expiry_of_the_holder_moves_the_queue_and_the_jitter_of_answers_does_not() {
        let mut progress = Progress { seen: None, moved: Instant::now(), expires: None, free_since: None };
        let mut expected = |free_in: Option<Duration>, moves: bool| {
            progress.held(free_in);
            assert_eq!(progress.moved == Instant::now(), moves, "{free_in:?}");
        };
        for (free_in, moves) in [
            (Some(TTL), true),
            (Some(9 * SECOND), false),
            (Some(8 * SECOND + ANSWERS_DIFFER), false),
            (Some(8 * SECOND), true),
            (None, true),
            (None, false),
            (Some(TTL), true),
        ] {
            sleep(SECOND).await;
            expected(free_in, moves);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_is_dead_if_its_lease_ends_after_it_was_seen_in_its_last_half() {
        let (alive, late) = (TTL / 2, TTL * 49 / 100);
        for (token, expires_in, is_dead) in
            [(Token::random(), late, true), (Token::random(), alive, false), (Token::nobody(), late, false)]
        {
            let info = LeaseInfo {
                key: Key::from("k"),
                holder: "holder".to_owned(),
                fence: Fence::from(1),
                acquired_at: SystemTime::UNIX_EPOCH,
                held_for: Duration::ZERO,
                expires_in,
                renewals: 0,
                ttl: Some(TTL),
                is_this_process: false,
                is_released: false,
                flaw: None,
            };
            let pending = Pending::<MemoryStore>::default();
            pending.saw(&LeaseRecord::new(token, info));
            assert_eq!(pending.let_expire(), None, "it may be renewed");
            sleep(expires_in).await;
            assert_eq!(pending.let_expire().is_some(), is_dead, "{expires_in:?}");
        }
    }
}
