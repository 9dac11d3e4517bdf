//! The fire times of the jobs, in a table: each is settled once, whatever becomes of the processes.
//!
//! A scheduler forgets a fire time at which its process was down, stopped or busy, and one whose job failed. So its
//! tick only wakes a process up. The process then settles every fire time that is due: it runs the job, or reports that
//! it was missed for too long. The row in `t_since` moves over fire times that are settled, and over no others.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context, Result};
use chrono::{DateTime, Utc};
use sqlx::Pool;

use super::trial::Db;

/// Each of them fires at every fire time.
pub(crate) const JOBS: i64 = 20;

/// How late a job may run. A fire time that is older is reported instead.
const LATEST: Duration = Duration::from_hours(1);

/// `t_fires.outcome`.
pub(crate) const RAN: i64 = 1;
pub(crate) const MISSED: i64 = 2;

pub(crate) const TABLES: [&str; 2] = [
    "CREATE TABLE t_since (fire BIGINT NOT NULL)",
    "CREATE TABLE t_fires (job BIGINT, fire BIGINT, outcome BIGINT NOT NULL, PRIMARY KEY (job, fire))",
];

/// A job and its fire time, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Due {
    pub(crate) job: i64,
    pub(crate) fire: i64,
}

impl Due {
    /// The key of its lock. The clocks of the processes may differ: they agree on the fire time, not on the time.
    pub(crate) fn key(self) -> Result<String> {
        let fire = DateTime::<Utc>::from_timestamp(self.fire, 0).context("a time")?.format("%Y-%m-%dT%H:%M:%S");
        Ok(format!("job{}@{fire}", self.job))
    }
}

/// From now on the jobs fire.
pub(crate) async fn enable<DB: Db>(pool: &Pool<DB>) -> Result<i64> {
    let now = Utc::now().timestamp();
    DB::execute(&mut *pool.acquire().await?, "INSERT INTO t_since VALUES ($1)", &[now]).await?;
    Ok(now)
}

/// What is due and not settled, in random order, so that several processes begin with different ones. `times` are the
/// fire times of the schedule after the first and up to the second.
pub(crate) async fn due<DB: Db>(pool: &Pool<DB>, times: impl Fn(i64, i64) -> Vec<i64>) -> Result<Vec<Due>> {
    let mut conn = pool.acquire().await?;
    let [[since]] = *DB::fetch(&mut conn, "SELECT fire FROM t_since", &[]).await? else { return Ok(Vec::new()) };
    let settled: Vec<[i64; 2]> =
        DB::fetch(&mut conn, "SELECT job, fire FROM t_fires WHERE fire > $1", &[since]).await?;
    let settled: HashSet<Due> = settled.into_iter().map(|[job, fire]| Due { job, fire }).collect();
    let now = Utc::now().timestamp();
    let all = times(since, now).into_iter().flat_map(|fire| (0..JOBS).map(move |job| Due { job, fire }));
    let mut due: Vec<Due> = all.filter(|it| !settled.contains(it)).collect();
    let settled_until = due.first().map_or(now, |it| it.fire - 1);
    if settled_until > since {
        DB::execute(&mut conn, "UPDATE t_since SET fire = $1 WHERE fire < $1", &[settled_until]).await?;
    }
    let latest = now - i64::try_from(LATEST.as_secs())?;
    for Due { job, fire } in due.extract_if(.., |it| it.fire < latest) {
        let report = "INSERT INTO t_fires VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        if DB::execute(&mut conn, report, &[job, fire, MISSED]).await? > 0 {
            eprintln!("job {job} was missed at {fire}");
        }
    }
    fastrand::shuffle(&mut due);
    Ok(due)
}

/// Whether all of the jobs up to this time are settled.
pub(crate) async fn are_settled<DB: Db>(pool: &Pool<DB>, since: i64, last: i64) -> Result<bool> {
    let count = "SELECT COUNT(*) FROM t_fires WHERE fire > $1 AND fire <= $2 AND outcome = $3";
    let counted = DB::fetch(&mut *pool.acquire().await?, count, &[since, last, RAN]).await?;
    Ok(counted == [[(last - since) * JOBS]])
}
