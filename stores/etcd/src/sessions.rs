//! The etcd leases of this process: one for each ttl.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use etcd_client::{Client, PutOptions, ResponseHeader};
use tokio::{
    sync::{Mutex as FairMutex, Notify},
    time::Instant,
};

use crate::{
    builder::LONGEST,
    error::Failure,
    members::Members,
    session::{Session, leader_changes},
};

/// A session that no claim needed for this long, or ten times its ttl if that is longer, is given up.
const UNUSED: Duration = Duration::from_secs(60);

/// How often a session is replaced that ends at once.
const ROUNDS: usize = 4;

/// The etcd leases of this process, by their ttl in seconds.
#[derive(Debug)]
pub(crate) struct Sessions {
    least: Duration,
    by_ttl: Mutex<HashMap<u64, Arc<Session>>>,
    granting: FairMutex<()>,
    /// Notified when there is a new session to keep alive.
    granted: Arc<Notify>,
}

impl Sessions {
    /// No session is shorter than `least`.
    pub(crate) fn new(least: Duration, granted: Arc<Notify>) -> Self {
        Self { least, by_ttl: Mutex::default(), granting: FairMutex::default(), granted }
    }

    /// A session that is known to live for at least `ttl` from now.
    pub(crate) async fn get(&self, members: &Members, ttl: Duration) -> Result<Arc<Session>, Failure> {
        let started = Instant::now();
        let seconds = seconds_for(ttl.max(self.least.mul_f64(0.8)));
        for _ in 0..ROUNDS {
            let found = self.found(seconds);
            let session = match found {
                Some(session) => session,
                None => self.grant(members, seconds).await?,
            };
            if session.until() >= started + ttl {
                return Ok(session);
            }
            match session.extend(members).await {
                Ok(()) => return Ok(session),
                Err(Failure::NoLease) => self.retire(members, &session).await?,
                Err(err) => return Err(err),
            }
        }
        Err(leader_changes())
    }

    /// Notes under the lock that the session is wanted, so that it is not given up while it is handed out.
    fn found(&self, seconds: u64) -> Option<Arc<Session>> {
        let by_ttl = self.by_ttl();
        let session = by_ttl.get(&seconds)?;
        session.touch();
        Some(session.clone())
    }

    async fn grant(&self, members: &Members, seconds: u64) -> Result<Arc<Session>, Failure> {
        let _granting = self.granting.lock().await;
        if let Some(session) = self.found(seconds) {
            return Ok(session);
        }
        let session = Session::grant(members, i64::try_from(seconds).unwrap_or(i64::MAX)).await?;
        let session = Arc::new(session);
        self.by_ttl().insert(seconds, session.clone());
        self.granted.notify_one();
        Ok(session)
    }

    /// Forgets a session whose lease a member does not know, if it is gone.
    ///
    /// A leader that lags behind may answer a keep-alive so while the lease lives. A write with the lease is decided in
    /// the order of the log, so its answer is certain.
    pub(crate) async fn retire(&self, members: &Members, session: &Arc<Session>) -> Result<(), Failure> {
        let put = |client: Arc<Client>| async move {
            let options = PutOptions::new().with_lease(session.id);
            client.kv_client().put(&*session.marker, "", Some(options)).await
        };
        match members.call(put).await {
            Ok(answer) => session.set_marker_revision(answer.header().map_or(0, ResponseHeader::revision)),
            Err(Failure::NoLease) => {
                session.end();
                self.by_ttl().retain(|_, it| !Arc::ptr_eq(it, session));
            }
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    pub(crate) fn all(&self) -> Vec<Arc<Session>> {
        self.by_ttl().values().cloned().collect()
    }

    /// Takes the session out if it was not needed for long.
    pub(crate) fn give_up(&self, session: &Arc<Session>, is_used: impl FnOnce() -> bool) -> bool {
        let mut by_ttl = self.by_ttl();
        let is_over = session.unused_for() > UNUSED.max(session.ttl * 10) && !is_used();
        if is_over {
            by_ttl.retain(|_, it| !Arc::ptr_eq(it, session));
        }
        is_over
    }

    fn by_ttl(&self) -> MutexGuard<'_, HashMap<u64, Arc<Session>>> {
        self.by_ttl.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Revokes an etcd lease, which deletes its keys.
pub(crate) async fn revoke(members: &Members, id: i64) -> Result<(), Failure> {
    let revoked = members.call(|client: Arc<Client>| async move { client.lease_client().revoke(id).await }).await;
    match revoked {
        Ok(_) | Err(Failure::NoLease) => Ok(()),
        Err(err) => Err(err),
    }
}

/// The ttl of the session for leases of this ttl: 1.25 times as long, so that there is the ttl left between two
/// keep-alives. Rounded up to two digits, so that few different ttls make few sessions.
fn seconds_for(ttl: Duration) -> u64 {
    let needed = ttl.min(LONGEST / 2).mul_f64(1.25);
    let mut seconds = needed.as_secs() + u64::from(needed.subsec_nanos() > 0);
    let mut unit = 1;
    while seconds > 99 {
        seconds = seconds.div_ceil(10);
        unit *= 10;
    }
    seconds * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_lives_a_quarter_longer_in_whole_seconds() {
        let seconds = |millis| seconds_for(Duration::from_millis(millis));
        assert_eq!([seconds(1600), seconds(1601), seconds(8_000), seconds(30_000)], [2, 3, 10, 38]);
        assert_eq!([seconds(80_000), seconds(600_000)], [100, 750]);
    }
}
