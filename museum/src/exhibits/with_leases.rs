//! Scripts with a lease of lockkit, which several exhibits use.

use std::time::Duration;

use anyhow::Result;
use lockkit::{LeaseStore, Leases, Wait};

use crate::{stage::Actor, world::Client};

/// The longest wait of [`waits`].
const PATIENCE: Duration = Duration::from_secs(60);

/// Has the lease, sells, and releases it.
pub(super) async fn sells<S: LeaseStore>(me: Actor, leases: Leases<S>, key: &'static str) -> Result<()> {
    let lease = me.step("acquire", leases.lease(key).acquire()).await?;
    me.enters();
    let release = async {
        me.leaves();
        lease.release().await
    };
    me.step("release", release).await?;
    Ok(())
}

/// Has the lease and is killed.
pub(super) async fn is_killed(me: Actor, leases: Leases<Client>, key: &'static str) -> Result<()> {
    let _lease = me.step("acquire", leases.lease(key).acquire()).await?;
    me.enters();
    me.step("killed", async { leases.store().cut() }).await;
    me.stops("killed");
    Ok(())
}

/// Tries without waiting, and again, until it has the lease. Then it keeps the lease.
pub(super) async fn tries<S: LeaseStore>(me: Actor, leases: Leases<S>, key: &'static str) -> Result<()> {
    me.wants();
    loop {
        match me.step("acquire, do not wait", leases.lease(key).wait(Wait::Never).acquire()).await {
            Err(err) if err.is_contended() => me.mark("\"busy\""),
            lease => {
                let _lease = lease?;
                me.enters();
                me.step("sell", async {}).await;
            }
        }
    }
}

/// Waits for the lease, and releases it.
pub(super) async fn waits<S: LeaseStore>(me: Actor, leases: Leases<S>, key: &'static str) -> Result<()> {
    let lease = async {
        let lease = leases.lease(key).wait(PATIENCE).acquire().await?;
        me.enters();
        Ok::<_, lockkit::Error>(lease)
    };
    let lease = me.step("acquire, wait", lease).await?;
    let release = async {
        me.leaves();
        lease.release().await
    };
    me.step("release", release).await?;
    Ok(())
}
