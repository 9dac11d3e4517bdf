//! Keeps the leases of a process alive: one task per [`Leases`](crate::Leases) renews those that are due and sweeps.

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
    fence::Fence,
    key::Key,
    policy::half_jitter,
    store::{LeaseStore, Scoped, Token},
    trust::Trust,
};

/// The most rows that one sweep statement deletes.
const SWEEP_BATCH: u32 = 500;

/// One lease of this process: what the store granted, and what the process believes.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) fence: Fence,
    pub(crate) trust: Trust,
    ttl: Mutex<Duration>,
    renew_every: Option<Duration>,
}

impl Kept {
    pub(crate) fn new(
        key: Key,
        token: Token,
        fence: Fence,
        trust: Trust,
        ttl: Duration,
        renew_every: Option<Duration>,
    ) -> Self {
        Self { key, token, fence, trust, ttl: Mutex::new(ttl), renew_every }
    }

    pub(crate) fn ttl(&self) -> Duration {
        *lock(&self.ttl)
    }

    /// What every renewal from now on asks for.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        *lock(&self.ttl) = ttl;
    }

    /// When to renew next: after a third of the ttl, up to half of that sooner so that leases spread out.
    fn pause(&self) -> Duration {
        let third = self.ttl() / 3;
        half_jitter(self.renew_every.map_or(third, |it| it.min(third)))
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
    pub(crate) fn new(store: S, sweep: Option<Sweep>) -> Self {
        Self(Arc::new(Shared {
            store,
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

    /// Renews the lease from now on. Needs a Tokio runtime.
    pub(crate) fn keep(&self, kept: &Arc<Kept>) {
        let entry = Entry { kept: kept.clone(), due: Instant::now() + kept.pause() };
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
            entry.due = Instant::now() + kept.pause();
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
            tokio::spawn(sweep_all(strong.store.clone(), sweep.retention));
        }
        drop(strong);
        let next = [next_renewal, next_sweep].into_iter().flatten().min();
        tokio::select! {
            () = changed.notified() => {}
            () = async { sleep_until(next.unwrap_or(now)).await }, if next.is_some() => {}
        }
    }
}

/// Starts the renewals that are due; returns when the next one is.
fn renew_due<S: LeaseStore>(shared: &Arc<Shared<S>>, now: Instant) -> Option<Instant> {
    let mut entries = lock(&shared.entries);
    entries.retain(|_, it| it.kept.trust.lost().is_none());
    for entry in entries.values_mut().filter(|it| it.due <= now) {
        // Should this renewal never be answered, another is sent beside it.
        entry.due = now + entry.kept.pause();
        tokio::spawn(renew(shared.clone(), entry.kept.clone()));
    }
    entries.values().map(|it| it.due).min()
}

/// Renews one lease. Zero rows mean lost; an error means unknown, and the trust that is left goes on.
async fn renew<S: LeaseStore>(shared: Arc<Shared<S>>, kept: Arc<Kept>) {
    let (sent, ttl) = (Instant::now(), kept.ttl());
    let answer = shared.store.lease_renew(&kept.key, kept.token, ttl).await;
    let soon = (kept.pause() / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    let pause = match answer {
        Ok(Scoped::Done) => {
            if shared.outage.swap(false, Ordering::Relaxed) {
                tracing::info!("renewing leases again");
            }
            kept.trust.renewed(sent, ttl).then(|| kept.pause())
        }
        Ok(Scoped::Gone) => None,
        Ok(Scoped::Busy) => Some(soon),
        Err(err) => {
            kept.trust.unreachable();
            if !shared.outage.swap(true, Ordering::Relaxed) {
                tracing::warn!(error = &err as &dyn std::error::Error, key = %kept.key, "cannot renew leases");
            }
            Some(soon)
        }
    };
    let mut entries = lock(&shared.entries);
    match pause {
        Some(pause) if kept.trust.lost().is_none() => {
            if let Some(entry) = entries.get_mut(&kept.token) {
                entry.due = Instant::now() + pause;
            }
        }
        // Not there any more when this process is giving it back.
        _ => {
            if entries.remove(&kept.token).is_some() {
                kept.trust.lose(LossReason::Stolen);
                tracing::warn!(key = %kept.key, fence = %kept.fence, reason = ?kept.trust.lost(), "lease lost");
            }
        }
    }
    drop(entries);
    shared.changed.notify_one();
}

/// A lease that cannot be given back is freed by its ttl; nobody waits for the error.
pub(crate) fn release_failed<T>(released: Result<T>) {
    if let Err(err) = released {
        tracing::debug!(error = &err as &dyn std::error::Error, "cannot release a lease; its ttl will");
    }
}

async fn sweep_all<S: LeaseStore>(store: S, retention: Duration) {
    loop {
        match store.lease_sweep(retention, SWEEP_BATCH).await {
            Ok(swept) if swept < u64::from(SWEEP_BATCH) => return,
            Ok(_) => {}
            Err(err) => {
                tracing::debug!(error = &err as &dyn std::error::Error, "cannot sweep leases");
                return;
            }
        }
    }
}

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
