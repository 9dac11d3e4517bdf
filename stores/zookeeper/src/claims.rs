//! The claims of this process: which places they have in the queues, and until when each lease is held. Sends nothing.

use std::{collections::HashMap, sync::Arc, time::Duration};

use lockkit::{
    Fence, Key,
    store::{Claim, Token},
};
use tokio::{sync::Mutex as Turn, task::JoinHandle, time::Instant};

use crate::{
    child::Child,
    claimed::{Claimed, Held, Phase, Task, UNKNOWN, Waiting},
    layout::Place,
    note::Last,
    remove::Stray,
};

/// The claims of the current session, by their tokens.
#[derive(Debug, Default)]
pub(crate) struct Claims(HashMap<Token, Claimed>);

/// The child of a lease that is renewed.
#[derive(Debug)]
pub(crate) struct Renewed {
    pub(crate) session: u64,
    pub(crate) path: String,
    /// What the child is to show from now on, if its ttl has changed.
    pub(crate) child: Option<Child>,
}

impl Claims {
    /// The turn of the claim, which is made if it is new.
    pub(crate) fn turn_of(&mut self, claim: &Claim, dir: &str, session: u64) -> Arc<Turn<()>> {
        let new = || Claimed {
            key: claim.key.clone(),
            dir: dir.to_owned(),
            holder: claim.holder.clone(),
            session,
            turn: Arc::default(),
            phase: Phase::Claiming,
            task: None,
        };
        self.0.entry(claim.token).or_insert_with(new).turn.clone()
    }

    /// Whether the claim is still the one with this turn.
    pub(crate) fn is_turn_of(&self, token: Token, turn: &Arc<Turn<()>>) -> bool {
        self.turn(token).is_some_and(|it| Arc::ptr_eq(&it, turn))
    }

    pub(crate) fn turn(&self, token: Token) -> Option<Arc<Turn<()>>> {
        Some(self.0.get(&token)?.turn.clone())
    }

    pub(crate) fn get(&self, token: Token) -> Option<&Claimed> {
        self.0.get(&token)
    }

    /// Sets the phase. Returns `false` if the claim has ended.
    pub(crate) fn set(&mut self, token: Token, phase: Phase) -> bool {
        self.0.get_mut(&token).map(|it| it.phase = phase).is_some()
    }

    /// Replaces the task of the claim. The task before is stopped.
    pub(crate) fn set_task<T>(&mut self, token: Token, task: &JoinHandle<T>) {
        let task = Task::of(task);
        if let Some(claimed) = self.0.get_mut(&token) {
            claimed.task = Some(task);
        }
    }

    /// The note of the holder was written, with this version.
    pub(crate) fn noted(&mut self, token: Token, version: i32) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token)
            && held.note == Some(UNKNOWN)
        {
            held.note = Some(version);
        }
    }

    pub(crate) fn remove(&mut self, token: Token) -> Option<Claimed> {
        self.0.remove(&token)
    }

    /// Keeps the child of a released lease until then, for the token of nobody.
    pub(crate) fn keep_for_nobody(&mut self, from: Token, nobody: Token, until: Instant, ttl: Duration, held: Held) {
        if let Some(mut claimed) = self.0.remove(&from) {
            claimed.phase = Phase::Held(Held { until, ttl, shown_ttl: ttl, renewals: 0, ..held });
            (claimed.holder, claimed.task) = ("".into(), None);
            self.0.insert(nobody, claimed);
        }
    }

    /// When the held lease is over. `None` if it is not held in this session.
    pub(crate) fn until(&self, token: Token, session: u64) -> Option<Instant> {
        match self.0.get(&token)? {
            Claimed { phase: Phase::Held(held), session: own, .. } if *own == session => Some(held.until),
            _ => None,
        }
    }

    /// The fence of the held lease.
    pub(crate) fn held_fence(&self, token: Token) -> Option<Fence> {
        match &self.0.get(&token)?.phase {
            Phase::Held(held) => Some(held.fence),
            _ => None,
        }
    }

    /// Makes a held lease live for at least this long from now, unless it is over.
    pub(crate) fn prolong(&mut self, token: Token, ttl: Duration) -> Option<Renewed> {
        let now = Instant::now();
        let claimed = self.0.get_mut(&token)?;
        let Phase::Held(held) = &mut claimed.phase else { return None };
        if held.until <= now {
            return None;
        }
        let until = now + ttl;
        if until > held.until {
            (held.until, held.ttl) = (until, ttl);
        }
        let ttl = held.ttl;
        let child = (ttl != held.shown_ttl).then(|| Child { token, ttl, holder: claimed.holder.to_string() });
        Some(Renewed { session: claimed.session, path: format!("{}/{}", claimed.dir, held.place.name), child })
    }

    pub(crate) fn count_renewal(&mut self, token: Token) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.renewals += 1;
        }
    }

    /// Notes the ttl that the child of the held lease shows.
    pub(crate) fn shows(&mut self, token: Token, ttl: Duration) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.shown_ttl = ttl;
        }
    }

    /// Ends a held lease. With `only_if_over`, only after its ttl. Returns what it was.
    pub(crate) fn end(&mut self, token: Token, only_if_over: bool) -> Option<(String, Held, Last)> {
        let claimed = self.0.get_mut(&token)?;
        let Phase::Held(held) = &claimed.phase else { return None };
        if only_if_over && held.until > Instant::now() {
            return None;
        }
        let held = held.clone();
        let last = Last { token, fence: held.fence, holder: claimed.holder.to_string() };
        claimed.phase = Phase::Ending(held.clone());
        Some((claimed.dir.clone(), held, last))
    }

    /// The places of the key in the queue.
    pub(crate) fn waiting<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = &'a Waiting> {
        self.0.values().filter(move |it| it.key == *key).filter_map(|claim| match &claim.phase {
            Phase::Waiting(waiting) => Some(waiting),
            _ => None,
        })
    }

    /// The claim of the key with this child.
    pub(crate) fn with_child(&self, key: &str, child: &Place) -> Option<(Token, &Claimed)> {
        let is_child = |it: &Claimed| {
            *it.key == *key
                && match &it.phase {
                    Phase::Claiming => false,
                    Phase::Waiting(Waiting { place, .. })
                    | Phase::Held(Held { place, .. })
                    | Phase::Ending(Held { place, .. }) => place == child,
                }
        };
        // The name has the token, unless the key stays taken after a release.
        let by_token = child.token().and_then(|it| self.0.get_key_value(&it));
        let named = by_token.filter(|(_, it)| is_child(it));
        let found = named.or_else(|| self.0.iter().filter(|(token, _)| token.is_nobody()).find(|(_, it)| is_child(it)));
        found.map(|(token, claimed)| (*token, claimed))
    }

    /// Ends all claims, because their session has ended. Returns the children that may be left. Those of held leases
    /// are trusted for so long at most.
    pub(crate) fn end_all(&mut self, trusted: Duration) -> Vec<Stray> {
        let now = Instant::now();
        let left = |(token, claimed): (Token, Claimed)| {
            let (name, trusted_until) = match claimed.phase {
                Phase::Claiming => (None, now),
                Phase::Waiting(Waiting { place, .. }) | Phase::Ending(Held { place, .. }) => (Some(place.name), now),
                Phase::Held(Held { place, until, .. }) => (Some(place.name), until.min(now + trusted)),
            };
            Stray { dir: claimed.dir, name, token, trusted_until }
        };
        self.0.drain().map(left).collect()
    }
}
