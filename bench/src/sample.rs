//! One sample: the load once, the numbers of what was seen, and the verdict of the oracles.

use anyhow::Result;
use hdrhistogram::Histogram;

use crate::crew::{self, Heard, Program};
use crate::job::{Job, Seen};
use crate::oracle::{self, Held};
use crate::scenarios::Oracle;
use crate::servers::Kind;
use crate::stage::{After, Stage};

/// The numbers of one sample.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// All operations of the workers, whether they were measured or not.
    pub(crate) operations: u64,
    /// Operations that ended within the measured time, per second.
    pub(crate) rate: f64,
    /// How long they waited for the lock; where there is no lock, how long they took. In milliseconds.
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// Statements per operation, if the server counts them.
    pub(crate) statements: Option<f64>,
    /// CPU of the clients per operation, in microseconds.
    pub(crate) cpu_us: f64,
    /// Attempts per operation, if they were counted.
    pub(crate) attempts: Option<f64>,
    /// The smallest and the greatest share of a process in the operations.
    pub(crate) least_share: f64,
    pub(crate) greatest_share: f64,
    /// Operations that gave up.
    pub(crate) refused: u64,
    pub(crate) violations: Vec<String>,
}

/// Resets the database, lets the workers work, and judges.
pub(crate) async fn take(stage: &Stage, program: &Program, jobs: &[Job]) -> Result<Sample> {
    let tasks: u32 = jobs.iter().map(|it| it.tasks).sum();
    stage.reset(jobs[0].keys.max(tasks)).await?;
    let mut before = None;
    let heard = crew::work(program, jobs, async || {
        before = stage.counted().await?;
        Ok(())
    })
    .await?;
    let after = stage.after().await?;
    let mut sample = numbers(&jobs[0], &heard)?;
    if let (Some(before), Some(after)) = (before, after.counted) {
        let statements = after.statements.saturating_sub(before.statements);
        sample.statements = Some(float(statements) / float(operations(&heard)));
    }
    let counted = before.zip(after.counted).map(|(before, after)| after.commits.saturating_sub(before.commits));
    sample.violations.extend(judge(&jobs[0], &heard, &after, counted));
    Ok(sample)
}

/// Whatever the workers did since they were let go.
fn operations(heard: &Heard) -> u64 {
    heard.seen.iter().map(|it| it.operations.key.len() as u64).sum()
}

fn numbers(job: &Job, heard: &Heard) -> Result<Sample> {
    let mut waits = Histogram::<u64>::new_with_bounds(1, 600_000_000, 3)?;
    let from = heard.seen.iter().map(|it| it.began).max().unwrap_or_default() + job.warm_ms * 1_000_000;
    let to = from + job.run_ms * 1_000_000;
    let mut by_process = Vec::new();
    for Seen { began, operations, .. } in &heard.seen {
        let mut count = 0;
        for (number, done) in operations.done.iter().enumerate() {
            if !(from..to).contains(&(began + done)) {
                continue;
            }
            count += 1;
            let end = match job.scenario.oracle() {
                Oracle::Exclusion => operations.granted[number],
                Oracle::Commits | Oracle::Counter | Oracle::Stock | Oracle::Worker => *done,
            };
            waits.saturating_record((end - operations.asked[number]) / 1_000);
        }
        by_process.push(count);
    }
    let (in_time, all) = (by_process.iter().sum::<u64>(), operations(heard).max(1));
    let attempts: u64 = heard.seen.iter().map(|it| it.attempts).sum();
    let cpu: u64 = heard.seen.iter().map(|it| it.cpu_us).sum();
    let share = |count: Option<&u64>| float(count.copied().unwrap_or_default()) / float(in_time.max(1));
    Ok(Sample {
        operations: all + heard.warm,
        rate: float(in_time) * 1_000.0 / float(job.run_ms),
        p50_ms: float(waits.value_at_quantile(0.5)) / 1_000.0,
        p99_ms: float(waits.value_at_quantile(0.99)) / 1_000.0,
        max_ms: float(waits.max()) / 1_000.0,
        statements: None,
        cpu_us: float(cpu) / float(all),
        attempts: (attempts > 0).then(|| float(attempts) / float(all)),
        least_share: share(by_process.iter().min()),
        greatest_share: share(by_process.iter().max()),
        refused: heard.seen.iter().map(|it| it.refused).sum(),
        violations: heard.seen.iter().flat_map(|it| it.violations.clone()).collect(),
    })
}

/// What the oracle of the scenario says.
fn judge(job: &Job, heard: &Heard, after: &After, commits: Option<u64>) -> Vec<String> {
    let done = operations(heard) + heard.warm;
    match job.scenario.oracle() {
        Oracle::Exclusion => {
            let held = held(&heard.seen);
            [oracle::overlaps(&held), oracle::fences(&held)].concat()
        }
        Oracle::Counter => oracle::counter(done, after.value),
        Oracle::Stock => {
            let left = if job.contender == "floor" { after.counter_left } else { after.stock_left };
            oracle::stock(crate::floors::STOCK, done, left)
        }
        // All transactions have the lock of the whole file.
        Oracle::Commits if job.database == Kind::Sqlite => {
            let mut held = held(&heard.seen);
            for it in &mut held {
                it.key = 0;
            }
            oracle::overlaps(&held)
        }
        Oracle::Commits => oracle::commits(operations(heard), commits.unwrap_or_default()),
        Oracle::Worker => Vec::new(),
    }
}

/// Who held what, by the machine's clock.
pub(crate) fn held(seen: &[Seen]) -> Vec<Held> {
    let of_one = |(process, Seen { began, operations, .. }): (usize, &Seen)| {
        let rows = operations.key.iter().enumerate().map(|(number, key)| Held {
            key: *key,
            process,
            granted: began + operations.granted[number],
            let_go: began + operations.let_go[number],
            fence: operations.fence.get(number).copied(),
        });
        rows.collect::<Vec<_>>()
    };
    seen.iter().enumerate().flat_map(of_one).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts and microseconds have far fewer than 53 bits")]
pub(crate) fn float(count: u64) -> f64 {
    count as f64
}
