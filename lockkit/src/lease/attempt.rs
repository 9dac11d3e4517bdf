//! One question to the store: the claims of a request, sent by a task of its own.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::Inner;
use crate::{
    error::{Error, Fault, Result},
    guard::{Guard, Hold},
    key::Key,
    lease::{
        bounded::limit_for,
        ending::retry_pause,
        held::Lease,
        keeper::Unfinished,
        kept::{Kept, Terms},
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseStore, Release, Token},
    },
    task::finished,
};

/// The answer to claims.
#[derive(Debug)]
pub(super) enum Attempt<S: LeaseStore> {
    /// All of the leases, in the order of the claims.
    Granted(Vec<Lease<S>>),
    /// Somebody else holds the lease of this key, and nothing was taken.
    Held {
        key: Key,
        free_in: Option<Duration>,
        /// The claims, to be sent again. None where an answer came too late.
        claims: Vec<Waiting<S>>,
    },
    /// No answer came.
    Silent,
}

/// A claim that was answered: somebody else holds its lease. It keeps its token until the wait ends, so that a store with a queue
/// of its own keeps its place.
#[derive(Debug)]
pub(super) struct Waiting<S: LeaseStore> {
    pub(super) key: Key,
    pub(super) token: Token,
    /// Gives the place in the store's queue back.
    place: Option<Guard<Unheard<S>>>,
}

/// Sends claims that are in the order of their keys; some may have been sent before.
///
/// A task sends them: should the caller be dropped, the task still hears the answer. A lease that nobody takes from the task is
/// dropped with its result, and so released.
pub(super) async fn attempt<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    claims: Vec<Claim>,
    before: Vec<Waiting<S>>,
    terms: Terms,
) -> Result<Attempt<S>> {
    if inner.keeper.is_closed() {
        return Err(Error::Closed { key: joined(claims.iter().map(|it| &it.key)) });
    }
    let unfinished = inner.keeper.unfinished();
    let sending = tokio::spawn(async move {
        let _unfinished = unfinished;
        let sent = Instant::now();
        // Some may have been granted even if no answer comes.
        let unheard: Vec<_> = claims.iter().map(|it| Unheard::new(inner.clone(), it.clone())).collect();
        for it in before.into_iter().filter_map(|it| it.place) {
            drop(it.defuse());
        }
        let answer = send(&inner, &claims).await;
        if !is_heard(&answer) {
            return answer.map(|_| Attempt::Silent);
        }
        if let Ok(Some(AcquiredAll::Held { key, free_in })) = answer {
            let waiting = |unheard: Guard<Unheard<S>>| {
                let Claim { key, token, queue, .. } = unheard.claim.clone();
                let place = if queue {
                    Some(unheard)
                } else {
                    drop(unheard.defuse());
                    None
                };
                Waiting { key, token, place }
            };
            return Ok(Attempt::Held { key, free_in, claims: unheard.into_iter().map(waiting).collect() });
        }
        for it in unheard {
            drop(it.defuse());
        }
        match answer? {
            Some(AcquiredAll::Granted(grants)) => {
                // All of them, before the first error: each lease gives itself back.
                let leases: Vec<_> = claims
                    .into_iter()
                    .zip(grants)
                    .map(|(claim, grant)| Lease::granted(inner.clone(), Kept::new(claim, grant, sent, terms.clone())))
                    .collect();
                let leases = leases.into_iter().collect::<Result<Vec<_>>>()?;
                // An answer that took longer than the leases live is no lease.
                Ok(match leases.iter().find(|it| !it.is_trusted()) {
                    None => Attempt::Granted(leases),
                    Some(late) => Attempt::Held { key: late.key().clone(), free_in: None, claims: Vec::new() },
                })
            }
            Some(AcquiredAll::Held { .. }) | None => Ok(Attempt::Silent),
        }
    });
    finished("acquiring lease", sending).await
}

async fn send<S: LeaseStore>(inner: &Inner<S>, claims: &[Claim]) -> Result<Option<AcquiredAll>> {
    let [claim] = claims else {
        return inner.store().acquire_all(claims).await;
    };
    Ok(inner.store().acquire(claim).await?.map(|it| match it {
        Acquired::Granted(grant) => AcquiredAll::Granted(vec![grant]),
        Acquired::Held { free_in } => AcquiredAll::Held { key: claim.key.clone(), free_in },
    }))
}

/// The name of several keys together.
pub(super) fn joined<'k>(keys: impl IntoIterator<Item = &'k Key>) -> Key {
    keys.into_iter().map(Key::as_str).collect::<Vec<_>>().join(" + ").into()
}

/// A claim whose answer was not heard yet, or that has a place in the store's own queue. Dropped, it is given back in the background;
/// on another runtime if the first one ends.
pub(super) struct Unheard<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    claim: Claim,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
}

/// Whether the answer to a claim leaves nothing to give back but what it says.
fn is_heard<T>(answer: &Result<Option<T>>) -> bool {
    // The statement was refused: no table; a character that the database does not have.
    let is_refused = |err: &Error| match err {
        Error::NotMigrated { .. } | Error::InvalidKey { .. } => true,
        Error::Database { fault, .. } => *fault == Fault::Encoding,
        _ => false,
    };
    match answer {
        Ok(heard) => heard.is_some(),
        Err(err) => is_refused(err),
    }
}

impl<S: LeaseStore> Unheard<S> {
    fn new(inner: Arc<Inner<S>>, claim: Claim) -> Guard<Self> {
        let unfinished = inner.keeper.unfinished();
        Guard::new(Self { inner, claim, unfinished, tried: Vec::new() })
    }
}

impl<S: LeaseStore> Hold for Unheard<S> {
    fn abandon(self) {
        let Self { inner, claim, unfinished, mut tried } = self;
        let Some(runtime) = inner.keeper.runtime(&tried) else { return };
        tried.push(runtime.id());
        let unheard = Guard::new(Self { inner: inner.clone(), claim: claim.clone(), unfinished, tried });
        runtime.spawn(async move {
            let Claim { key, token, ttl, .. } = claim;
            let expired = Instant::now() + ttl;
            let release = Release { key, token, min_hold: Duration::ZERO };
            while !matches!(inner.store().release(&release, limit_for(ttl)).await, Ok(Answer::Done | Answer::Gone))
                && Instant::now() < expired
            {
                sleep(retry_pause(ttl)).await;
            }
            inner.lines.freed(&release.key);
            drop(unheard.defuse());
        });
    }
}
