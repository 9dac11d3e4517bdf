//! Keeps the leases of a process alive: renews due leases in batches, and sweeps old keys.
//!
//! Each runtime has one task, which renews the leases that were granted on it, or handed over to a caller on it. When a
//! runtime ends, its leases move at once to the task of another one; without one, to the next that uses these `Leases`.
//! A runtime that is not driven renews nothing and has not ended.
//!
//! One statement renews up to 500 leases. When one is due, all that would be due within half of their interval are
//! renewed with it, and their next time is drawn once for all, so they stay together. The schedule is ordered by time:
//! waking up costs what is due, not what is held.
//!
//! Renewals and extensions of one lease can be in flight at once and arrive in any order. The row keeps the greatest
//! expiry, the process the latest trust: in no order does the trust outlast the row, unless a clock was set back. A
//! renewal that is in flight while the lease is handed over counts for the holder at the time of its answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};

use crate::{
    body::guard::{Guard, Hold},
    lease::{
        bounded::{Bounded, LEAST, LIMIT},
        life::{
            calls::Call,
            kept::{Kept, Wants},
            state::{Effect, Event, Pin},
        },
        store::{Acquired, Answer, Claim, LeaseStore, Release, Renewal},
    },
    mutex::Mutex,
    observe,
    policy::half_jitter,
    value::{error::Result, fence::Fence, token::Token},
};

/// Maximum number of leases in one renewal or release statement.
pub(crate) const BATCH: usize = 500;

/// Maximum number of concurrent renewal statements of one task.
const CONCURRENT: usize = 4;

/// Maximum number of rows that one sweep statement deletes.
const SWEEP_BATCH: u32 = 500;

/// The lease of the sweeper. Only its holder sweeps, so one process sweeps at a time.
const SWEEPER: &str = "lockkit/sweeper";

/// The ttl of the sweeper's lease, unless the store's longest is shorter. After a sweeper dies, other processes wait at
/// most this long.
const SWEEPER_TTL: Duration = Duration::from_mins(1);

/// How often to sweep, and how long a key must be unused before it is deleted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sweep {
    pub(crate) every: Duration,
    pub(crate) retention: Duration,
}

/// Handle to the renewal tasks. They end when the last handle is dropped.
pub(crate) struct Keeper<S: LeaseStore>(Arc<Shared<S>>);

struct Shared<S> {
    store: Bounded<S>,
    holder: Arc<str>,
    sweep: Option<Sweep>,
    state: Mutex<State>,
    outage: AtomicBool,
    /// The number of claims, commits and releases in flight.
    unfinished: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    /// In an order that depends on nothing else, so that a simulated run can be repeated.
    entries: BTreeMap<Token, Entry>,
    /// One per runtime in use.
    rounds: Vec<Round>,
    next_sweep: Option<Instant>,
    is_closed: bool,
}

/// The leases that one runtime renews.
struct Round {
    runtime: Handle,
    schedule: BTreeSet<(Instant, Token)>,
    /// When the task will next check the schedule.
    planned: Option<Instant>,
    changed: Arc<Notify>,
    task: Task,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    NotStarted,
    Running,
    /// The runtime has ended, and no other runtime is known.
    Ended,
}

/// The work that is due when a task checks its schedule.
#[derive(Default)]
struct Due {
    renewals: Vec<Arc<Kept>>,
    lost: Vec<Arc<Kept>>,
    /// When to check again.
    next: Option<Instant>,
}

struct Entry {
    kept: Arc<Kept>,
    due: Instant,
    runtime: Id,
}

impl Entry {
    /// Whether it renews this lease, and not the one of a later holder.
    fn is_of(&self, kept: &Kept) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.kept), kept)
    }
}

impl<S: LeaseStore> Clone for Keeper<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: LeaseStore> Keeper<S> {
    pub(crate) fn new(store: S, holder: Arc<str>, sweep: Option<Sweep>) -> Self {
        Self(Arc::new(Shared {
            store: Bounded::new(store),
            holder,
            sweep,
            state: Mutex::default(),
            outage: AtomicBool::new(false),
            unfinished: watch::Sender::new(0),
        }))
    }

