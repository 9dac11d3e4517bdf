//! The claims of this process: which keys it may have in etcd, and until when. Pure but for the clock.
//!
//! A claim is noted before its first request is sent, and forgotten when its key is known to be gone. So a lost answer
//! or a dropped future leaves no key that is never removed.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::{Key, store::Token};
use tokio::{sync::Notify, time::Instant};

use crate::{
    claimed::{Claimed, Phase},
    layout::Place,
    session::Session,
};

/// When to try again to remove a key.
const REMOVE_AGAIN: Duration = Duration::from_millis(500);

/// A waiting claim that no request mentions for this long, or its ttl if that is longer, loses its place.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// A key that stays after its release until an instant, on an etcd lease of its own.
#[derive(Debug, Clone)]
pub(crate) struct Left {
    pub(crate) path: String,
    pub(crate) lease: i64,
}

/// What is to be removed now.
#[derive(Debug, Default)]
pub(crate) struct Due {
    pub(crate) claims: Vec<Claimed>,
    pub(crate) left: Vec<Left>,
    pub(crate) next: Option<Instant>,
}

/// The claims of this process.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
    /// Notified when something is due earlier than before.
    pub(crate) sooner: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    claims: HashMap<Token, Claimed>,
    /// The claims to each lease, the oldest first.
    of_key: HashMap<Key, Vec<Token>>,
    due: BinaryHeap<Reverse<(Instant, Token)>>,
    left: Vec<(Instant, Left)>,
    /// How many claims there have been.
    count: u64,
}

impl State {
    /// Returns whether this is earlier than everything else.
    fn schedule(&mut self, at: Instant, token: Token) -> bool {
        let is_sooner = self.due.peek().is_none_or(|Reverse((first, _))| at < *first);
        match self.claims.get_mut(&token) {
            Some(claimed) if claimed.scheduled.is_none_or(|it| at < it) => claimed.scheduled = Some(at),
            // It is looked at earlier, and scheduled again then.
            _ => return false,
        }
        self.due.push(Reverse((at, token)));
        is_sooner
    }

    fn remove(&mut self, token: Token) -> Option<Claimed> {
        let claimed = self.claims.remove(&token)?;
        if let Some(tokens) = self.of_key.get_mut(&claimed.place.name) {
            tokens.retain(|it| *it != token);
            if tokens.is_empty() {
                self.of_key.remove(&claimed.place.name);
            }
        }
        Some(claimed)
    }
}

impl Claims {
    /// Notes that a request to create the key of the claim is about to be sent, and returns the key.
    ///
    /// Returns `None` if the claim is being removed. When it is forgotten, its token may be used again. Its key is not,
    /// so a late request to remove it does not remove the next one.
    pub(crate) fn begin(
        &self,
        place: &Arc<Place>,
        token: Token,
        session: &Arc<Session>,
        ttl: Duration,
        record: &str,
    ) -> Option<String> {
        let until = Instant::now() + ttl;
        let mut state = self.state();
        let is_new = !state.claims.contains_key(&token);
        state.count += u64::from(is_new);
        let number = state.count;
        let claimed = state.claims.entry(token).or_insert_with(|| Claimed {
            place: place.clone(),
            token,
            path: place.path(token, number),
            session: session.clone(),
            phase: Phase::Claiming,
            record: String::new(),
            written: 0,
            doubts: Vec::new(),
            ended: false,
            stays: None,
            left_to: None,
            until,
            renewals: 0,
            ttl,
            scheduled: None,
        });
        if claimed.ended {
            return None;
        }
        let path = claimed.path.clone();
        claimed.session = session.clone();
        claimed.doubts.push(session.clone());
        (claimed.until, claimed.ttl) = (claimed.until.max(until), ttl);
        record.clone_into(&mut claimed.record);
        if is_new {
            state.of_key.entry(place.name.clone()).or_default().push(token);
        }
        let is_sooner = state.schedule(until, token);
        drop(state);
        self.notify(is_sooner);
        Some(path)
    }

