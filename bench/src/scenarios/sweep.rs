//! A sweep, which looks for rows that had no holder for a week, and finds none.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::store::{Claim, LeaseStore, Release, Token};

use super::{Bench, Subject};
use crate::clock;
use crate::floors::TTL;
use crate::load::Step;

const RETENTION: Duration = Duration::from_hours(7 * 24);

/// Keys with one statement.
const BATCH: u32 = 1_000;

/// Makes rows that were just released.
pub(super) async fn fill<DB: Subject>(bench: &Bench<DB>) -> Result<()> {
    for first in (0..bench.job.rows).step_by(BATCH as usize) {
        let numbers = first..bench.job.rows.min(first + BATCH);
        let claims: Vec<_> =
            numbers.map(|number| Claim::new(format!("fresh:{number:08}"), Token::random(), "bench", TTL)).collect();
        bench.pool.lease_acquire_all(&claims).await?;
        let releases: Vec<_> = claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
        bench.pool.lease_release_all(&releases).await?;
    }
    Ok(())
}

pub(super) async fn once<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let swept = bench.pool.lease_sweep(RETENTION, BATCH).await?;
    if swept > 0 {
        bail!("a sweep deleted {swept} fresh rows");
    }
    Ok(Some(Step::since(clock::now())))
}
