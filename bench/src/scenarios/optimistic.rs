//! Many writers of one row: pessimistic by hand, optimistic by hand, and optimistic by lockkit.

use anyhow::Result;

use super::{Bench, Subject};
use crate::clock;
use crate::load::Step;

/// The row that all write.
const ROW: i64 = 0;

pub(super) async fn once<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    match bench.job.contender.as_str() {
        "floor: FOR UPDATE" => pessimistic(bench).await,
        "blind retry" => blind(bench).await,
        _ => lockkit(bench).await,
    }
}

/// The row is locked, read and written in a transaction.
pub(super) async fn pessimistic<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let mut tx = DB::open_transaction(&bench.pool).await?;
    let value = DB::row_lock_by_hand(&mut tx, ROW).await?;
    let granted = clock::now();
    bench.hold().await;
    DB::row_write(&mut tx, ROW, value + 1).await?;
    let step = Step::since(granted);
    DB::end_transaction(tx).await?;
    Ok(Some(step))
}

/// The row is read, and written if its version is the same; otherwise again at once.
async fn blind<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (value, version) = DB::row_with_version(&bench.pool, ROW).await?;
        bench.hold().await;
        if DB::row_write_if(&bench.pool, ROW, value + 1, version).await? {
            return Ok(Some(Step::since(clock::now()).attempts(attempts)));
        }
    }
}

/// `load` and `save` of `#[derive(Versioned)]`, retried by the policy's defaults.
pub(super) async fn lockkit<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let attempts = DB::raise(&bench.pool, ROW).await?;
    Ok(Some(Step::since(clock::now()).attempts(attempts)))
}
