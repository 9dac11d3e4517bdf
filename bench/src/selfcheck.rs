//! `bench selfcheck`: locks and counters with planted bugs, under the same load as the real ones, and oracles that must
//! see each of them. A correct lock is measured too, and nothing must be said of it.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::job::{Job, Seen};
use crate::load::{self, Step, Work};
use crate::scenarios::Scenario;
use crate::servers::Kind;
use crate::{clock, oracle, sample};

/// What is wrong with the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// It lets two in.
    TwoHolders,
    /// It is released before the holder has let go.
    EarlyRelease,
    /// A holder has the fence of the one before, as of a lease that is handed on without a new one.
    SameFence,
    /// Fences begin again, as of a lock that forgets.
    FenceRestarts,
    /// The counter is read and written by two at a time.
    LostUpdate,
    /// The last piece is given to all who have looked.
    Oversold,
    /// A batch whose answer was lost is taken to have failed.
    GuessedAnswer,
    /// An operation is acknowledged before it is committed, and then is not.
    LostCommit,
}

impl Bug {
    /// Each bug, and what its oracle must say. `None`: nothing.
    const ALL: [(Self, Option<&'static str>); 9] = [
        (Self::None, None),
        (Self::TwoHolders, Some("overlap")),
        (Self::EarlyRelease, Some("overlap")),
        (Self::SameFence, Some("fence")),
        (Self::FenceRestarts, Some("fence")),
        (Self::LostUpdate, Some("lost update")),
        (Self::Oversold, Some("oversold")),
        (Self::GuessedAnswer, Some("stock that changed")),
        (Self::LostCommit, Some("lost commit")),
    ];
}

/// Pieces of the stock: fewer than tasks, which all look at the same time.
const STOCK: u64 = 3;

/// A lock, a counter and a stock in memory.
#[derive(Debug)]
struct Planted {
    bug: Bug,
    lock: Semaphore,
    fence: AtomicU64,
    counter: Mutex<u64>,
    left: Mutex<u64>,
    taken: AtomicU64,
    commits: AtomicU64,
}

impl Planted {
    fn new(bug: Bug) -> Self {
        let holders = if bug == Bug::TwoHolders { 2 } else { 1 };
        Self {
            bug,
            lock: Semaphore::new(holders),
            fence: AtomicU64::new(0),
            counter: Mutex::new(0),
            left: Mutex::new(STOCK),
            taken: AtomicU64::new(0),
            commits: AtomicU64::new(0),
        }
    }

    fn next_fence(&self) -> u64 {
        match self.bug {
            Bug::SameFence => 1 + self.fence.fetch_add(1, Ordering::Relaxed) / 2,
            Bug::FenceRestarts => self.fence.fetch_add(1, Ordering::Relaxed) % 20,
            _ => self.fence.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Takes a piece, in a step that cannot be divided unless there is a bug.
    async fn take(&self) {
        let left = read(&self.left);
        if left == 0 {
            return;
        }
        if self.bug == Bug::Oversold {
            sleep(Duration::from_millis(1)).await;
        }
        let mut pieces = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if self.bug != Bug::Oversold && *pieces == 0 {
            return;
        }
        *pieces = pieces.saturating_sub(1);
        let is_answered = self.bug != Bug::GuessedAnswer || !pieces.is_multiple_of(2);
        if is_answered {
            self.taken.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn read(number: &Mutex<u64>) -> u64 {
    *number.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work for Planted {
    async fn once(&self, _: u32) -> Result<Option<Step>> {
        if self.bug == Bug::LostUpdate {
            let value = read(&self.counter);
            sleep(Duration::from_millis(1)).await;
            *self.counter.lock().unwrap_or_else(PoisonError::into_inner) = value + 1;
        } else {
            *self.counter.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
        self.take().await;
        let permit = self.lock.acquire().await?;
        let granted = clock::now();
        let fence = self.next_fence();
        if self.bug != Bug::LostCommit || !fence.is_multiple_of(5) {
            self.commits.fetch_add(1, Ordering::Relaxed);
        }
        if self.bug == Bug::EarlyRelease {
            drop(permit);
            sleep(Duration::from_millis(1)).await;
            return Ok(Some(Step::since(granted).fence(fence)));
        }
        sleep(Duration::from_millis(1)).await;
        let step = Step::since(granted).fence(fence);
        drop(permit);
        Ok(Some(step))
    }
}

/// Runs the load over each bug.
pub(crate) async fn run() -> Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for (bug, expected) in Bug::ALL {
        let is_seen = |complaints: &[String]| match expected {
            None => complaints.is_empty(),
            Some(expected) => complaints.iter().any(|it| it.starts_with(expected)),
        };
        let mut complaints = complaints_of(bug).await?;
        // A busy machine may do too little work for the bug to show.
        for _ in 0..2 {
            if expected.is_some() && !is_seen(&complaints) {
                complaints = complaints_of(bug).await?;
            }
        }
        let is_seen = is_seen(&complaints);
        let first = complaints.first().map_or("nothing", String::as_str);
        let verdict = if is_seen { "as expected" } else { "NOT AS EXPECTED" };
        println!("{:15} {verdict}: {first}", format!("{bug:?}"));
        if !is_seen {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// What all oracles say of a load over this bug.
async fn complaints_of(bug: Bug) -> Result<Vec<String>> {
    let job = Job {
        scenario: Scenario::HotLease,
        contender: format!("{bug:?}"),
        database: Kind::Sqlite,
        url: String::new(),
        redis: None,
        zookeeper: None,
        process: 0,
        tasks: 8,
        keys: 1,
        hold_us: 0,
        warm_ms: 0,
        run_ms: 150,
        connections: 0,
        ping: false,
        durable: false,
        rows: 0,
    };
    let work = Arc::new(Planted::new(bug));
    let seen: Seen = load::run(&job, &work).await?;
    let (done, taken) = (seen.operations.key.len() as u64, work.taken.load(Ordering::Relaxed));
    let held = sample::held(&[seen]);
    Ok([
        oracle::overlaps(&held),
        oracle::fences(&held),
        oracle::counter(done, read(&work.counter)),
        oracle::stock(STOCK, taken, read(&work.left)),
        oracle::commits(done, work.commits.load(Ordering::Relaxed)),
    ]
    .concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_planted_bug_is_seen_and_a_correct_lock_is_not_complained_of() {
        for (bug, expected) in Bug::ALL {
            let complaints = complaints_of(bug).await.expect("a load in memory");
            match expected {
                None => assert_eq!(complaints, [""; 0]),
                Some(expected) => {
                    assert!(complaints.iter().any(|it| it.starts_with(expected)), "{bug:?}: {complaints:?}");
                }
            }
        }
    }
}
