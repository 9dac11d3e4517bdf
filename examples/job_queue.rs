//! A queue of jobs in a table, on three processes: a worker takes a row that no other one is looking at, holds a lease
//! while it works, and the result is committed once. The job of a worker that died is taken over; a job that ends its
//! workers is put aside.
//!
//! ```text
//! cargo run --example job_queue                                                   # on a temporary SQLite file
//! cargo run --example job_queue -- --url postgres://user:password@localhost/jobs
//! ```
//!
//! `FOR UPDATE SKIP LOCKED` is for the moment of taking: no transaction stays open while a job runs, which may be for
//! hours. The lease `job:<id>` is the heartbeat: while it is held, the worker lives. A job that is taken and whose
//! lease is free has lost its worker; `Leases::any` finds one in a single request. Each attempt is counted before it
//! begins, so that a job that kills its worker is known after `ATTEMPTS`.

#[path = "jobs/disturb.rs"]
mod disturb;
#[path = "jobs/trial.rs"]
mod trial;

use std::time::Duration;

use anyhow::{Result, ensure};
use lockkit::{Lease, Leases, RowLock};
use rustix::process::{Signal, getpid, kill_process};
use sqlx::{Pool, Postgres, Sqlite};
use tokio::time::sleep;

use self::{
    disturb::Disturbed,
    trial::{Db, Example, Processes, until},
};

/// `t_jobs.state`.
const READY: i64 = 0;
const TAKEN: i64 = 1;
const DONE: i64 = 2;
const POISON: i64 = 3;

/// `t_jobs.kind`, which says what the work of this example does.
const GOOD: i64 = 0;
const FAILS_ONCE: i64 = 1;
const KILLS: i64 = 2;

/// How often a job is tried.
const ATTEMPTS: i64 = 5;

const TTL: Duration = Duration::from_secs(1);

/// Before a worker looks for a job again.
const PAUSE: Duration = Duration::from_millis(50);

const JOBS: i64 = 60;

/// How often a process is killed or stopped.
const DISTURBANCES: u32 = 8;

/// Locks the oldest row that is ready and that no other worker has locked.
trait Ready: Db {
    async fn lock_ready(conn: &mut Self::Connection) -> Result<Option<i64>>;
}

macro_rules! ready {
    ($database:ty) => {
        impl Ready for $database {
            async fn lock_ready(conn: &mut Self::Connection) -> Result<Option<i64>> {
                let row = RowLock::table("t_jobs").by("state", READY).order_by("id").limit(1).skip_locked();
                let rows: Vec<(i64, i64, i64, i64)> = row.fetch_all(conn).await?;
                Ok(rows.first().map(|(id, ..)| *id))
            }
        }
    };
}

ready!(Sqlite);
ready!(Postgres);

struct Worker<DB: Ready> {
    pool: Pool<DB>,
    leases: Leases<Pool<DB>>,
}

impl<DB: Ready> Worker<DB> {
    /// Takes the next job that is ready, or one whose worker has died.
    async fn next(&self) -> Result<Option<Lease<Pool<DB>>>> {
        let mut tx = lockkit::begin(&self.pool).await?;
        if let Some(id) = DB::lock_ready(&mut tx).await? {
            DB::execute(&mut tx, "UPDATE t_jobs SET state = $2 WHERE id = $1", &[id, TAKEN]).await?;
            tx.commit().await?;
            // If this process dies here, the job is taken and its lease is free.
            return Ok(self.leases.lease(format!("job:{id}")).ttl(TTL).try_acquire().await?);
        }
        let taken = DB::fetch::<1>(&mut tx, "SELECT id FROM t_jobs WHERE state = $1", &[TAKEN]).await?;
        tx.rollback().await?;
        if taken.is_empty() {
            return Ok(None);
        }
        let taken = taken.into_iter().map(|[id]| format!("job:{id}"));
        Ok(self.leases.any(taken).ttl(TTL).try_acquire().await?)
    }

