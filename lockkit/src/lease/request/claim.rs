//! One attempt at the store: the claims of a request, sent by a separate task.
//!
//! A claim runs in a task, so it is answered even if the caller is gone; the task then releases the lease like any
//! dropped one. This does not require the driver to be cancel-safe. A refusal is an answer, so its token is safe to
//! send again, which keeps the place in a store with a queue (`profile().queues`). After silence the claim is given
//! back in the background, and a release by that token must not free the next grant: the next claim has a new token. A
//! request for several keys never queues in the store: it would keep a place at one key while it waits for another.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use crate::lease::inner::Inner;
use crate::{
    body::{
        guard::{Guard, Hold},
        task::finished,
    },
    lease::{
        bounded::{limit_for, retry_pause},
        held::Lease,
        life::{
            keeper::Unfinished,
            kept::{Kept, Terms},
        },
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseStore, Release},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
        token::Token,
    },
};

/// The result of an attempt.
#[derive(Debug)]
pub(super) enum Attempt<S: LeaseStore> {
    /// All leases, in the order of the claims.
    Granted(Vec<Lease<S>>),
    /// Another holder has the lease of this key. Nothing was taken.
    Held {
        key: Key,
        free_in: Option<Duration>,
        /// The claim to send again, if it has a place in the store's queue.
        queued: Option<Guard<Unheard<S>>>,
    },
    /// No answer came.
    Silent,
}

/// Sends the claims, which are in the order of their keys. `queued` is the only one of them, if it was sent before.
///
/// A separate task sends them, so the answer is received even if the caller is dropped. A lease that the caller does
/// not take from the task is dropped with the task's result, and so released.
pub(super) async fn attempt<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    claims: Vec<Claim>,
    queued: Option<Guard<Unheard<S>>>,
    terms: Terms,
) -> Result<Attempt<S>> {
    // Before the check, so that `close` waits for a claim that passes it.
    let unfinished = inner.keeper.unfinished();
    if inner.keeper.is_closed() {
        return Err(Error::Closed { key: joined(claims.iter().map(|it| &it.key)) });
    }
    let sending = tokio::spawn(async move {
        let _unfinished = unfinished;
        let sent = Instant::now();
        // Some claims may be granted even if no answer arrives.
        let mut unheard: Vec<_> = claims.iter().map(|it| Unheard::new(inner.clone(), it.clone())).collect();
        let had_place = queued.is_some();
        settle(queued);
        let answer = send(&inner, &claims).await;
        // A refusal leaves nothing behind, unless the claim had a place before.
        if !is_heard(&answer, claims.len() == 1) || had_place && answer.is_err() {
            return answer.map(|_| Attempt::Silent);
        }
        if let Ok(Some(AcquiredAll::Held { key, free_in })) = answer {
            // A claim that queues is the only one of its request.
            let queued = if claims.iter().any(|it| it.queue) { unheard.pop() } else { None };
            settle(unheard);
            return Ok(Attempt::Held { key, free_in, queued });
        }
        settle(unheard);
        match answer? {
            Some(AcquiredAll::Granted(grants)) => {
                // All leases are built before the first error returns, so that each of them is released.
                let leases: Vec<_> = claims
                    .into_iter()
                    .zip(grants)
                    .map(|(claim, grant)| Lease::granted(inner.clone(), Kept::new(claim, grant, sent, terms.clone())))
                    .collect();
                let leases = leases.into_iter().collect::<Result<Vec<_>>>()?;
                // If the answer took longer than the leases live, they are not granted, and no answer is known.
                Ok(if leases.iter().all(Lease::is_trusted) { Attempt::Granted(leases) } else { Attempt::Silent })
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

/// The combined name of several keys.
pub(super) fn joined<'k>(keys: impl IntoIterator<Item = &'k Key>) -> Key {
    keys.into_iter().map(Key::as_str).collect::<Vec<_>>().join(" + ").into()
}

/// A claim without an answer so far, or one with a place in the store's own queue. On drop it is released in the
/// background, on another runtime if the first one ends.
pub(super) struct Unheard<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    claim: Claim,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
}

/// The claims need no release: they were answered, or are sent again.
fn settle<S: LeaseStore>(claims: impl IntoIterator<Item = Guard<Unheard<S>>>) {
    for claim in claims {
        drop(claim.defuse());
    }
}

/// Whether the answer settles the claims, so that no unreported grant can be left to release. `is_one`: it is a single
/// claim.
fn is_heard<T>(answer: &Result<Option<T>>, is_one: bool) -> bool {
    // The statement was refused: the table is missing, the database cannot store a character of the key, or another
    // transaction has what the statement needs.
    let is_refused = |err: &Error| match err {
        Error::NotMigrated { .. } | Error::InvalidKey { .. } => true,
        Error::Database { fault, .. } => *fault == Fault::Encoding || is_one && fault.is_of_the_moment(),
        _ => false,
    };
    match answer {
        Ok(heard) => heard.is_some(),
        Err(err) => is_refused(err),
    }
}

impl<S: LeaseStore> Unheard<S> {
    pub(super) fn token(&self) -> Token {
        self.claim.token
    }

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
            inner.queues.freed(&release.key);
            drop(unheard.defuse());
        });
    }
}