    pub(crate) fn store(&self) -> &Bounded<S> {
        &self.0.store
    }

    /// Display name of the claimant. Never compared to decide who holds a lease.
    pub(crate) fn holder(&self) -> &Arc<str> {
        &self.0.holder
    }

    /// Starts to renew the lease on the current runtime. Returns `false` if the keeper is closed.
    pub(crate) fn keep(&self, kept: &Arc<Kept>) -> bool {
        let mut state = self.0.state.lock();
        if state.is_closed {
            return false;
        }
        let runtime = Handle::current();
        let is_adopting = state.visit(&runtime);
        let due = if is_adopting { Instant::now() } else { first_renewal(kept) };
        // Removes any earlier entry of this token.
        state.remove_any_holder(kept.token);
        state.entries.insert(kept.token, Entry { kept: kept.clone(), due, runtime: runtime.id() });
        let round = state.round_of(runtime.id()).expect("BUG: `visit` has made the round");
        round.schedule.insert((due, kept.token));
        let waking = round.waking(due);
        drop(state);
        waking.wake(&self.0);
        true
    }

    /// Registers the current runtime, so that it can take over leases when another runtime ends. Starts the runtime's
    /// task at once, because the task's drop detects the end of the runtime.
    pub(crate) fn visit(&self) {
        self.enter(None);
    }

    /// Renews a lease on the current runtime that was handed to a caller on it. Nobody may drive the runtime of its
    /// last holder.
    pub(crate) fn take_over(&self, handed: &Kept) {
        self.enter(Some(handed));
    }

    fn enter(&self, handed: Option<&Kept>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = self.0.state.lock();
        let is_adopting = state.visit(&runtime);
        let moved = handed.and_then(|it| state.renew_on(it, runtime.id()));
        let Some(round) = state.round_of(runtime.id()) else { return };
        let is_to_check = is_adopting || round.task == Task::NotStarted;
        if let Some(due) = is_to_check.then(Instant::now).or(moved) {
            let waking = round.waking(due);
            drop(state);
            waking.wake(&self.0);
        }
    }

    /// A runtime that is not known to have ended and is not in `other_than`.
    pub(crate) fn runtime(&self, other_than: &[Id]) -> Option<Handle> {
        let is_other = |it: &Handle| !other_than.contains(&it.id());
        if let Some(here) = Handle::try_current().ok().filter(is_other) {
            return Some(here);
        }
        let state = self.0.state.lock();
        let mut living = state.rounds.iter().filter(|it| it.task != Task::Ended).map(|it| &it.runtime);
        living.find(|it| is_other(it)).cloned()
    }

    /// The lease has just been renewed outside the renewal task.
    pub(crate) fn renewed(&self, kept: &Kept) {
        self.0.reschedule(kept.token, first_renewal(kept));
    }

    /// Stops renewing the lease, which only the store frees from now on. One that was handed over before is renewed for
    /// its next holder.
    pub(crate) fn leave_to_store(&self, kept: &Kept) {
        kept.on(Event::StoreOnly);
        self.stop_renewing(kept);
    }

    /// Stops renewing the lease, unless it was handed over before.
    pub(crate) fn stop_renewing(&self, kept: &Kept) {
        self.0.state.lock().remove_if_of(kept);
    }

    /// Whether the lease with this token has this fence now. If so, only the store frees it from now on. `None` if this
    /// process does not renew it.
    pub(crate) fn leave_to_store_if(&self, token: Token, fence: Fence) -> Option<bool> {
        let state = self.0.state.lock();
        let kept = &state.entries.get(&token)?.kept;
        let has_it = kept.grant.fence == fence;
        if has_it {
            kept.on_unreported(Event::StoreOnly);
        }
        Some(has_it)
    }

