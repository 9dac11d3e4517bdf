//! tokio-cron-scheduler on three processes: each fire time of each job runs once, and where a process dies between the
//! job and its mark, nobody can know whether it has run: then it runs again, and is reported.
//!
//! ```text
//! cargo run --example cron_tokio                                                  # on a temporary SQLite file
//! cargo run --example cron_tokio -- --url postgres://user:password@localhost/jobs
//! ```
//!
//! The scheduler ticks in every process, and does not say for which time. Each tick settles what is due
//! (`jobs/fires.rs`). The job leaves the database (here it sends a mail), so it runs under the lease `job@fire time`
//! between two short transactions that depend on the lease: one notes that the job begins, the other that it has run. A
//! process that finds the first note without the second reports that the last attempt has an unknown outcome. A real
//! job would ask the mail server first.

#[path = "jobs/disturb.rs"]
mod disturb;
#[path = "jobs/fires.rs"]
mod fires;
#[path = "jobs/trial.rs"]
mod trial;

use std::{future::pending, iter::successors, sync::Arc, time::Duration};

use anyhow::{Result, bail, ensure};
use chrono::{DateTime, Utc};
use croner::{
    Cron,
    parser::{CronParser, Seconds},
};
use lockkit::{Lease, Leases, Wait};
use sqlx::Pool;
use tokio::{sync::Mutex, time::sleep};
use tokio_cron_scheduler::{Job, JobScheduler};

use self::{
    disturb::Disturbed,
    fires::{Due, JOBS, RAN},
    trial::{Db, Example, Processes, until},
};

/// Every second.
const SCHEDULE: &str = "* * * * * *";

/// For how many seconds the processes are disturbed.
const SECONDS: i64 = 10;

const TTL: Duration = Duration::from_secs(1);

/// What every process has: the jobs, and whether it is running them.
struct Jobs<DB: Db> {
    pool: Pool<DB>,
    leases: Leases<Pool<DB>>,
    schedule: Cron,
    running: Mutex<()>,
}

impl<DB: Db> Jobs<DB> {
    /// Settles all that is due. A tick that comes while another one works has nothing to do.
    async fn tick(&self) -> Result<()> {
        let Ok(_running) = self.running.try_lock() else { return Ok(()) };
        let times = |since, now| {
            let since = DateTime::<Utc>::from_timestamp(since, 0).expect("a time of this table");
            // Not `iter_after`: in croner 3.0 it skips a time that is one second after another.
            let next = |after: &DateTime<Utc>| self.schedule.find_next_occurrence(after, false).ok();
            successors(next(&since), next).map(|it| it.timestamp()).take_while(|it| *it <= now).collect()
        };
        for due in fires::due(&self.pool, times).await? {
            let request = self.leases.lease(due.key()?).ttl(TTL).wait(Wait::Never);
            match request.run(|lease| self.run(due, lease)).await {
                Ok(()) => {}
                // Another process runs it, or has taken it over from this one.
                Err(err) if err.downcast_ref().is_some_and(|it: &lockkit::Error| it.is_contended() || it.is_lost()) => {
                }
                Err(err) => eprintln!("{due:?} is tried again at the next tick: {err}"),
            }
        }
        Ok(())
    }

    async fn run(&self, due: Due, lease: Lease<Pool<DB>>) -> Result<()> {
        let this = [due.job, due.fire];
        let mut tx = lockkit::begin(&self.pool).await?;
        lease.verify(&mut tx).await?;
        let ran = "SELECT outcome FROM t_fires WHERE job = $1 AND fire = $2";
        if !DB::fetch::<1>(&mut tx, ran, &this).await?.is_empty() {
            return Ok(());
        }
        if fastrand::u8(..) < 20 {
            bail!("the job failed before it began");
        }
        let begun = "INSERT INTO t_begun VALUES ($1, $2) ON CONFLICT DO NOTHING";
        if DB::execute(&mut tx, begun, &this).await? == 0 {
            DB::execute(&mut tx, "INSERT INTO t_reports VALUES ($1, $2)", &this).await?;
            eprintln!("{due:?} may have run: {:?} has begun it", lease.previous().map(|it| &*it.holder));
        }
        tx.commit().await?;

        send_mail::<DB>(&self.pool, due).await?;

        let mut tx = lockkit::begin(&self.pool).await?;
        DB::execute(&mut tx, "INSERT INTO t_fires VALUES ($1, $2, $3)", &[due.job, due.fire, RAN]).await?;
        lease.commit(tx).await?;
        Ok(())
    }
}

/// What no transaction can undo. The table stands for the mailboxes.
async fn send_mail<DB: Db>(pool: &Pool<DB>, Due { job, fire }: Due) -> Result<()> {
    DB::execute(&mut *pool.acquire().await?, "INSERT INTO t_mails VALUES ($1, $2)", &[job, fire]).await?;
    sleep(Duration::from_millis(fastrand::u64(..40))).await;
    Ok(())
}

struct Mails;

impl<DB: Db> Example<DB> for Mails {
    const TABLES: &[&str] = &[
        fires::TABLES[0],
        fires::TABLES[1],
        "CREATE TABLE t_begun (job BIGINT NOT NULL, fire BIGINT NOT NULL, PRIMARY KEY (job, fire))",
        "CREATE TABLE t_reports (job BIGINT NOT NULL, fire BIGINT NOT NULL)",
        "CREATE TABLE t_mails (job BIGINT NOT NULL, fire BIGINT NOT NULL)",
    ];

    async fn work(pool: Pool<DB>) -> Result<()> {
        let schedule = CronParser::builder().seconds(Seconds::Required).build().parse(SCHEDULE)?;
        let leases = Leases::new(pool.clone());
        let jobs = Arc::new(Jobs { pool, leases, schedule, running: Mutex::new(()) });
        let scheduler = JobScheduler::new().await?;
        let ticking = Job::new_async(SCHEDULE, move |_, _| {
            let jobs = jobs.clone();
            Box::pin(async move {
                if let Err(err) = jobs.tick().await {
                    eprintln!("what is due is looked for again at the next tick: {err}");
                }
            })
        })?;
        scheduler.add(ticking).await?;
        scheduler.start().await?;
        pending().await
    }

    async fn watch(pool: Pool<DB>, processes: &mut Processes) -> Result<()> {
        let since = fires::enable(&pool).await?;
        let last = since + SECONDS;
        let mut disturbed = Disturbed::default();
        while Utc::now().timestamp() < last {
            disturbed.once(processes, 2 * TTL).await?;
        }
        processes.replace_dead()?;
        until("all jobs have run", async || fires::are_settled(&pool, since, last).await).await?;

        let mut conn = pool.acquire().await?;
        let sent = "SELECT job, fire, COUNT(*), \
                    (SELECT COUNT(*) FROM t_reports r WHERE r.job = m.job AND r.fire = m.fire) \
                    FROM t_mails m WHERE fire <= $1 GROUP BY job, fire";
        let sent: Vec<[i64; 4]> = DB::fetch(&mut conn, sent, &[last]).await?;
        for [job, fire, mails, reports] in &sent {
            ensure!(*mails <= 1 + reports, "job {job} ran {mails} times for {fire}, and {reports} were reported");
        }
        ensure!(i64::try_from(sent.len())? == SECONDS * JOBS, "{} fire times have run", sent.len());
        let (reported, twice) =
            (sent.iter().filter(|it| it[3] > 0).count(), sent.iter().filter(|it| it[2] > 1).count());
        println!(
            "{} fire times have run, {reported} reported as unknown, of which {twice} ran twice; {disturbed}",
            sent.len()
        );
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    trial::run::<Mails>().await
}
