//! Keeps the leases of a process alive: one task per [`Leases`](crate::Leases) renews those that are due, many in one
//! statement, and sweeps.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use crate::{
    error::{LossReason, Result},
    key::Key,
    observe::{self, Strategy},
    policy::{OnLost, half_jitter},
    store::{Acquired, Claim, Grant, LeaseStore, Renewal, Scoped, Token},
    trust::Trust,
};

/// The most leases that one statement renews.
const RENEWAL_BATCH: usize = 500;

/// The most rows that one sweep statement deletes.
const SWEEP_BATCH: u32 = 500;

/// Who holds this lease sweeps: one process at a time.
const SWEEPER: &str = "lockkit/sweeper";

/// How long the others wait for a sweeper that died.
const SWEEPER_TTL: Duration = Duration::from_mins(1);

/// One lease of this process: what the store granted, and what the process believes.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) grant: Grant,
    pub(crate) trust: Trust,
    granted: Instant,
    pub(crate) terms: Terms,
    ttl: Mutex<Duration>,
    pinned: AtomicBool,
}

/// How a lease is to be kept and given back.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) renew_every: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) on_lost: OnLost,
    /// The waiting line of those who want what this lease is a part of.
    pub(crate) line: Key,
}

impl Kept {
    /// `sent` is when the claim was sent.
    pub(crate) fn new(claim: Claim, grant: Grant, sent: Instant, terms: Terms) -> Self {
        let Claim { key, token, ttl, .. } = claim;
        Self {
            key,
            token,
            grant,
            trust: Trust::new(sent, ttl),
            granted: Instant::now(),
            terms,
            ttl: Mutex::new(ttl),
            pinned: AtomicBool::new(false),
        }
    }

    pub(crate) fn ttl(&self) -> Duration {
        *lock(&self.ttl)
    }

    /// What every renewal from now on asks for.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        *lock(&self.ttl) = ttl;
    }

    /// A transaction of this process has kept everybody else from taking the lease.
    pub(crate) fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// The lease was given back in good order.
    pub(crate) fn released(&self) {
        self.trust.lose(LossReason::Released);
        observe::released(Strategy::Lease, &self.key, self.grant.fence, self.granted.elapsed());
    }

    fn tell_of_loss(&self) {
        if let Some(reason) = self.trust.lost().filter(|it| *it != LossReason::Released) {
            observe::lost(&self.key, self.grant.fence, self.granted.elapsed(), reason);
        }
    }

    fn renewal(&self) -> Renewal {
        Renewal { key: self.key.clone(), token: self.token, ttl: self.ttl() }
    }

    /// How long a renewal lasts: a third of the ttl, which leaves time for two more tries.
    fn pause(&self) -> Duration {
        let third = self.ttl() / 3;
        self.terms.renew_every.map_or(third, |it| it.min(third))
    }
}

/// How often to forget old keys, and how old they must be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sweep {
    pub(crate) every: Duration,
    pub(crate) retention: Duration,
}

/// The handle to the task; it ends when the last handle is gone.
pub(crate) struct Keeper<S: LeaseStore>(Arc<Shared<S>>);

struct Shared<S> {
    store: S,
    holder: Arc<str>,
    sweep: Option<Sweep>,
    entries: Mutex<HashMap<Token, Entry>>,
    changed: Arc<Notify>,
    task: Mutex<Option<JoinHandle<()>>>,
    outage: AtomicBool,
}

struct Entry {
    kept: Arc<Kept>,
    due: Instant,
}

impl<S: LeaseStore> Keeper<S> {
    pub(crate) fn new(store: S, holder: Arc<str>, sweep: Option<Sweep>) -> Self {
        Self(Arc::new(Shared {
            store,
            holder,
            sweep,
            entries: Mutex::default(),
            changed: Arc::default(),
            task: Mutex::default(),
            outage: AtomicBool::new(false),
        }))
    }

    pub(crate) fn store(&self) -> &S {
        &self.0.store
    }

    /// Who holds the leases, for people to read.
    pub(crate) fn holder(&self) -> &Arc<str> {
        &self.0.holder
    }

    /// Renews the lease from now on. Needs a Tokio runtime.
    pub(crate) fn keep(&self, kept: &Arc<Kept>) {
        let entry = Entry { kept: kept.clone(), due: Instant::now() + half_jitter(kept.pause()) };
        lock(&self.0.entries).insert(kept.token, entry);
        let mut task = lock(&self.0.task);
        // The task is gone where the runtime that it ran on is.
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            let changed = self.0.changed.clone();
            *task = Some(tokio::spawn(run(Arc::downgrade(&self.0), changed)));
        } else {
            drop(task);
            self.0.changed.notify_one();
        }
    }

    /// The lease was renewed just now by somebody else than the task.
    pub(crate) fn renewed(&self, kept: &Kept) {
        if let Some(entry) = lock(&self.0.entries).get_mut(&kept.token) {
            entry.due = Instant::now() + half_jitter(kept.pause());
        }
        self.0.changed.notify_one();
    }

    /// Renews the lease no more.
    pub(crate) fn forget(&self, token: Token) {
        lock(&self.0.entries).remove(&token);
    }
}

impl<S> Drop for Shared<S> {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

impl<S: LeaseStore> fmt::Debug for Keeper<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("leases", &lock(&self.0.entries).len()).finish_non_exhaustive()
    }
}