    /// Stops renewing the lease, of which a release is about to be sent. Returns whether a transaction may have pinned
    /// it.
    pub(crate) fn begin_release(&self, kept: &Kept) -> Pin {
        let pin = kept.begin_end(Event::Releasing);
        self.stop_renewing(kept);
        pin
    }

    /// The lease with this token was taken away. Returns the one who held it.
    pub(crate) fn stolen(&self, token: Token) -> Option<Arc<Kept>> {
        self.0.state.lock().remove_any_holder(token)
    }

    /// Ends the lease and renews that of the next holder in its place, on the same schedule. `None` if it may not be
    /// handed over.
    pub(crate) fn replace(&self, kept: &Kept, wants: &Wants, how: Event) -> Option<Arc<Kept>> {
        let mut state = self.0.state.lock();
        let entry = state.entries.get_mut(&kept.token).filter(|it| it.is_of(kept))?;
        let Effect::HandOver(life) = kept.on_unreported(how) else { return None };
        entry.kept = Arc::new(kept.next(life, wants));
        Some(entry.kept.clone())
    }

    /// Refuses new leases and stops all renewals. Returns the leases that were renewed until now.
    pub(crate) fn close(&self) -> Vec<Arc<Kept>> {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        state.rounds.iter_mut().for_each(|it| it.schedule.clear());
        std::mem::take(&mut state.entries).into_values().map(|it| it.kept).collect()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.state.lock().is_closed
    }

    /// Whether the lease with this token is renewed.
    pub(crate) fn kept(&self, token: Token) -> Option<Arc<Kept>> {
        self.0.kept(token)
    }

    /// The number of leases that are renewed.
    pub(crate) fn held(&self) -> usize {
        self.0.state.lock().entries.len()
    }

    /// Registers an operation in flight. [`finished`](Self::finished) waits until the result is dropped.
    pub(crate) fn unfinished(&self) -> Unfinished {
        self.0.unfinished.send_if_modified(|unfinished| {
            *unfinished += 1;
            false
        });
        Unfinished(self.0.unfinished.clone())
    }

    /// Waits until no operation is in flight.
    pub(crate) async fn finished(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.0.unfinished.subscribe().wait_for(|it| *it == 0).await;
    }
}

/// A claim, commit or release in flight.
#[derive(Debug)]
pub(crate) struct Unfinished(watch::Sender<usize>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Only the last one wakes the waiter.
        self.0.send_if_modified(|unfinished| {
            *unfinished -= 1;
            *unfinished == 0
        });
    }
}

/// The first renewal of a lease that has just been granted or renewed. A slow answer may have used up most of the
/// trust, so the pause is at most a third of the time that is left.
fn first_renewal(kept: &Kept) -> Instant {
    let now = Instant::now();
    let left = kept.until().saturating_duration_since(now);
    now + half_jitter(kept.pause()).min(left / 3)
}

impl State {
    /// Creates the round of this runtime if it is missing, and moves the leases of ended runtimes to it. Returns `true`
    /// if it moved any. Those are due now, because a renewal in flight may have ended with its runtime.
    fn visit(&mut self, runtime: &Handle) -> bool {
        if self.round_of(runtime.id()).is_none() {
            self.rounds.push(Round {
                runtime: runtime.clone(),
                schedule: BTreeSet::new(),
                planned: None,
                changed: Arc::default(),
                task: Task::NotStarted,
            });
        }
        let mut orphans = Vec::new();
        self.rounds.retain_mut(|round| {
            let has_ended = round.task == Task::Ended && round.runtime.id() != runtime.id();
            if has_ended {
                orphans.extend(std::mem::take(&mut round.schedule));
            }
            !has_ended
        });
        if orphans.is_empty() {
            return false;
        }
        let now = Instant::now();
        for (_, token) in &orphans {
            if let Some(entry) = self.entries.get_mut(token) {
                (entry.due, entry.runtime) = (now, runtime.id());
            }
        }
        let round = self.round_of(runtime.id()).expect("BUG: it was made above");
        round.schedule.extend(orphans.iter().map(|(_, token)| (now, *token)));
        true
    }

