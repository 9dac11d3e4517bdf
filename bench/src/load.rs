//! The load of one process: tasks that repeat an operation until the time is over, and a record of each.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;

use crate::clock;
use crate::job::{Job, Seen};

/// One operation of a contender.
pub(crate) trait Work: Send + Sync + 'static {
    /// Does it once. `None`: it gave up.
    fn once(&self, key: u32) -> impl Future<Output = Result<Option<Step>>> + Send;

    /// Looks at the end for what went wrong.
    fn violations(&self) -> impl Future<Output = Vec<String>> + Send {
        async { Vec::new() }
    }
}

/// What one operation did. Times are those of [`clock::now`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) granted: u64,
    pub(crate) let_go: u64,
    pub(crate) fence: Option<u64>,
    pub(crate) attempts: u32,
}

impl Step {
    /// A section that was entered with the first attempt, and ends now.
    pub(crate) fn since(granted: u64) -> Self {
        Self { granted, let_go: clock::now(), fence: None, attempts: 1 }
    }

    pub(crate) fn fence(mut self, fence: u64) -> Self {
        self.fence = Some(fence);
        self
    }

    pub(crate) fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }
}

/// Lets all tasks do the operation once, so that connections are open and statements prepared, and sums up what they
/// did.
pub(crate) async fn warm_up<W: Work>(job: &Job, work: &Arc<W>) -> Result<Seen> {
    repeat(job, work, Duration::ZERO).await
}

/// Works for as long as the job says.
pub(crate) async fn run<W: Work>(job: &Job, work: &Arc<W>) -> Result<Seen> {
    let cpu = clock::cpu();
    let mut seen = repeat(job, work, Duration::from_millis(job.warm_ms + job.run_ms)).await?;
    seen.cpu_us = (clock::cpu() - cpu) / 1_000;
    seen.violations = work.violations().await;
    Ok(seen)
}

async fn repeat<W: Work>(job: &Job, work: &Arc<W>, time: Duration) -> Result<Seen> {
    let began = clock::now();
    let end = began + u64::try_from(time.as_nanos())?;
    let mut tasks = JoinSet::new();
    for task in 0..job.tasks {
        let work = Arc::clone(work);
        let (keys, own) = (job.keys, job.process * job.tasks + task);
        tasks.spawn(async move {
            let mut rng = fastrand::Rng::new();
            let mut seen = Seen { began, ..Seen::default() };
            loop {
                let key = if keys == 0 { own } else { rng.u32(..keys) };
                let asked = clock::now();
                match work.once(key).await? {
                    Some(step) => seen.add(key, asked, step, clock::now()),
                    None => seen.refused += 1,
                }
                if clock::now() >= end {
                    return anyhow::Ok(seen);
                }
            }
        });
    }
    let mut all = Seen { began, ..Seen::default() };
    while let Some(seen) = tasks.join_next().await {
        all.append(seen??);
    }
    Ok(all)
}

impl Seen {
    fn add(&mut self, key: u32, asked: u64, step: Step, done: u64) {
        let Step { granted, let_go, fence, attempts } = step;
        let operations = &mut self.operations;
        operations.key.push(key);
        operations.asked.push(asked - self.began);
        operations.granted.push(granted - self.began);
        operations.let_go.push(let_go - self.began);
        operations.done.push(done - self.began);
        operations.fence.extend(fence);
        self.attempts += u64::from(attempts);
    }

    /// Adds what another task of the same process saw.
    fn append(&mut self, other: Self) {
        let Self { began: _, cpu_us: _, operations, attempts, refused, violations } = other;
        self.operations.key.extend(operations.key);
        self.operations.asked.extend(operations.asked);
        self.operations.granted.extend(operations.granted);
        self.operations.let_go.extend(operations.let_go);
        self.operations.done.extend(operations.done);
        self.operations.fence.extend(operations.fence);
        self.attempts += attempts;
        self.refused += refused;
        self.violations.extend(violations);
    }
}
