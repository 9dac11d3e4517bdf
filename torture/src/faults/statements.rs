//! Faults that are statements: an administrator ends sessions, cancels statements, steals leases, deletes rows.

use std::time::Duration;

use anyhow::Result;
use lockkit::Leases;
use sqlx::pool::PoolOptions;
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::event::Kind;
use crate::faults::Stage;
use crate::rig::{Rig, connect, execute};

impl Stage<'_> {
    pub(super) async fn end_sessions<S: Rig>(&mut self, end: Instant) -> Result<()> {
        let mut conn = connect::<S>(&self.url).await?;
        while Instant::now() < end {
            let from = clock::now();
            let ended = S::terminate(&mut conn).await?;
            self.mark(from, format!("end {ended}"));
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }

    pub(super) async fn cancel_statements<S: Rig>(&mut self, end: Instant) -> Result<()> {
        let mut conn = connect::<S>(&self.url).await?;
        let from = clock::now();
        while Instant::now() < end {
            S::cancel(&mut conn).await?;
            sleep(Duration::from_millis(20)).await;
        }
        self.mark(from, "cancel");
        Ok(())
    }

    pub(super) async fn steal<S: Rig>(&mut self, end: Instant) -> Result<()> {
        let pool = PoolOptions::<S::DB>::new().max_connections(1).connect(&self.url).await?;
        let leases = Leases::builder(pool).sweep_every(None).build()?;
        while Instant::now() < end {
            let kind = [Kind::Lease, Kind::Fenced, Kind::Several][fastrand::usize(0..3)];
            let key = kind.key(fastrand::u32(0..kind.keys()));
            if leases.steal(key.clone()).await?.is_some() {
                self.mark(clock::now(), format!("steal {key}"));
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    pub(super) async fn sweep<S: Rig>(&mut self, end: Instant) -> Result<()> {
        let mut conn = connect::<S>(&self.url).await?;
        let (from, now) = (clock::now(), S::NOW);
        let sql = format!("DELETE FROM lockkit_lease WHERE expires_us < {now} AND fence < {now}");
        let mut swept = 0;
        while Instant::now() < end {
            // A deadlock with an acquire is the sweeper's own business.
            swept += S::execute(&mut conn, &sql).await.unwrap_or(0);
            sleep(Duration::from_millis(10)).await;
        }
        self.mark(from, format!("{swept} rows swept"));
        Ok(())
    }

    /// Opens connections until the server refuses, and keeps them for longer than a ttl.
    pub(super) async fn use_up_connections<S: Rig>(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            let from = clock::now();
            let mut hogs = Vec::new();
            let enough = Instant::now() + self.ttl.mul_f64(1.5);
            while Instant::now() < enough {
                match connect::<S>(&self.url).await {
                    Ok(conn) => hogs.push(conn),
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
                // The workers' pools keep what they have unless it is taken from them once.
                if hogs.len() == 10 {
                    S::terminate(&mut hogs[0]).await?;
                    hogs.truncate(1);
                    for _ in 0..60 {
                        hogs.extend(connect::<S>(&self.url).await.ok());
                    }
                }
            }
            self.mark(from, format!("{} connections", hogs.len()));
            drop(hogs);
            sleep(self.ttl.mul_f64(1.5).min(end.saturating_duration_since(Instant::now()))).await;
        }
        Ok(())
    }

    pub(super) async fn make_read_only<S: Rig>(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            let from = clock::now();
            set_read_only::<S>(&self.url, true).await?;
            sleep(self.ttl.mul_f64(1.5)).await;
            set_read_only::<S>(&self.url, false).await?;
            self.mark(from, "read-only");
            sleep(self.ttl.mul_f64(1.5).min(end.saturating_duration_since(Instant::now()))).await;
        }
        Ok(())
    }
}

async fn set_read_only<S: Rig>(url: &str, read_only: bool) -> Result<()> {
    if S::CODE != support::Postgres::CODE {
        let value = i32::from(read_only);
        execute::<S>(url, &format!("SET GLOBAL read_only = {value}")).await?;
        return Ok(());
    }
    let value = if read_only { "on" } else { "off" };
    // Neither may be in a transaction with the other.
    execute::<S>(url, &format!("ALTER SYSTEM SET default_transaction_read_only = {value}")).await?;
    execute::<S>(url, "SELECT pg_reload_conf()").await?;
    Ok(())
}
