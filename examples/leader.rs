//! A leader among three processes, and what happens when it is killed, stopped or deposed: another one leads, and the
//! old one commits nothing any more.
//!
//! ```text
//! cargo run --example leader                                                      # on a temporary SQLite file
//! cargo run --example leader -- --url postgres://user:password@localhost/jobs
//! ```
//!
//! [`LeaseRequest::lead`](lockkit::LeaseRequest::lead) runs the body in one process at a time. A leader that is stopped
//! (SIGSTOP, a frozen virtual machine) is replaced after the ttl, as one that is killed is. A session lock would stay
//! with it for as long as its connection lives. The leader commits each of its steps only while it leads, and the log
//! has the fence of each: no fence follows a greater one.

#[path = "jobs/trial.rs"]
mod trial;

use std::{process, time::Duration};

use anyhow::{Result, ensure};
use lockkit::{Lease, Leases};
use rustix::process::Signal;
use sqlx::Pool;
use tokio::time::{sleep, timeout};

use self::trial::{Db, Example, Processes, send_signal, until};

const TTL: Duration = Duration::from_secs(1);

/// What a new leader has to do before it is disturbed.
const STEPS: i64 = 20;

/// How often the leader is killed, stopped and deposed.
const TERMS: usize = 6;

/// Leads until the lease is lost: a step every few milliseconds.
async fn lead<DB: Db>(pool: Pool<DB>, lease: Lease<Pool<DB>>) -> Result<()> {
    loop {
        if let Err(err) = step(&pool, &lease).await {
            eprintln!("process {}: {err}", process::id());
        }
        sleep(Duration::from_millis(20)).await;
    }
}

async fn step<DB: Db>(pool: &Pool<DB>, lease: &Lease<Pool<DB>>) -> Result<()> {
    let mut tx = lockkit::begin(pool).await?;
    // Nobody else leads before this transaction ends.
    lease.verify(&mut tx).await?;
    // The table says how far the last leader came.
    let last = DB::fetch::<1>(&mut tx, "SELECT COALESCE(MAX(step), 0) FROM t_steps", &[]).await?;
    let this = [last[0][0] + 1, i64::try_from(lease.fence().get())?, process::id().into()];
    DB::execute(&mut tx, "INSERT INTO t_steps VALUES ($1, $2, $3)", &this).await?;
    Ok(tx.commit().await?)
}

/// The last step: its number, the fence and the process of its leader.
async fn last_step<DB: Db>(pool: &Pool<DB>) -> Result<[i64; 3]> {
    let last = "SELECT step, fence, pid FROM t_steps ORDER BY step DESC LIMIT 1";
    Ok(DB::fetch(&mut *pool.acquire().await?, last, &[]).await?.first().copied().unwrap_or_default())
}

/// Stops the process. On SQLite a process that is stopped in a transaction has the file locked, so that nothing can
/// replace it; then it goes on for a moment, and is stopped again. A server ends such a transaction.
async fn stop_outside_transaction<DB: Db>(pool: &Pool<DB>, pid: i64) -> Result<()> {
    loop {
        send_signal(pid, Signal::STOP)?;
        // A write, because that is what the others will do.
        let writing = async { lockkit::begin(pool).await?.commit().await };
        if timeout(TTL, writing).await.is_ok_and(|it| it.is_ok()) {
            return Ok(());
        }
        send_signal(pid, Signal::CONT)?;
        sleep(Duration::from_millis(fastrand::u64(5..50))).await;
    }
}

struct Leader;

impl<DB: Db> Example<DB> for Leader {
    const TABLES: &[&str] =
        &["CREATE TABLE t_steps (step BIGINT PRIMARY KEY, fence BIGINT NOT NULL, pid BIGINT NOT NULL)"];

    async fn work(pool: Pool<DB>) -> Result<()> {
        let leases = Leases::builder(pool.clone()).ttl(TTL).build()?;
        leases.lease("leader").lead(|lease| lead(pool.clone(), lease)).await
    }

    async fn watch(pool: Pool<DB>, processes: &mut Processes) -> Result<()> {
        let leases = Leases::new(pool.clone());
        let (mut fence, mut stopped) = (0, None);
        for term in 0..TERMS {
            let mut led = [0; 3];
            until("another process has led for a while", async || {
                led = last_step(&pool).await?;
                let steps = "SELECT COUNT(*) FROM t_steps WHERE fence = $1";
                let steps = DB::fetch::<1>(&mut *pool.acquire().await?, steps, &[led[1]]).await?;
                Ok(led[1] > fence && steps[0][0] >= STEPS)
            })
            .await?;
            let [_, new_fence, leader] = led;
            fence = new_fence;
            // It goes on where it was, with a lease that another process has by now.
            if let Some(stopped) = stopped.take() {
                send_signal(stopped, Signal::CONT)?;
            }
            match term % 3 {
                0 => {
                    stop_outside_transaction(&pool, leader).await?;
                    stopped = Some(leader);
                    println!("the leader with fence {fence} is stopped");
                }
                1 => {
                    send_signal(leader, Signal::KILL)?;
                    println!("the leader with fence {fence} is killed");
                }
                _ => {
                    while leases.steal("leader").await?.is_none() {}
                    println!("the leader with fence {fence} is deposed by an operator");
                }
            }
            processes.replace_dead()?;
        }
        until("another process leads", async || Ok(last_step(&pool).await?[1] > fence)).await?;

        let steps = "SELECT fence, pid FROM t_steps ORDER BY step";
        let steps: Vec<[i64; 2]> = DB::fetch(&mut *pool.acquire().await?, steps, &[]).await?;
        ensure!(steps.is_sorted_by_key(|[fence, _]| *fence), "a leader worked on after its successor had begun");
        let mut leaders: Vec<[i64; 2]> = steps.clone();
        leaders.dedup();
        ensure!(leaders.len() > TERMS, "{} terms", leaders.len());
        println!("{} steps in {} terms, in the order of their fences", steps.len(), leaders.len());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    trial::run::<Leader>().await
}
