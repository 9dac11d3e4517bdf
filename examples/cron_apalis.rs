//! apalis on three processes: each fire time of each job has its effect exactly once.
//!
//! ```text
//! cargo run --example cron_apalis                                                 # on a temporary SQLite file
//! cargo run --example cron_apalis -- --url postgres://user:password@localhost/jobs
//! ```
//!
//! The cron backend of apalis ticks in every process. Each tick settles what is due (`jobs/fires.rs`). The work of a
//! job is in the database, so [`Idempotent`] runs it under the key `job@fire time`, and commits the work, the mark of
//! the fire time and the answer together: a process that is killed leaves none of them, and one that is stopped keeps
//! the lock until it goes on. A job that fails is run again at the next tick.

#[path = "jobs/disturb.rs"]
mod disturb;
#[path = "jobs/fires.rs"]
mod fires;
#[path = "jobs/trial.rs"]
mod trial;

use std::{str::FromStr, sync::Arc, time::Duration};

use anyhow::{Result, bail, ensure};
use apalis::prelude::{Data, WorkerBuilder};
use apalis_cron::{CronScheduler, Tick};
use chrono::{DateTime, Utc};
use cron::Schedule;
use lockkit::{Idempotent, Wait};
use sqlx::Pool;
use tokio::{sync::Mutex, time::sleep};

use self::{
    disturb::Disturbed,
    fires::{Due, JOBS, RAN},
    trial::{Db, Example, Processes, until},
};

/// Every second.
const SCHEDULE: &str = "* * * * * *";

/// For how many seconds the processes are disturbed.
const SECONDS: i64 = 10;

/// What every process has: the jobs, and whether it is running them.
struct Jobs<DB: Db> {
    pool: Pool<DB>,
    schedule: Schedule,
    running: Mutex<()>,
}

impl<DB: Db> Jobs<DB> {
    /// Settles all that is due. A tick that comes while another one works has nothing to do.
    async fn tick(&self) -> Result<()> {
        let Ok(_running) = self.running.try_lock() else { return Ok(()) };
        let times = |since, now| {
            let since = DateTime::<Utc>::from_timestamp(since, 0).expect("a time of this table");
            self.schedule.after(&since).map(|it| it.timestamp()).take_while(|it| *it <= now).collect()
        };
        for due in fires::due(&self.pool, times).await? {
            match self.run(due).await {
                Ok(()) => {}
                // Another process runs it.
                Err(err) if err.downcast_ref().is_some_and(lockkit::Error::is_contended) => {}
                Err(err) => eprintln!("{due:?} is tried again at the next tick: {err}"),
            }
        }
        Ok(())
    }

    async fn run(&self, due: Due) -> Result<()> {
        let body = async |tx: &mut lockkit::Tx<DB>| {
            let Due { job, fire } = due;
            DB::execute(&mut *tx, "INSERT INTO t_work VALUES ($1, $2)", &[job, fire]).await?;
            sleep(Duration::from_millis(fastrand::u64(..15))).await;
            if fastrand::u8(..) < 20 {
                bail!("the job failed in the middle");
            }
            DB::execute(&mut *tx, "INSERT INTO t_fires VALUES ($1, $2, $3)", &[job, fire, RAN]).await?;
            Ok(())
        };
        let once = Idempotent::key(due.key()?).wait(Wait::Never);
        once.run(&self.pool, body).await?;
        Ok(())
    }
}

async fn on_tick<DB: Db>(_: Tick, jobs: Data<Arc<Jobs<DB>>>) -> Result<()> {
    jobs.tick().await
}

struct Cron;

impl<DB: Db> Example<DB> for Cron {
    const TABLES: &[&str] =
        &[fires::TABLES[0], fires::TABLES[1], "CREATE TABLE t_work (job BIGINT NOT NULL, fire BIGINT NOT NULL)"];

    async fn work(pool: Pool<DB>) -> Result<()> {
        let schedule = Schedule::from_str(SCHEDULE)?;
        let jobs = Arc::new(Jobs { pool, schedule: schedule.clone(), running: Mutex::new(()) });
        loop {
            let worker = WorkerBuilder::new("jobs")
                .backend(CronScheduler::new(schedule.clone()))
                .data(jobs.clone())
                .build(on_tick::<DB>);
            // The backend fails when it is asked for a tick that has passed, as after a stop. Nothing is lost by that.
            if let Err(err) = worker.run().await {
                eprintln!("the scheduler is started again: {err}");
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn watch(pool: Pool<DB>, processes: &mut Processes) -> Result<()> {
        let since = fires::enable(&pool).await?;
        let last = since + SECONDS;
        let mut disturbed = Disturbed::default();
        while Utc::now().timestamp() < last {
            disturbed.once(processes, Duration::from_secs(1)).await?;
        }
        processes.replace_dead()?;
        until("all jobs have run", async || fires::are_settled(&pool, since, last).await).await?;

        let done = "SELECT job, fire, COUNT(*) FROM t_work WHERE fire <= $1 GROUP BY job, fire";
        let done: Vec<[i64; 3]> = DB::fetch(&mut *pool.acquire().await?, done, &[last]).await?;
        for [job, fire, times] in &done {
            ensure!(*times == 1, "job {job} ran {times} times for {fire}");
        }
        ensure!(i64::try_from(done.len())? == SECONDS * JOBS, "{} fire times have run", done.len());
        println!("{} fire times, each exactly once; {disturbed}", done.len());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    trial::run::<Cron>().await
}