    fn round_of(&mut self, runtime: Id) -> Option<&mut Round> {
        self.rounds.iter_mut().find(|it| it.runtime.id() == runtime)
    }

    /// Moves the lease to this runtime, where a round exists. Returns when it is due, unless it was there.
    fn renew_on(&mut self, kept: &Kept, runtime: Id) -> Option<Instant> {
        let entry = self.entries.get_mut(&kept.token)?;
        if !entry.is_of(kept) || entry.runtime == runtime {
            return None;
        }
        let (due, before) = (entry.due, std::mem::replace(&mut entry.runtime, runtime));
        if let Some(round) = self.round_of(before) {
            round.schedule.remove(&(due, kept.token));
        }
        self.round_of(runtime)?.schedule.insert((due, kept.token));
        Some(due)
    }

    /// Spares a later holder.
    fn remove_if_of(&mut self, kept: &Kept) {
        if self.entries.get(&kept.token).is_some_and(|it| it.is_of(kept)) {
            self.remove_any_holder(kept.token);
        }
    }

    /// Also a later holder of the lease.
    fn remove_any_holder(&mut self, token: Token) -> Option<Arc<Kept>> {
        let Entry { kept, due, runtime } = self.entries.remove(&token)?;
        if let Some(round) = self.round_of(runtime) {
            round.schedule.remove(&(due, token));
        }
        Some(kept)
    }
}

impl Round {
    /// What to do so that the task checks its schedule at `due`.
    fn waking(&mut self, due: Instant) -> Waking {
        match self.task {
            Task::Running if self.planned.is_some_and(|it| it <= due) => Waking::None,
            Task::Running => Waking::Notify(self.changed.clone()),
            Task::NotStarted | Task::Ended => {
                self.task = Task::Running;
                Waking::Start(self.runtime.clone(), self.changed.clone())
            }
        }
    }
}

/// How to wake the task of a round after the state is unlocked. A task that is spawned on an ended runtime is dropped
/// at once, and its drop locks the state.
enum Waking {
    None,
    Notify(Arc<Notify>),
    Start(Handle, Arc<Notify>),
}

impl Waking {
    fn wake<S: LeaseStore>(self, shared: &Arc<Shared<S>>) {
        match self {
            Self::None => {}
            Self::Notify(changed) => changed.notify_one(),
            Self::Start(runtime, changed) => {
                let leaving = Guard::new(Leaving { shared: Arc::downgrade(shared), runtime: runtime.id() });
                drop(runtime.spawn(run(leaving, changed)));
            }
        }
    }
}

impl<S> Shared<S> {
    /// The lease that is renewed with this token.
    fn kept(&self, token: Token) -> Option<Arc<Kept>> {
        self.state.lock().entries.get(&token).map(|it| it.kept.clone())
    }
}

impl<S: LeaseStore> Shared<S> {
    /// Those of these leases that are still kept, whose renewals are sent now.
    fn asking(&self, batch: &[Arc<Kept>]) -> Vec<(Arc<Kept>, Call)> {
        // Locked meanwhile: a release that begins has to know.
        let state = self.state.lock();
        let still = batch.iter().filter_map(|it| state.entries.get(&it.token));
        still.map(|it| (it.kept.clone(), it.kept.asks())).collect()
    }

    fn reschedule(self: &Arc<Self>, token: Token, due: Instant) {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(&token) else { return };
        let (old, runtime) = (std::mem::replace(&mut entry.due, due), entry.runtime);
        let Some(round) = state.round_of(runtime) else { return };
        round.schedule.remove(&(old, token));
        round.schedule.insert((due, token));
        let waking = round.waking(due);
        drop(state);
        waking.wake(self);
    }