    /// Notes that the key exists since this revision, or does not exist.
    ///
    /// Returns `false` if the claim was given up meanwhile.
    pub(crate) fn answered(&self, token: Token, revision: Option<i64>) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        match revision {
            None => claimed.phase = Phase::Claiming,
            Some(_) if claimed.revision() == revision => {}
            Some(revision) => {
                claimed.phase = Phase::Waiting { revision };
                claimed.written = revision;
            }
        }
        !claimed.ended
    }

    /// Notes that a request to write the key of the claim, which exists, is about to be sent.
    pub(crate) fn doubt(&self, token: Token, session: &Arc<Session>) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.doubts.push(session.clone());
        }
    }

    /// Notes that a request to write the key was executed or refused, and that nothing more will come of it.
    pub(crate) fn settled(&self, token: Token, session: &Arc<Session>) {
        if let Some(claimed) = self.state().claims.get_mut(&token)
            && let Some(at) = claimed.doubts.iter().position(|it| Arc::ptr_eq(it, session))
        {
            claimed.doubts.swap_remove(at);
        }
    }

    /// Notes that the claim holds the lease. `since`: when the request was sent.
    ///
    /// Returns `false` if the claim was given up or has expired meanwhile.
    pub(crate) fn granted(&self, token: Token, revision: i64, since: Instant) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        match &mut claimed.phase {
            Phase::Held { revision: before, .. } if *before == revision => claimed.renewals += 1,
            phase => {
                *phase = Phase::Held { revision, since };
                // A claim that waits may stay longer than a lease that is held.
                claimed.until = since + claimed.ttl;
            }
        }
        let (is_held, until) = (claimed.held_since().is_some(), claimed.until);
        let is_sooner = state.schedule(until, token);
        drop(state);
        self.notify(is_sooner);
        is_held
    }

    /// Notes that a claim with this key is sent again, and returns the key. `record` is the value that it has if the
    /// claim is granted.
    ///
    /// Returns `None` if the claim is being removed.
    pub(crate) fn again(&self, token: Token, session: &Arc<Session>, ttl: Duration, record: &str) -> Option<String> {
        let until = Instant::now() + ttl;
        let mut state = self.state();
        let claimed = state.claims.get_mut(&token).filter(|it| !it.ended)?;
        (claimed.until, claimed.ttl) = (claimed.until.max(until), ttl);
        claimed.doubts.push(session.clone());
        record.clone_into(&mut claimed.record);
        Some(claimed.path.clone())
    }

    /// Forgets a claim that was refused and left nothing behind. One that is in doubt is removed first.
    pub(crate) fn refused(&self, token: Token) {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return };
        if claimed.is_in_doubt() {
            claimed.ended = true;
            let is_sooner = state.schedule(Instant::now(), token);
            drop(state);
            self.notify(is_sooner);
        } else {
            state.remove(token);
        }
    }

    pub(crate) fn get(&self, token: Token) -> Option<Claimed> {
        self.state().claims.get(&token).cloned()
    }

    /// Ends the claim and returns what it was. If its key is not removed soon, it is removed in the background.
    pub(crate) fn end(&self, token: Token) -> Option<Claimed> {
        let mut state = self.state();
        let claimed = state.claims.get_mut(&token)?;
        let before = claimed.clone();
        claimed.ended = true;
        // Also if it was to be looked at earlier: the caller's request comes first.
        claimed.scheduled = None;
        let is_sooner = state.schedule(Instant::now() + REMOVE_AGAIN * 4, token);
        drop(state);
        self.notify(is_sooner);
        Some(before)
    }

    /// Notes that the key is to stay after the release until an instant. If that is not done soon, it is done in the
    /// background.
    pub(crate) fn stay(&self, token: Token, until: Instant) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.stays = Some(until);
        }
    }

    /// Notes that the key stays after the release, on this etcd lease, until an instant.
    pub(crate) fn leave(&self, token: Token, lease: i64, until: Instant) {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return };
        claimed.left_to = Some(lease);
        let left = Left { path: claimed.path.clone(), lease };
        state.left.push((until, left));
        drop(state);
        self.notify(true);
    }

    /// The key of the claim is gone.
    pub(crate) fn forget(&self, token: Token) {
        self.state().remove(token);
    }

    /// Notes a renewal of a held lease.
    pub(crate) fn renewed(&self, token: Token, until: Instant) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        if claimed.held_since().is_none() {
            return false;
        }
        claimed.until = claimed.until.max(until);
        claimed.renewals += 1;
        true
    }

    /// Notes that the key of a held lease was written at this revision, and is on this etcd lease.
    pub(crate) fn moved(&self, token: Token, session: &Arc<Session>, revision: i64) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.session = session.clone();
            claimed.written = revision;
        }
    }

    /// Notes the revision at which the key was last written.
    pub(crate) fn written(&self, token: Token, revision: i64) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.written = revision;
        }
    }

    /// Notes the value that the key of a held lease has, and the ttl in it.
    pub(crate) fn recorded(&self, token: Token, record: String, ttl: Duration) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            (claimed.record, claimed.ttl) = (record, ttl);
        }
    }

    /// Notes that a caller waits for the lease, so its waiting claims keep their places. Not the one whose key is
    /// `before` others: only its own requests keep it, so that it does not block the others if none come.
    pub(crate) fn touch(&self, key: &Key, before: &[u8]) {
        let now = Instant::now();
        let mut state = self.state();
        let State { claims, of_key, .. } = &mut *state;
        for token in of_key.get(key).into_iter().flatten() {
            if let Some(claimed) = claims.get_mut(token)
                && !claimed.ended
                && claimed.path.as_bytes() != before
                && matches!(claimed.phase, Phase::Waiting { .. })
            {
                claimed.until = claimed.until.max(now + claimed.ttl.max(FORGOTTEN));
            }
        }
    }

    /// The revision of the only waiting claim to this lease. `None` if there is none, or more than one.
    pub(crate) fn waiting(&self, key: &Key) -> Option<i64> {
        let state = self.state();
        let tokens = state.of_key.get(key).into_iter().flatten();
        let mut waiting = tokens.filter_map(|token| match state.claims.get(token)? {
            Claimed { phase: Phase::Waiting { revision }, ended: false, .. } => Some(*revision),
            _ => None,
        });
        waiting.next().filter(|_| waiting.next().is_none())
    }

    /// Whether any claim is on this etcd lease.
    pub(crate) fn use_session(&self, session: i64) -> bool {
        let uses = |it: &Claimed| it.session.id == session || it.doubts.iter().any(|it| it.id == session);
        self.state().claims.values().any(uses)
    }

    /// Takes what is to be removed now. It is due again a little later, until it is forgotten.
    pub(crate) fn take_due(&self) -> Due {
        let now = Instant::now();
        let mut state = self.state();
        let mut due = Due::default();
        while let Some(Reverse((at, token))) = state.due.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            state.due.pop();
            let Some(claimed) = state.claims.get_mut(&token).filter(|it| it.scheduled == Some(at)) else { continue };
            claimed.scheduled = None;
            let next = if !claimed.ended && claimed.until > now {
                claimed.until
            } else {
                claimed.ended = true;
                due.claims.push(claimed.clone());
                now + REMOVE_AGAIN
            };
            state.schedule(next, token);
        }
        due.left = state.left.extract_if(.., |(until, _)| *until <= now).map(|(_, left)| left).collect();
        let next = state.due.peek().map(|Reverse((at, _))| *at);
        due.next = next.into_iter().chain(state.left.iter().map(|(until, _)| *until)).min();
        due
    }

    fn notify(&self, is_sooner: bool) {
        if is_sooner {
            self.sooner.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
