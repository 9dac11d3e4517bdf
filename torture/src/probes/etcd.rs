//! A probe of the store in etcd, on a server of its own.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use lockkit::Leases;
use lockkit_etcd::{EtcdStore, etcd_client::Client};
use lockkit_store_servers::etcd::Etcd;
use tokio::task::{JoinSet, spawn_blocking};

use crate::probes::{Found, Verdict, probe};

/// All probes of etcd.
pub(crate) async fn of_etcd() -> Vec<Found> {
    vec![probe("nobody holds what there is no space for", Box::pin(no_space())).await]
}

/// The server has no space left and refuses to write: no caller is told that the lease is held.
async fn no_space() -> Result<Verdict> {
    const SPACE: u64 = 1 << 20;
    const CALLERS: usize = 16;

    // A member dies with the thread that starts it, so that thread stays.
    let (started, end) = (tokio::sync::oneshot::channel(), std::sync::mpsc::channel::<()>());
    let server = spawn_blocking(move || {
        let server = Etcd::with_space(SPACE);
        let _ = started.0.send(server.endpoints());
        let _ = end.1.recv();
    });
    let endpoints = started.1.await.context("etcd does not start")?;
    let store = EtcdStore::connect(&endpoints).await?;
    let mut client = Client::connect(endpoints, None).await?;
    let mut filled = 0;
    while client.put(format!("probe/{filled}"), vec![0; 64 << 10], None).await.is_ok() {
        filled += 1;
        if filled > 1_000 {
            bail!("etcd takes more than it has space for");
        }
    }
    let mut told = JoinSet::new();
    for caller in 0..CALLERS {
        let leases = Leases::builder(store.clone()).ttl(Duration::from_secs(3)).sweep_every(None).build()?;
        let request = leases.lease(format!("probe/space/{caller}")).wait(Duration::from_secs(2));
        told.spawn(async move { request.acquire().await.is_err_and(|err| err.is_contended()) });
    }
    let busy = told.join_all().await.into_iter().filter(|is_busy| *is_busy).count();
    drop(end.0);
    server.await?;
    if busy == 0 {
        return Ok(Ok(()));
    }
    Ok(Err(format!("{busy} of {CALLERS} callers were told that somebody held a lease which nobody held")))
}