    /// The due leases of this runtime, together with those that are due soon, and the time of the next check.
    fn take_due(&self, runtime: Id, now: Instant) -> Due {
        let mut state = self.state.lock();
        let State { entries, rounds, .. } = &mut *state;
        let Some(round) = rounds.iter_mut().find(|it| it.runtime.id() == runtime) else {
            return Due::default();
        };
        let (mut due, mut lost) = (Vec::new(), Vec::new());
        if let Some((first, token)) = round.schedule.first().copied()
            && first <= now
        {
            // One random factor for all of them, so that leases that are renewed together stay together.
            let spread = 0.75 + fastrand::f64() / 4.0;
            let soon = now + entries.get(&token).map_or(Duration::ZERO, |it| it.kept.pause() / 2);
            let candidates: Vec<_> = round.schedule.range(..=(soon, Token::LAST)).copied().collect();
            for (at, token) in candidates {
                let Some(entry) = entries.get_mut(&token) else { continue };
                let (kept, pause) = (entry.kept.clone(), entry.kept.pause());
                if at > now + pause / 2 {
                    continue;
                }
                round.schedule.remove(&(at, token));
                if kept.is_lost() {
                    entries.remove(&token);
                    lost.push(kept);
                    continue;
                }
                // If this renewal gets no answer, another one is sent at this time. If the trust ends before, the loss
                // is reported then.
                entry.due = (now + pause.mul_f64(spread)).min(kept.until());
                round.schedule.insert((entry.due, token));
                due.push(kept);
            }
        }
        round.planned = round.schedule.first().map(|(due, _)| *due);
        Due { renewals: due, lost, next: round.planned }
    }

    /// Whether a sweep is due, and when the next one is.
    fn take_sweep(&self, now: Instant) -> (bool, Option<Instant>) {
        let Some(sweep) = self.sweep else { return (false, None) };
        let mut state = self.state.lock();
        let (due, next) = match state.next_sweep {
            Some(next) if next > now => (false, next),
            before => (before.is_some(), now + half_jitter(sweep.every)),
        };
        state.next_sweep = Some(next);
        (due && !state.is_closed, Some(next))
    }

    /// This runtime has ended. Its leases move to another runtime, or to the next one that is registered.
    fn leave(self: &Arc<Self>, runtime: Id) {
        let mut state = self.state.lock();
        let Some(round) = state.round_of(runtime) else { return };
        round.task = Task::Ended;
        let living = state.rounds.iter().filter(|it| it.task != Task::Ended);
        let Some(living) = living.max_by_key(|it| it.task == Task::Running).map(|it| it.runtime.clone()) else {
            return;
        };
        state.visit(&living);
        let Some(round) = state.round_of(living.id()) else { return };
        let waking = round.waking(Instant::now());
        drop(state);
        waking.wake(self);
    }
}

impl<S> Drop for Shared<S> {
    fn drop(&mut self) {
        self.state.lock().rounds.iter().for_each(|it| it.changed.notify_one());
    }
}

impl<S: LeaseStore> fmt::Debug for Keeper<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("leases", &self.held()).finish_non_exhaustive()
    }
}

/// Owned by the task of a round, so it is dropped when the task's runtime ends.
struct Leaving<S: LeaseStore> {
    shared: Weak<Shared<S>>,
    runtime: Id,
}

impl<S: LeaseStore> Hold for Leaving<S> {
    /// The runtime has ended, or nothing uses these `Leases` any more.
    fn abandon(self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.leave(self.runtime);
        }
    }
}

async fn run<S: LeaseStore>(leaving: Guard<Leaving<S>>, changed: Arc<Notify>) {
    while let Some(shared) = leaving.shared.upgrade() {
        let now = Instant::now();
        let Due { renewals, lost, next: next_renewal } = shared.take_due(leaving.runtime, now);
        renew_all(&shared, &renewals);
        for kept in lost {
            // Reports it, which runs code of the application: the state must not be locked here.
            kept.lost();
        }
        let (sweeps, next_sweep) = shared.take_sweep(now);
        if sweeps && let Some(sweep) = shared.sweep {
            tokio::spawn(sweep_all(shared.clone(), sweep.retention));
        }
        drop(shared);
        let next = [next_renewal, next_sweep].into_iter().flatten().min();
        tokio::select! {
            biased;
            () = changed.notified() => {}
            () = async { sleep_until(next.unwrap_or(now)).await }, if next.is_some() => {}
        }
    }
}

