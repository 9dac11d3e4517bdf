//! Transactions: empty, with one row locked, with one name locked.

use anyhow::Result;
use lockkit::{NamedLock, Wait};

use super::{Bench, Subject, WAIT};
use crate::clock;
use crate::floors::name;
use crate::load::Step;

pub(super) async fn empty<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    if bench.job.contender == "floor" {
        let tx = DB::open_transaction(&bench.pool).await?;
        let granted = clock::now();
        bench.hold().await;
        let step = Step::since(granted);
        DB::end_transaction(tx).await?;
        return Ok(Some(step));
    }
    let tx = lockkit::begin(&bench.pool).await?;
    let granted = clock::now();
    bench.hold().await;
    let step = Step::since(granted);
    tx.commit().await?;
    Ok(Some(step))
}

pub(super) async fn row_lock<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    let id = i64::from(key);
    if bench.job.contender == "floor" {
        let mut tx = DB::open_transaction(&bench.pool).await?;
        DB::row_lock_by_hand(&mut tx, id).await?;
        let granted = clock::now();
        bench.hold().await;
        let step = Step::since(granted);
        DB::end_transaction(tx).await?;
        return Ok(Some(step));
    }
    let mut tx = lockkit::begin(&bench.pool).await?;
    DB::row_of(&mut tx, id, wait(bench)).await?;
    let granted = clock::now();
    bench.hold().await;
    let step = Step::since(granted);
    tx.commit().await?;
    Ok(Some(step))
}

pub(super) async fn named<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    let name = name(key);
    if bench.job.contender == "floor" {
        let mut tx = DB::open_transaction(&bench.pool).await?;
        DB::name_lock(&mut tx, &name).await?;
        let granted = clock::now();
        bench.hold().await;
        let step = Step::since(granted);
        DB::end_transaction(tx).await?;
        return Ok(Some(step));
    }
    let mut tx = lockkit::begin(&bench.pool).await?;
    NamedLock::new(name).wait(wait(bench)).lock(&mut tx).await?;
    let granted = clock::now();
    bench.hold().await;
    let step = Step::since(granted);
    tx.commit().await?;
    Ok(Some(step))
}

fn wait<DB: Subject>(bench: &Bench<DB>) -> Wait {
    if bench.job.contender == "lockkit unbounded" { Wait::Unbounded } else { WAIT.into() }
}
