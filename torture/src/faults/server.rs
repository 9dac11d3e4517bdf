//! Faults of the server's process, its disk, its clock and its replica.

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::event::Kind;
use crate::faults::{Fault, Stage};
use crate::rig::{Rig, answers};
use crate::server::PrivateServer;

impl Stage<'_> {
    pub(super) async fn restart_server<S: Rig>(&mut self, end: Instant) -> Result<()> {
        sleep(Duration::from_millis(500)).await;
        while Instant::now() < end {
            let from = clock::now();
            let server = self.private_server()?;
            server.kill()?;
            sleep(Duration::from_millis(500)).await;
            server.restart().await?;
            answers::<S>(&self.url).await?;
            self.mark(from, "server killed");
            sleep(Duration::from_secs(4).min(end.saturating_duration_since(Instant::now()))).await;
        }
        Ok(())
    }

    pub(super) async fn freeze_server(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            let (from, time) = (clock::now(), self.ttl.mul_f64(1.7));
            let server = self.private_server()?;
            server.freeze()?;
            sleep(time).await;
            server.thaw()?;
            self.mark(from, "server stopped");
            sleep(time).await;
        }
        Ok(())
    }

    /// Writes until there is no room, and makes room again.
    pub(super) async fn fill_the_disk<S: Rig>(&mut self, end: Instant) -> Result<()> {
        let folder = self.private_server()?.folder().to_owned();
        let filler = folder.join("filler");
        while Instant::now() < end {
            let from = clock::now();
            let full = Instant::now() + self.ttl * 3;
            let mut file = File::options().create(true).append(true).open(&filler)?;
            let mut piece = vec![1; 1 << 20];
            // The server frees and takes space meanwhile.
            while Instant::now() < full {
                if file.write_all(&piece).is_err() {
                    piece.truncate((piece.len() / 2).max(512));
                    sleep(Duration::from_millis(5)).await;
                }
            }
            fs::remove_file(&filler)?;
            let server = self.private_server()?;
            if server.has_ended() {
                server.restart().await?;
            }
            answers::<S>(&self.url).await?;
            self.mark(from, "disk full");
            sleep(Duration::from_secs(3)).await;
        }
        Ok(())
    }

    /// A step forward, the same step back, and a holder that dies after each.
    pub(super) async fn move_the_clock(&mut self, end: Instant) -> Result<()> {
        for offset in [60, 0, 1, 0, -1, 0, -3_600, 0].into_iter().cycle() {
            if Instant::now() >= end {
                break;
            }
            let from = clock::now();
            self.private_server()?.set_clock(offset)?;
            // The holder renews by the new clock.
            sleep(self.ttl).await;
            if let Some(worker) = self.crew.next_holder(Kind::Lease).await {
                self.crew.kill(worker).await?;
                self.crew.add().await?;
            }
            sleep(self.ttl * 2).await;
            self.mark(from, format!("clock {offset:+} s"));
        }
        self.private_server()?.set_clock(0)
    }

    /// The primary dies, and its replica takes over for the workers.
    pub(super) async fn promote_the_replica(&mut self, fault: Fault, end: Instant) -> Result<()> {
        let primary = self.private_server()?;
        let mut replica = primary.replica(fault == Fault::PromoteSync).await?;
        sleep(end.saturating_duration_since(Instant::now()) / 2).await;
        let from = clock::now();
        let primary = self.private_server()?;
        primary.kill()?;
        replica.promote().await?;
        let address = ([127, 0, 0, 1], replica.port).into();
        self.proxy.context("a replica needs a proxy")?.lead_to(address);
        let mut url = url::Url::parse(&self.url)?;
        url.set_port(Some(replica.port)).ok().context("a URL with a port")?;
        self.url = url.into();
        self.mark(from, "failover");
        let primary = self.private_server()?;
        std::mem::swap(primary, &mut replica);
        sleep(end.saturating_duration_since(Instant::now())).await;
        Ok(())
    }

    fn private_server(&mut self) -> Result<&mut PrivateServer> {
        self.server.as_deref_mut().context("this fault needs a server of the rack's own")
    }
}