async fn run<S: LeaseStore>(shared: Weak<Shared<S>>, changed: Arc<Notify>) {
    let sweep = shared.upgrade().and_then(|it| it.sweep);
    let mut next_sweep = sweep.map(|it| Instant::now() + half_jitter(it.every));
    while let Some(strong) = shared.upgrade() {
        let now = Instant::now();
        let next_renewal = renew_due(&strong, now);
        if let (Some(due), Some(sweep)) = (&mut next_sweep, sweep)
            && *due <= now
        {
            *due = now + half_jitter(sweep.every);
            tokio::spawn(sweep_all(strong.clone(), sweep.retention));
        }
        drop(strong);
        let next = [next_renewal, next_sweep].into_iter().flatten().min();
        tokio::select! {
            () = changed.notified() => {}
            () = async { sleep_until(next.unwrap_or(now)).await }, if next.is_some() => {}
        }
    }
}

/// Starts the renewals that are due, and with them those that would be soon; returns when the next one is.
fn renew_due<S: LeaseStore>(shared: &Arc<Shared<S>>, now: Instant) -> Option<Instant> {
    let mut entries = lock(&shared.entries);
    entries.retain(|_, it| {
        let lost = it.kept.trust.lost().is_some();
        if lost {
            it.kept.tell_of_loss();
        }
        !lost
    });
    if entries.values().any(|it| it.due <= now) {
        // One draw for all of them, so that leases renewed together stay together.
        let spread = 0.75 + fastrand::f64() / 4.0;
        let mut due = Vec::new();
        for entry in entries.values_mut().filter(|it| it.due <= now + it.kept.pause() / 2) {
            // Should this renewal never be answered, another is sent beside it.
            entry.due = now + entry.kept.pause().mul_f64(spread);
            due.push(entry.kept.clone());
        }
        tokio::spawn(renew_all(shared.clone(), due));
    }
    entries.values().map(|it| it.due).min()
}

async fn renew_all<S: LeaseStore>(shared: Arc<Shared<S>>, due: Vec<Arc<Kept>>) {
    for batch in due.chunks(RENEWAL_BATCH) {
        renew(&shared, batch).await;
    }
    shared.changed.notify_one();
}

/// Renews some leases with one statement. An error means unknown, and the trust that is left goes on.
async fn renew<S: LeaseStore>(shared: &Shared<S>, batch: &[Arc<Kept>]) {
    let sent = Instant::now();
    let renewals: Vec<_> = batch.iter().map(|it| it.renewal()).collect();
    let answers = shared.store.lease_renew(&renewals).await;
    let mut entries = lock(&shared.entries);
    match answers {
        Ok(answers) => {
            observe::renewed(batch.len(), sent.elapsed());
            if shared.outage.swap(false, Ordering::Relaxed) {
                observe::outage_over();
            }
            for ((kept, renewal), answer) in batch.iter().zip(renewals).zip(answers) {
                match answer {
                    Scoped::Done if kept.trust.renewed(sent, renewal.ttl) => {}
                    Scoped::Busy => ask_again_soon(&mut entries, kept),
                    // Not there any more when this process is giving it back.
                    Scoped::Done | Scoped::Gone => {
                        if entries.remove(&kept.token).is_some() {
                            kept.trust.lose(LossReason::Stolen);
                            kept.tell_of_loss();
                        }
                    }
                }
            }
        }
        Err(err) => {
            for kept in batch {
                kept.trust.unreachable();
                ask_again_soon(&mut entries, kept);
            }
            if !shared.outage.swap(true, Ordering::Relaxed) {
                observe::outage(batch.len(), &err);
            }
        }
    }
}

fn ask_again_soon(entries: &mut HashMap<Token, Entry>, kept: &Kept) {
    if let Some(entry) = entries.get_mut(&kept.token) {
        entry.due = Instant::now() + (kept.pause() / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    }
}

/// A lease that cannot be given back is freed by its ttl; nobody waits for the error.
pub(crate) fn release_failed<T>(released: Result<T>) {
    if let Err(err) = released {
        observe::tolerated("releasing a lease, which its ttl will free", &err);
    }
}

/// Forgets old keys, unless another process is at it.
async fn sweep_all<S: LeaseStore>(shared: Arc<Shared<S>>, retention: Duration) {
    let Shared { store, holder, .. } = &*shared;
    let claim = Claim { key: SWEEPER.into(), token: Token::random(), holder: holder.clone(), ttl: SWEEPER_TTL };
    let swept = async {
        if let Acquired::Held { .. } = store.lease_acquire(&claim).await? {
            return Ok(());
        }
        loop {
            let swept = store.lease_sweep(retention, SWEEP_BATCH).await?;
            observe::swept(swept);
            if swept < u64::from(SWEEP_BATCH) {
                break;
            }
            let renewal = Renewal { key: claim.key.clone(), token: claim.token, ttl: claim.ttl };
            if store.lease_renew(&[renewal]).await? != [Scoped::Done] {
                return Ok(());
            }
        }
        store.lease_release(&claim.key, claim.token, Duration::ZERO).await.map(drop)
    };
    if let Err(err) = swept.await as Result<()> {
        observe::tolerated("sweeping leases", &err);
    }
}

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
