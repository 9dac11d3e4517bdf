//! What runs in the background of a store: keeps its sessions alive, and removes keys of leases that are over.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep_until, timeout};

use crate::{
    claims::Due,
    error::Failure,
    members::Members,
    session::Session,
    sessions::{Sessions, revoke},
    store::Shared,
};

/// How long to try to revoke the sessions of a store that is dropped.
const REVOKING: Duration = Duration::from_secs(2);

/// The longest pause, if nothing is due.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Starts the background task on the current runtime. It ends with the store or the runtime.
pub(crate) fn start(store: &Arc<Shared>, members: Arc<Members>) {
    let (sooner, sessions) = (store.claims.sooner.clone(), store.sessions.clone());
    let store = Arc::downgrade(store);
    tokio::spawn(async move {
        loop {
            let sooner = sooner.notified();
            let Some(next) = start_due(&store, &members) else { break };
            tokio::select! {
                () = sooner => {}
                () = sleep_until(next) => {}
            }
        }
        revoke_all(&members, &sessions).await;
    });
}

/// Starts what is due, and returns when to look again. `None` if the store is gone.
fn start_due(store: &Weak<Shared>, members: &Arc<Members>) -> Option<Instant> {
    let store = store.upgrade()?;
    let now = Instant::now();
    let Due { claims, left, next } = store.claims.take_due();
    let (staying, claims): (Vec<_>, Vec<_>) =
        claims.into_iter().partition(|it| it.stays.is_some_and(|until| until > now));
    for claimed in staying {
        let (store, members) = (store.clone(), members.clone());
        tokio::spawn(async move {
            let until = claimed.stays.unwrap_or(now);
            tolerated("leaving a key", store.leave_until(&members, &claimed, until).await);
        });
    }
    if !claims.is_empty() {
        let (store, members) = (store.clone(), members.clone());
        tokio::spawn(async move { tolerated("removing keys", store.remove(&members, &claims, false).await) });
    }
    for left in left {
        let (store, members) = (store.clone(), members.clone());
        tokio::spawn(async move { tolerated("removing a key", store.remove_left(&members, left).await) });
    }
    let mut next = next.unwrap_or(now + LONGEST_PAUSE);
    for session in store.sessions.all() {
        if session.due() <= now {
            if store.sessions.give_up(&session, || store.claims.use_session(session.id)) {
                let members = members.clone();
                tokio::spawn(async move { tolerated("revoking a lease", revoke(&members, session.id).await) });
                continue;
            }
            // If this one gets no answer, another one is sent at this time.
            session.set_due(now + session.ttl / 5);
            tokio::spawn(keep_alive(store.clone(), members.clone(), session.clone()));
        }
        next = next.min(session.due());
    }
    Some(next)
}

async fn keep_alive(store: Arc<Shared>, members: Arc<Members>, session: Arc<Session>) {
    let kept = timeout(session.ttl / 5, session.extend(&members)).await;
    match kept {
        Ok(Ok(())) | Err(_) => {}
        Ok(Err(Failure::NoLease)) => {
            tolerated("replacing a lease", store.sessions.retire(&members, &session).await);
        }
        Ok(Err(failure)) => {
            tolerated::<()>("keeping a lease alive", Err(failure));
            session.set_due(Instant::now() + (session.ttl / 20).min(Duration::from_millis(500)));
            store.claims.sooner.notify_one();
        }
    }
}

/// The leases of a store that is gone have no holder.
async fn revoke_all(members: &Members, sessions: &Sessions) {
    let revoking = async {
        for session in sessions.all() {
            tolerated("revoking a lease", revoke(members, session.id).await);
        }
    };
    drop(timeout(REVOKING, revoking).await);
}

/// The cluster frees what is left, or the next attempt does.
fn tolerated<T>(doing: &'static str, done: Result<T, Failure>) {
    if let Err(failure) = done {
        tracing::debug!(target: "lockkit", doing, ?failure, "etcd failed in the background");
    }
}

#[cfg(test)]
mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;
    use tokio::time::advance;
    use tonic::Code;

    use super::*;
    use crate::{
        EtcdStore,
        members::{Source, tests::refusing},
        store::tests::{
            SECOND, client_at, is_revoked, members_of_nothing, store_at, store_of, store_of_nothing, until,
        },
    };

    #[tokio::test(start_paused = true)]
    async fn a_store_without_claims_and_sessions_is_looked_at_once_an_hour() {
        let (store, members) = (store_of_nothing(), Arc::new(Members::new(members_of_nothing())));
        let next = start_due(&Arc::downgrade(&store), &members);
        assert_eq!(next, Some(Instant::now() + LONGEST_PAUSE));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_kept_alive_five_times_in_its_ttl_until_nobody_uses_it() {
        let (store, members) = (store_of_nothing(), Arc::new(Members::new(members_of_nothing())));
        let session = store.sessions.insert(10, Session::new(1, SECOND * 10, Instant::now()));
        for _ in 0..2 {
            assert_eq!(session.due(), Instant::now() + SECOND * 2);
            advance(SECOND * 2).await;
            let next = start_due(&Arc::downgrade(&store), &members);
            assert_eq!((next, session.due()), (Some(Instant::now() + SECOND * 2), Instant::now() + SECOND * 2));
        }
        advance(SECOND * 100).await;
        session.set_due(Instant::now());
        start_due(&Arc::downgrade(&store), &members);
        assert!(store.sessions.all().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_keep_alive_that_fails_is_repeated_after_a_pause() {
        let (store, members) = (store_of_nothing(), Arc::new(Members::new(members_of_nothing())));
        let session = store.sessions.insert(60, Session::new(1, SECOND * 60, Instant::now()));
        keep_alive(store.clone(), members.clone(), session.clone()).await;
        assert_eq!(session.due(), Instant::now() + SECOND / 2);

        // An attempt is over when the next one is due.
        let (begun, session) = (Instant::now(), Arc::new(Session::new(2, SECOND * 10, Instant::now())));
        keep_alive(store, members, session.clone()).await;
        assert_eq!((begun.elapsed(), session.due()), (SECOND * 2, begun + SECOND * 2));
    }

    #[tokio::test]
    async fn a_keep_alive_that_is_refused_is_repeated_soon_if_the_session_is_short() {
        let refusing = Source::Endpoints(vec![refusing(Code::PermissionDenied).await], Box::default());
        let (store, members) = (store_of_nothing(), Arc::new(Members::new(refusing)));
        let session = Arc::new(Session::new(1, SECOND * 4, Instant::now()));
        session.set_due(Instant::now() + SECOND * 60);
        keep_alive(store, members, session.clone()).await;
        assert!(session.due() <= Instant::now() + SECOND / 5);
    }

    #[tokio::test]
    async fn a_session_is_kept_alive_without_calls() {
        let server = Server::alone();
        let store = store_of(EtcdStore::builder(server.endpoints()).session_ttl(SECOND * 5)).await;
        let session = store.sessions.get(&store.members(), SECOND).await.expect("a session");
        let first = session.until();
        until("it lives longer", async || session.until() > first).await;
    }

    #[tokio::test]
    async fn the_sessions_of_a_store_that_is_dropped_are_revoked_at_once() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let session = store.sessions.get(&store.members(), SECOND * 600).await.expect("a session");
        // Meanwhile the keeper has found nothing more to do.
        assert!(!is_revoked(&client, session.id).await);
        drop(store);
        until("it is revoked", async || is_revoked(&client, session.id).await).await;
    }
}