/// Starts the renewals of these leases, the most urgent first.
fn renew_all<S: LeaseStore>(shared: &Arc<Shared<S>>, due: &[Arc<Kept>]) {
    let batches: Arc<[Vec<_>]> = due.chunks(BATCH).map(<[_]>::to_vec).collect();
    for first in 0..CONCURRENT.min(batches.len()) {
        let (shared, batches) = (shared.clone(), batches.clone());
        tokio::spawn(async move {
            for batch in batches.iter().skip(first).step_by(CONCURRENT) {
                renew(&shared, batch).await;
            }
        });
    }
}

/// Time limit of a renewal: the pause until the next one, but enough for another connection where the pool has none.
fn renewal_limit(kept: &Kept) -> Duration {
    kept.pause().max(LEAST.min(kept.ttl() / 3))
}

/// Renews a batch of leases with one statement. After an error the outcome is unknown, and each lease stays trusted
/// until its current trust ends.
async fn renew<S: LeaseStore>(shared: &Arc<Shared<S>>, batch: &[Arc<Kept>]) {
    let sent = Instant::now();
    let asked = shared.asking(batch);
    let Some(limit) = asked.iter().map(|(it, _)| renewal_limit(it)).min() else { return };
    let renewals: Vec<_> = asked.iter().map(|(it, _)| it.renewal()).collect();
    match shared.store.renew(&renewals, limit).await {
        Ok(answers) => {
            observe::renewed(renewals.len(), sent.elapsed());
            if shared.outage.swap(false, Ordering::Relaxed) {
                observe::outage_over();
            }
            for ((renewal, (asked, call)), answer) in renewals.iter().zip(asked).zip(answers) {
                match answer {
                    Answer::Done => asked.had_the_row(call),
                    Answer::Busy | Answer::Gone => asked.answered(call),
                }
                // The lease may have been handed over meanwhile, or is being released.
                let Some(kept) = shared.kept(renewal.token) else { continue };
                match answer {
                    Answer::Busy => ask_again_soon(shared, &kept),
                    Answer::Done => {
                        // It was lost, or handed over since.
                        if kept.on(Event::Renewed { sent, ttl: renewal.ttl }) == Effect::Refuse {
                            shared.state.lock().remove_if_of(&kept);
                        }
                    }
                    Answer::Gone => {
                        let forgotten = shared.state.lock().remove_any_holder(renewal.token);
                        forgotten.inspect(|it| _ = it.on(Event::Gone));
                    }
                }
            }
        }
        Err(err) => {
            observe::renewal_failed(sent.elapsed());
            for kept in asked.iter().filter_map(|(it, _)| shared.kept(it.token)) {
                kept.on(Event::Silent);
                ask_again_soon(shared, &kept);
            }
            if !shared.outage.swap(true, Ordering::Relaxed) {
                observe::outage(renewals.len(), &err);
            }
        }
    }
}

