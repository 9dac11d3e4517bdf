//! Many processes wake up for the nightly job; one runs it, once.
//!
//! ```text
//! cargo run --example nightly_job                  # five processes on a temporary SQLite file
//! cargo run --example nightly_job -- 20            # twenty
//! ```
//!
//! A lease lets one process in at a time, which is not once. So the process that gets the lease runs the job, and the
//! others do not wait for it (`wait = "0s"`); and the job leaves a mark, so that a process that comes when the lease is
//! free again finds that the job is done. The mark is written in a short transaction that commits only while the lease
//! is held: a process that was stopped in the middle, and lost the lease to another, cannot say that the job is done. A
//! process that is told to end (SIGTERM) gives its lease back first.

use std::{env, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use lockkit::{Leases, with_lock};
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    time::sleep,
};

struct Jobs {
    db: SqlitePool,
    leases: Leases<SqlitePool>,
}

#[derive(Debug)]
enum Night {
    /// This process ran the job.
    Ran,
    /// Another process is running it.
    ElsewhereNow,
    /// It was done before.
    DoneBefore,
}

impl Jobs {
    async fn open(file: &Path) -> Result<Self> {
        let options =
            SqliteConnectOptions::new().filename(file).create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
        let db = SqlitePool::connect_with(options).await?;
        lockkit::migrate(&db).await?;
        sqlx::query("CREATE TABLE IF NOT EXISTS t_nights (day TEXT PRIMARY KEY, process INTEGER, fence INTEGER)")
            .execute(&db)
            .await?;
        sqlx::query("CREATE TABLE IF NOT EXISTS t_reports (day TEXT)").execute(&db).await?;
        Ok(Self { leases: Leases::new(db.clone()), db })
    }

    #[with_lock(
        lease,
        on = &self.leases,
        key = "nightly:{day}",
        ttl = "30s",
        wait = "0s",
        on_busy = Ok(Night::ElsewhereNow),
        as = lease
    )]
    async fn run_nightly_job(&self, day: &str) -> Result<Night> {
        let done: i64 =
            sqlx::query_scalar("SELECT COUNT(*) FROM t_nights WHERE day = ?").bind(day).fetch_one(&self.db).await?;
        if done > 0 {
            return Ok(Night::DoneBefore);
        }
        // The long work. The lease is renewed meanwhile, and no transaction is open; if the lease is lost, this body is
        // dropped at its next await.
        sqlx::query("INSERT INTO t_reports VALUES (?)").bind(day).execute(&self.db).await?;
        sleep(Duration::from_millis(500)).await;

        // The mark, in a transaction that is short. From `verify` on nobody else gets the lease before it ends.
        let mut tx = lockkit::begin(&self.db).await?;
        lease.verify(&mut tx).await?;
        sqlx::query("INSERT INTO t_nights VALUES (?, ?, ?)")
            .bind(day)
            .bind(std::process::id())
            .bind(i64::try_from(lease.fence().get())?)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(Night::Ran)
    }
}

/// What each process does.
async fn wake_up(file: &Path) -> Result<()> {
    let jobs = Jobs::open(file).await?;
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        night = jobs.run_nightly_job("2026-01-31") => println!("process {:>7}: {:?}", std::process::id(), night?),
        _ = terminated.recv() => println!("process {:>7}: told to end", std::process::id()),
    }
    // Dropped as `main` returns, a lease would stay taken until its ttl is over.
    jobs.leases.close().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let first = args.next();
    if let (Some("--process"), Some(file)) = (first.as_deref(), args.next()) {
        return wake_up(Path::new(&file)).await;
    }
    let processes: usize = first.map_or(Ok(5), |it| it.parse()).context("the argument is a number of processes")?;

    let folder = tempfile::tempdir()?;
    let file = folder.path().join("jobs.db");
    let jobs = Jobs::open(&file).await?;
    let mut children = Vec::new();
    for _ in 0..processes {
        let child = Command::new(env::current_exe()?).arg("--process").arg(&file).stdin(Stdio::null()).spawn()?;
        children.push(child);
    }
    for mut child in children {
        ensure!(child.wait().await?.success(), "a process failed");
    }
    // One more, after everybody else.
    wake_up(&file).await?;

    let ran: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT day, process, fence FROM t_nights").fetch_all(&jobs.db).await?;
    let reports: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM t_reports").fetch_one(&jobs.db).await?;
    ensure!((ran.len(), reports) == (1, 1), "the job must run exactly once, but ran {reports} times");
    for (day, process, fence) in ran {
        println!("the job of {day} was run by process {process}, with fence {fence}");
    }
    Ok(())
}
