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
    use lockkit_store_servers::etcd::Etcd as Server;
    use tokio::time::advance;

    use super::*;
    use crate::store::tests::{SECOND, client_at, store_at};

    impl Sessions {
        /// Takes this session for one of those that were granted.
        pub(crate) fn insert(&self, seconds: u64, session: Session) -> Arc<Session> {
            let session = Arc::new(session);
            self.by_ttl().insert(seconds, session.clone());
            session
        }
    }

    #[test]
    fn a_session_lives_a_quarter_longer_in_whole_seconds() {
        let seconds = |millis| seconds_for(Duration::from_millis(millis));
        assert_eq!([seconds(1600), seconds(1601), seconds(8_000), seconds(30_000)], [2, 3, 10, 38]);
        assert_eq!([seconds(79_200), seconds(80_000), seconds(80_800), seconds(600_000)], [99, 100, 110, 750]);
        assert!(seconds_for(Duration::MAX) <= LONGEST.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_given_up_when_it_was_unused_for_a_minute_and_ten_ttls() {
        for (ttl, enough) in [(2, 60), (10, 100)] {
            let sessions = Sessions::new(SECOND, Arc::default());
            let [session, other] = [1, 2].map(|it| sessions.insert(it, Session::new(1, SECOND * ttl, Instant::now())));
            advance(SECOND * enough).await;
            assert!(!sessions.give_up(&session, || false), "after {enough} s");
            advance(SECOND).await;
            assert!(!sessions.give_up(&session, || true), "a claim is on it");
            assert_eq!(sessions.all().len(), 2);
            assert!(sessions.give_up(&session, || false));
            assert!(sessions.all().iter().all(|it| Arc::ptr_eq(it, &other)));
        }
    }

    #[tokio::test]
    async fn a_session_is_retired_when_its_lease_is_gone_and_not_before() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let members = store.members();
        let session = store.sessions.get(&members, SECOND * 20).await.expect("a session");
        store.sessions.retire(&members, &session).await.expect("it is answered");
        assert!(!session.has_ended() && session.marker_revision() > 0);
        assert_eq!(store.sessions.all().len(), 1);

        client.lease_client().revoke(session.id).await.expect("it is revoked");
        store.sessions.retire(&members, &session).await.expect("it is answered");
        assert!(session.has_ended());
        assert!(store.sessions.all().is_empty());
        let next = store.sessions.get(&members, SECOND * 20).await.expect("another session");
        assert_ne!(next.id, session.id);
    }

    #[tokio::test]
    async fn a_session_is_extended_before_it_is_used_for_longer_than_it_is_known_to_live() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let lease = client.lease_client().grant(60, None).await.expect("a lease").id();
        let sent = Instant::now().checked_sub(SECOND * 50).expect("the clock counts from earlier");
        let known = store.sessions.insert(60, Session::new(lease, SECOND * 60, sent));
        known.set_due(Instant::now() + SECOND * 60);
        let wanted = Instant::now() + SECOND * 20;
        let session = store.sessions.get(&store.members(), SECOND * 20).await.expect("the session");
        assert_eq!(session.id, lease);
        assert!(session.until() >= wanted);
    }
}