fn ask_again_soon<S: LeaseStore>(shared: &Arc<Shared<S>>, kept: &Kept) {
    let pause = (renewal_limit(kept) / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    shared.reschedule(kept.token, (Instant::now() + pause).min(kept.until()));
}

/// Deletes old keys, unless another process is sweeping.
async fn sweep_all<S: LeaseStore>(shared: Arc<Shared<S>>, retention: Duration) {
    let Shared { store, holder, .. } = &*shared;
    let ttl = store.profile().longest_ttl.map_or(SWEEPER_TTL, |it| it.min(SWEEPER_TTL));
    let claim = Claim::new(SWEEPER, Token::random(), holder.clone(), ttl);
    let swept = async {
        let Some(Acquired::Granted(_)) = store.acquire(&claim).await? else {
            return Ok(());
        };
        loop {
            let swept = store.sweep(retention, SWEEP_BATCH).await?;
            observe::swept(swept);
            if swept < u64::from(SWEEP_BATCH) {
                break;
            }
            let renewal = Renewal { key: claim.key.clone(), token: claim.token, ttl: claim.ttl };
            if store.renew(&[renewal], LIMIT).await? != [Answer::Done] {
                return Ok(());
            }
        }
        let Claim { key, token, .. } = claim;
        store.release(&Release { key, token, min_hold: Duration::ZERO }, LIMIT).await.map(drop)
    };
    if let Err(err) = swept.await as Result<()> {
        observe::tolerated("sweeping leases", &err);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::{
        Leases, LossReason,
        lease::store::pass_on,
        testing::{Failure, MemoryStore, Operation},
    };

    const TTL: Duration = Duration::from_secs(10);
    const HOUR: Duration = Duration::from_secs(3600);

    fn leases(store: &MemoryStore) -> Leases<MemoryStore> {
        Leases::builder(store.client()).ttl(TTL).build().unwrap()
    }

    /// How many statements have renewed leases.
    fn renewals(leases: &Leases<MemoryStore>) -> u64 {
        leases.store().faults().calls(Operation::Renew)
    }

    /// A store in which a transaction has every row locked, so that a renewal learns nothing, after a while.
    #[derive(Clone, Default)]
    struct Locked {
        store: MemoryStore,
    }

    impl Locked {
        const ANSWERS_IN: Duration = Duration::from_millis(100);
    }

    impl LeaseStore for Locked {
        pass_on!(lease_acquire, lease_look, lease_release, lease_list, lease_sweep);

        async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
            sleep(Self::ANSWERS_IN).await;
            Ok(vec![Answer::Busy; renewals.len()])
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_closes_the_call_of_the_holder_and_of_the_one_before() {
        let leases = Leases::builder(Locked::default()).ttl(Duration::from_secs(3)).build().unwrap();
        let first = leases.lease("k").acquire().await.unwrap();
        while !first.kept().is_open() {
            sleep(Locked::ANSWERS_IN / 10).await;
        }
        let next = tokio::spawn(leases.lease("k").acquire());
        sleep(Locked::ANSWERS_IN / 10).await;
        let before = leases.0.keeper.kept(first.kept().token).unwrap();
        first.release().await.unwrap();
        let next = next.await.unwrap().unwrap();
        assert_eq!(next.kept().token, before.token);
        let are_open = || [&*before, next.kept()].map(Kept::is_open);
        assert_eq!(are_open(), [true; 2]);
        sleep(Locked::ANSWERS_IN).await;
        assert_eq!(are_open(), [false; 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_renewed_after_a_quarter_to_a_third_of_its_ttl() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").acquire().await.unwrap();
        sleep(100 * TTL).await;
        assert!((300..=401).contains(&renewals(&leases)), "{}", renewals(&leases));
        assert!(lease.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_due_soon_is_renewed_with_others() {
        let leases = leases(&MemoryStore::new());
        let _others = leases.lease("k").acquire().await.unwrap();
        // A pause of 15 to 20 s, less half of the others' pause at most.
        let _long = leases.lease("long").ttl(6 * TTL).acquire().await.unwrap();
        sleep(60 * TTL).await;
        let renewed = leases.show("long").await.unwrap().unwrap().renewals;
        assert!((30..=45).contains(&renewed), "{renewed}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_with_a_short_ttl_is_renewed_beside_one_with_a_long_ttl() {
        let leases = leases(&MemoryStore::new());
        let _long = leases.lease("long").ttl(HOUR).acquire().await.unwrap();
        tokio::task::yield_now().await;
        let short = leases.lease("short").acquire().await.unwrap();
        sleep(10 * TTL).await;
        assert!(short.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn an_extended_lease_is_renewed_at_the_pace_of_its_new_ttl() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").acquire().await.unwrap();
        lease.extend(10 * TTL).await.unwrap();
        let extended = renewals(&leases);
        sleep(10 * TTL / 7).await;
        assert_eq!(renewals(&leases), extended, "half of the pause is a sixth of the ttl");
        sleep(100 * TTL).await;
        assert!(lease.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_grant_is_renewed_in_the_first_third_of_what_is_left() {
        for _ in 0..5 {
            let leases = leases(&MemoryStore::new());
            leases.store().faults().script(Operation::Acquire, [Failure::Slow(TTL * 48 / 100)]);
            let lease = leases.lease("k").acquire().await.unwrap();
            let left = lease.trusted_until().duration_since(Instant::now().into_std());
            sleep(left / 3 + TTL / 1000).await;
            assert_eq!(renewals(&leases), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_renewal_is_repeated_after_a_quarter_of_the_pause() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").ttl(TTL / 5).acquire().await.unwrap();
        leases.store().faults().partition();
        assert_eq!(lease.lost().await, LossReason::Unreachable);
        assert!((7..=12).contains(&renewals(&leases)), "{}", renewals(&leases));
    }

    #[tokio::test(start_paused = true)]
    async fn renewals_that_take_longer_than_the_pause_between_them_count() {
        let pause = Duration::from_millis(50);
        let leases = Leases::builder(MemoryStore::new()).ttl(TTL).renew_every(pause).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        leases.store().faults().slow(8 * pause);
        sleep(3 * TTL).await;
        assert!(lease.is_trusted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_released_or_dropped_is_not_renewed_any_more() {
        let leases = leases(&MemoryStore::new());
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(leases.health().held, 0);
        let dropped = leases.lease("k").acquire().await.unwrap();
        assert_eq!(leases.health().held, 1);
        // Its release has not been sent.
        drop(dropped);
        assert_eq!(leases.health().held, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn old_keys_are_swept_in_batches_until_the_leases_are_closed() {
        let store = MemoryStore::new();
        let used = async |key: String| {
            let claim = Claim::new(key, Token::random(), "holder", TTL);
            store.lease_acquire(&claim).await.unwrap();
            store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap();
        };
        for number in 0..=2 * SWEEP_BATCH {
            used(format!("k{number}")).await;
        }
        sleep(2 * 24 * HOUR).await;
        used("young".to_owned()).await;
        sleep(6 * 24 * HOUR).await;
        let leases = Leases::builder(store.client()).ttl(24 * HOUR).sweep_every(HOUR).build().unwrap();
        let sweeps = || leases.store().faults().calls(Operation::Sweep);
        let _lease = leases.lease("k").acquire().await.unwrap();
        sleep(HOUR).await;
        assert_eq!(sweeps(), 3);
        assert_eq!(store.lease_sweep(24 * HOUR, 10).await.unwrap(), 1, "only what was used within the week is left");
        // The lease of the sweep is free again.
        sleep(2 * HOUR).await;
        assert!(sweeps() > 3);
        leases.close().await.unwrap();
        let closed = sweeps();
        sleep(10 * HOUR).await;
        assert_eq!(sweeps(), closed);
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_ends_with_the_leases() {
        let leases = leases(&MemoryStore::new());
        let lease = leases.lease("k").acquire().await.unwrap();
        lease.release().await.unwrap();
        drop(leases);
        // Far less than until the next sweep.
        sleep(TTL).await;
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
    }

    #[test]
    fn a_runtime_that_verifies_a_lease_renews_it_when_that_of_its_grant_has_ended() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let (first, second) = (runtime(), runtime());
        let leases = leases(&MemoryStore::new());
        let lease = first.block_on(leases.lease("k").acquire()).unwrap();
        second.block_on(lease.verify_by(async { Ok(true) })).unwrap();
        drop(first);
        second.block_on(async {
            sleep(3 * TTL).await;
            assert!(lease.is_trusted());
        });
    }
}
