//! Drives distributed-lock, rslock and zookeeper-client through the line protocol of `bench/src/job.rs`: one job, a
//! task of Tokio for each task.

use std::io::{Write, stdin, stdout};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use distributed_lock_core::traits::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_postgres::PostgresLockProvider;
use rslock::LockManager;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix};

/// A library.
enum Peer {
    DistributedLock(PostgresLockProvider),
    RsLock(LockManager),
    ZooKeeper(Client),
}

struct Driver {
    peer: Peer,
    /// For the row in PostgreSQL.
    pool: PgPool,
    is_hot_row: bool,
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn now() -> u64 {
    read(ClockId::Monotonic)
}

impl Driver {
    async fn open(job: &Value) -> Result<Self> {
        let url = job["url"].as_str().context("a URL")?;
        let connections = u32::try_from(job["connections"].as_u64().context("connections")?)?;
        let pool = || PgPoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(60));
        let peer = match job["contender"].as_str().context("a contender")? {
            "distributed-lock" => {
                let own = pool().connect(url).await?;
                Peer::DistributedLock(PostgresLockProvider::builder().pool(own).build().await?)
            }
            "rslock" => {
                let mut manager = LockManager::new(vec![job["redis"].as_str().context("Redis")?]);
                // Its default gives up after three tries.
                manager.set_retry(100_000, Duration::from_millis(5));
                Peer::RsLock(manager)
            }
            "zookeeper-client" => {
                Peer::ZooKeeper(Client::connect(job["zookeeper"].as_str().context("ZooKeeper")?).await?)
            }
            other => bail!("unknown peer {other}"),
        };
        Ok(Self { peer, pool: pool().connect(url).await?, is_hot_row: job["scenario"] == "hot-row" })
    }

    /// What is done under the lock; returns when it was granted and when it is about to be released.
    async fn section(&self) -> Result<(u64, u64)> {
        let granted = now();
        if self.is_hot_row {
            let mut conn = self.pool.acquire().await?;
            let value: i64 =
                sqlx::query_scalar("SELECT value FROM bench_row WHERE id = 0").fetch_one(&mut *conn).await?;
            sqlx::query("UPDATE bench_row SET value = $1 WHERE id = 0").bind(value + 1).execute(&mut *conn).await?;
        }
        Ok((granted, now()))
    }

    async fn once(&self, key: u64) -> Result<(u64, u64)> {
        let name = format!("key:{key}");
        match &self.peer {
            Peer::DistributedLock(provider) => {
                let lock = provider.create_lock(&name);
                let handle = lock.acquire(Some(Duration::from_secs(60))).await?;
                let times = self.section().await?;
                handle.release().await?;
                Ok(times)
            }
            Peer::RsLock(manager) => {
                let guard = manager.acquire(name.as_bytes(), Duration::from_secs(30)).await?;
                let times = self.section().await?;
                guard.release().await;
                Ok(times)
            }
            Peer::ZooKeeper(client) => {
                let folder = format!("/bench-{key}");
                let prefix = LockPrefix::new_curator(&folder, "lock-")?;
                let parents = CreateMode::Persistent.with_acls(Acls::anyone_all());
                let options = LockOptions::new(Acls::anyone_all()).with_ancestor_options(parents)?;
                let lock = client.lock(prefix, b"", options).await?;
                let times = self.section().await?;
                // The guard deletes the node in the background; here the caller waits for it.
                let path = lock.lock_path().to_owned();
                client.delete(&path, None).await?;
                drop(lock);
                Ok(times)
            }
        }
    }
}

/// Lets all tasks work, and sums up what they have seen.
async fn work(driver: &Arc<Driver>, job: &Value, milliseconds: u64) -> Result<(u64, Value)> {
    let number = |name: &str| job[name].as_u64().context("a number in the job");
    let (tasks, process, keys) = (number("tasks")?, number("process")?, number("keys")?);
    let (began, cpu) = (now(), read(ClockId::ProcessCPUTime));
    let end = began + milliseconds * 1_000_000;
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let driver = Arc::clone(driver);
            tokio::spawn(async move {
                let mut rows = Vec::new();
                loop {
                    let key = if keys == 0 { process * tasks + task } else { fastrand::u64(..keys) };
                    let asked = now();
                    let (granted, let_go) = driver.once(key).await?;
                    rows.push([key, asked - began, granted - began, let_go - began, now() - began]);
                    if now() >= end {
                        return anyhow::Ok(rows);
                    }
                }
            })
        })
        .collect();
    let mut rows = Vec::new();
    for task in running {
        rows.extend(task.await??);
    }
    let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
    let operations = json!({
        "key": column(0), "asked": column(1), "granted": column(2), "let_go": column(3), "done": column(4),
    });
    let cpu_us = (read(ClockId::ProcessCPUTime) - cpu) / 1_000;
    Ok((rows.len() as u64, json!({ "began": began, "cpu_us": cpu_us, "operations": operations })))
}

fn say(value: &Value) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

fn line() -> Result<String> {
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    Ok(line)
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("--version") {
        let version = match arguments.next().as_deref() {
            Some("distributed-lock") => "0.2",
            Some("rslock") => "0.10",
            _ => "0.11",
        };
        println!("{version}");
        return Ok(());
    }
    let job: Value = serde_json::from_str(&line()?)?;
    let driver = Arc::new(Driver::open(&job).await?);
    let (done, _) = work(&driver, &job, 0).await?;
    say(&json!({ "ready": { "done": done } }))?;
    line()?;
    let time = job["warm_ms"].as_u64().unwrap_or(0) + job["run_ms"].as_u64().unwrap_or(0);
    let (_, seen) = work(&driver, &job, time).await?;
    say(&json!({ "finished": seen }))
}
