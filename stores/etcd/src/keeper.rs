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
