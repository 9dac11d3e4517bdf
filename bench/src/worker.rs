//! One worker process: reads its job, connects, works, and says what it has seen.

use std::io::{Write, stdin, stdout};
use std::sync::Arc;

use anyhow::{Context, Result};
use sqlx::{MySql, Postgres, Sqlite};

use crate::job::{Job, Said};
use crate::load::{self, Work};
use crate::peers;
use crate::scenarios::Bench;
use crate::servers::Kind;

/// Does the job on the standard input.
pub(crate) async fn run() -> Result<()> {
    let job: Job = serde_json::from_str(&read_line()?).context("a worker is started by the conductor only")?;
    if job.contender == peers::SQLX {
        let work = peers::sqlx_advisory::open(&job).await?;
        return work_at(&job, &work).await;
    }
    if job.contender == peers::REDIS {
        let redis = job.redis.as_deref().context("the address of Redis")?;
        let work = peers::lockkit_redis::open(&job, redis).await?;
        return work_at(&job, &work).await;
    }
    match job.database {
        Kind::Postgres => work_at(&job, &Bench::<Postgres>::open(job.clone()).await?).await,
        Kind::MariaDb | Kind::MySql => work_at(&job, &Bench::<MySql>::open(job.clone()).await?).await,
        Kind::Sqlite => work_at(&job, &Bench::<Sqlite>::open(job.clone()).await?).await,
    }
}

async fn work_at<W: Work>(job: &Job, work: &Arc<W>) -> Result<()> {
    let warm = load::warm_up(job, work).await?;
    say(&Said::Ready { done: warm.operations.key.len() as u64 })?;
    read_line()?;
    let seen = load::run(job, work).await?;
    say(&Said::Finished(Box::new(seen)))
}

fn read_line() -> Result<String> {
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    Ok(line)
}

fn say(said: &Said) -> Result<()> {
    let mut out = stdout().lock();
    serde_json::to_writer(&mut out, said)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