    /// Makes one attempt at the job of the lease.
    async fn attempt(&self, lease: Lease<Pool<DB>>) -> Result<()> {
        let id: i64 = lease.key().trim_start_matches("job:").parse()?;
        let mut tx = lockkit::begin(&self.pool).await?;
        lease.verify(&mut tx).await?;
        let job = "SELECT kind, attempts FROM t_jobs WHERE id = $1 AND state = $2";
        let [[kind, attempts]] = *DB::fetch(&mut tx, job, &[id, TAKEN]).await? else {
            // Its worker has finished it since.
            tx.rollback().await?;
            lease.release().await?;
            return Ok(());
        };
        if attempts == ATTEMPTS {
            DB::execute(&mut tx, "UPDATE t_jobs SET state = $2 WHERE id = $1", &[id, POISON]).await?;
            return Ok(lease.commit(tx).await?);
        }
        DB::execute(&mut tx, "UPDATE t_jobs SET attempts = attempts + 1 WHERE id = $1", &[id]).await?;
        DB::execute(&mut tx, "INSERT INTO t_starts VALUES ($1)", &[id]).await?;
        tx.commit().await?;

        let worked = tokio::select! {
            worked = work(kind, attempts) => worked,
            // Another worker has the job, or will have it.
            _ = lease.lost() => return Ok(()),
        };
        let mut tx = lockkit::begin(&self.pool).await?;
        let state = match worked {
            Ok(()) => {
                DB::execute(&mut tx, "INSERT INTO t_results VALUES ($1)", &[id]).await?;
                DONE
            }
            Err(err) => {
                eprintln!("job {id} failed at its attempt {}: {err}", attempts + 1);
                READY
            }
        };
        DB::execute(&mut tx, "UPDATE t_jobs SET state = $2 WHERE id = $1", &[id, state]).await?;
        // The result and the state are committed while the lease is held, or not at all.
        Ok(lease.commit(tx).await?)
    }
}

async fn work(kind: i64, attempts: i64) -> Result<()> {
    sleep(Duration::from_millis(fastrand::u64(20..200))).await;
    ensure!(kind != FAILS_ONCE || attempts > 0, "the first attempt of this job fails");
    if kind == KILLS {
        kill_process(getpid(), Signal::KILL)?;
    }
    Ok(())
}

struct Queue;

impl<DB: Ready> Example<DB> for Queue {
    const TABLES: &[&str] = &[
        "CREATE TABLE t_jobs (id BIGINT PRIMARY KEY, kind BIGINT NOT NULL, state BIGINT NOT NULL, \
         attempts BIGINT NOT NULL)",
        "CREATE INDEX t_jobs_state ON t_jobs (state, id)",
        "CREATE TABLE t_starts (id BIGINT NOT NULL)",
        "CREATE TABLE t_results (id BIGINT NOT NULL)",
    ];

    async fn work(pool: Pool<DB>) -> Result<()> {
        let worker = Worker { leases: Leases::new(pool.clone()), pool };
        loop {
            let attempted = match worker.next().await {
                Ok(Some(lease)) => worker.attempt(lease).await,
                Ok(None) => {
                    sleep(PAUSE).await;
                    Ok(())
                }
                Err(err) => Err(err),
            };
            if let Err(err) = attempted {
                eprintln!("the job is left to the next worker: {err}");
                sleep(PAUSE).await;
            }
        }
    }

    async fn watch(pool: Pool<DB>, processes: &mut Processes) -> Result<()> {
        let mut conn = pool.acquire().await?;
        for id in 1..=JOBS {
            let kind = if id % 20 == 7 {
                KILLS
            } else if id % 10 == 3 {
                FAILS_ONCE
            } else {
                GOOD
            };
            DB::execute(&mut conn, "INSERT INTO t_jobs VALUES ($1, $2, $3, 0)", &[id, kind, READY]).await?;
        }
        let mut disturbed = Disturbed::default();
        for _ in 0..DISTURBANCES {
            disturbed.once(processes, 2 * TTL).await?;
        }
        until("no job is left", async || {
            processes.replace_dead()?;
            let left = "SELECT COUNT(*) FROM t_jobs WHERE state NOT IN ($1, $2)";
            Ok(DB::fetch(&mut conn, left, &[DONE, POISON]).await? == [[0]])
        })
        .await?;

        let jobs = "SELECT id, kind, state, (SELECT COUNT(*) FROM t_starts s WHERE s.id = j.id), \
                    (SELECT COUNT(*) FROM t_results r WHERE r.id = j.id) FROM t_jobs j";
        let jobs: Vec<[i64; 5]> = DB::fetch(&mut conn, jobs, &[]).await?;
        for [id, kind, state, starts, results] in &jobs {
            let is_right = match *kind {
                KILLS => (*state, *starts, *results) == (POISON, ATTEMPTS, 0),
                FAILS_ONCE => (*state, *results) == (DONE, 1) && *starts > 1,
                _ => (*state, *results) == (DONE, 1),
            };
            ensure!(is_right, "job {id} of kind {kind}: state {state}, {starts} attempts, {results} results");
        }
        let poison = jobs.iter().filter(|it| it[2] == POISON).count();
        let again = jobs.iter().filter(|it| it[1] == GOOD && it[3] > 1).count();
        println!(
            "{} jobs: one result each, {again} after another attempt, {poison} put aside after {ATTEMPTS}; {disturbed}",
            jobs.len()
        );
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    trial::run::<Queue>().await
}
