//! One hot counter: a guarded UPDATE, and lockkit's `Stock`.

use anyhow::{Result, bail};
use lockkit::Stock;

use super::{Bench, Subject, WAIT};
use crate::clock;
use crate::load::Step;

/// The name of the stock.
pub(crate) const NAME: &str = "hot";

pub(super) async fn once<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    if bench.job.contender == "floor" {
        if !DB::stock_take(&bench.pool).await? {
            bail!("the counter has run out");
        }
    } else {
        bench.stock.take(1).await?;
    }
    Ok(Some(Step::since(clock::now())))
}

/// The stock that all tasks of the process share.
pub(super) fn open<DB: Subject>(pool: &sqlx::Pool<DB>) -> Stock<DB> {
    Stock::new(pool.clone(), NAME).wait(WAIT)
}
