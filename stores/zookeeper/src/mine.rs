//! The claims of this process: where each stands, and until when it is kept. Asks nothing.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit::{
    Fence, Key,
    store::{Claim, Token},
};
use tokio::{
    sync::{Mutex as Turn, watch},
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use crate::{
    child::Child,
    layout::Place,
    note::{Last, Note},
    remove::Stray,
};

/// The claims of the current session, by their tokens.
#[derive(Debug, Default)]
pub(crate) struct Mines(HashMap<Token, Mine>);

/// One claim of this process.
#[derive(Debug)]
pub(crate) struct Mine {
    pub(crate) key: Key,
    /// The path of the key's node.
    pub(crate) dir: String,
    pub(crate) holder: Arc<str>,
    /// The session that it belongs to.
    pub(crate) link: u64,
    /// Held by the call that changes the claim: one at a time.
    turn: Arc<Turn<()>>,
    pub(crate) phase: Phase,
    /// Keeps the place or the ttl. Ends with the claim.
    task: Option<Task>,
}

/// A task that is stopped when this is dropped.
#[derive(Debug)]
pub(crate) struct Task(AbortHandle);

impl Task {
    pub(crate) fn of<T>(task: &JoinHandle<T>) -> Self {
        Self(task.abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where a claim stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// It has no child so far, or none that is known.
    Claiming,
    /// It has a place in the queue.
    Waiting(Waiting),
    /// It holds the lease.
    Held(Held),
    /// Its child is being deleted. It is no longer renewed.
    Ending(Held),
}

/// A place in the queue.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) place: Place,
    pub(crate) fence: Fence,
    /// The server's time at the creation, in milliseconds.
    pub(crate) ctime: i64,
    pub(crate) created: Instant,
    pub(crate) ttl: Duration,
    /// Whether the place is the first of the queue. Closed when the place is given up.
    pub(crate) called: watch::Sender<bool>,
}

/// A granted lease.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) place: Place,
    pub(crate) fence: Fence,
    pub(crate) acquired_at: SystemTime,
    pub(crate) granted: Instant,
    pub(crate) until: Instant,
    pub(crate) ttl: Duration,
    /// The ttl that its child shows to others.
    pub(crate) shown_ttl: Duration,
    pub(crate) renewals: u64,
    /// The version of the note of this holder, or [`UNKNOWN`]. `None` for a node without a note.
    pub(crate) note: Option<i32>,
}

/// No node has this version: the end of the lease reads the note before it replaces it. A version that was only expected may be
/// that of the data of another owner.
pub(crate) const UNKNOWN: i32 = -2;

impl Held {
    /// The note that the end of the lease leaves, and the version of the one that it replaces. `None` for a node
    /// without a note.
    pub(crate) fn replaced_by<'n>(&self, note: &'n Note) -> Option<(&'n Note, i32)> {
        self.note.map(|version| (note, version))
    }
}

/// The child of a lease that is renewed.
#[derive(Debug)]
pub(crate) struct Renewed {
    pub(crate) link: u64,
    pub(crate) path: String,
    /// What the child is to show from now on, if its ttl has changed.
    pub(crate) child: Option<Child>,
}

impl Mines {
    /// The turn of the claim, which is made if it is new.
    pub(crate) fn turn_of(&mut self, claim: &Claim, dir: &str, link: u64) -> Arc<Turn<()>> {
        let new = || Mine {
            key: claim.key.clone(),
            dir: dir.to_owned(),
            holder: claim.holder.clone(),
            link,
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

    pub(crate) fn get(&self, token: Token) -> Option<&Mine> {
        self.0.get(&token)
    }

    /// Sets the phase. Returns `false` if the claim has ended.
    pub(crate) fn set(&mut self, token: Token, phase: Phase) -> bool {
        self.0.get_mut(&token).map(|it| it.phase = phase).is_some()
    }

    /// Replaces the task of the claim. The task before is stopped.
    pub(crate) fn set_task<T>(&mut self, token: Token, task: &JoinHandle<T>) {
        let task = Task::of(task);
        if let Some(mine) = self.0.get_mut(&token) {
            mine.task = Some(task);
        }
    }

    /// The note of the holder was written, with this version.
    pub(crate) fn noted(&mut self, token: Token, version: i32) {
        if let Some(Mine { phase: Phase::Held(held), .. }) = self.0.get_mut(&token)
            && held.note == Some(UNKNOWN)
        {
            held.note = Some(version);
        }
    }

    pub(crate) fn remove(&mut self, token: Token) -> Option<Mine> {
        self.0.remove(&token)
    }

    /// Keeps the child of a released lease until then, for the token of nobody.
    pub(crate) fn keep_for_nobody(&mut self, from: Token, nobody: Token, until: Instant, ttl: Duration, held: Held) {
        if let Some(mut mine) = self.0.remove(&from) {
            mine.phase = Phase::Held(Held { until, ttl, shown_ttl: ttl, renewals: 0, ..held });
            (mine.holder, mine.task) = ("".into(), None);
            self.0.insert(nobody, mine);
        }
    }

    /// When the held lease is over. `None` if it is not held in this session.
    pub(crate) fn until(&self, token: Token, link: u64) -> Option<Instant> {
        match self.0.get(&token)? {
            Mine { phase: Phase::Held(held), link: own, .. } if *own == link => Some(held.until),
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
        let mine = self.0.get_mut(&token)?;
        let Phase::Held(held) = &mut mine.phase else { return None };
        if held.until <= now {
            return None;
        }
        let until = now + ttl;
        if until > held.until {
            (held.until, held.ttl) = (until, ttl);
        }
        let ttl = held.ttl;
        let child = (ttl != held.shown_ttl).then(|| Child { token, ttl, holder: mine.holder.to_string() });
        Some(Renewed { link: mine.link, path: format!("{}/{}", mine.dir, held.place.name), child })
    }

    pub(crate) fn count_renewal(&mut self, token: Token) {
        if let Some(Mine { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.renewals += 1;
        }
    }

    /// Notes the ttl that the child of the held lease shows.
    pub(crate) fn shows(&mut self, token: Token, ttl: Duration) {
        if let Some(Mine { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.shown_ttl = ttl;
        }
    }

    /// Ends a held lease. With `only_if_over`, only after its ttl. Returns what it was.
    pub(crate) fn end(&mut self, token: Token, only_if_over: bool) -> Option<(String, Held, Last)> {
        let mine = self.0.get_mut(&token)?;
        let Phase::Held(held) = &mine.phase else { return None };
        if only_if_over && held.until > Instant::now() {
            return None;
        }
        let held = held.clone();
        let last = Last { token, fence: held.fence, holder: mine.holder.to_string() };
        mine.phase = Phase::Ending(held.clone());
        Some((mine.dir.clone(), held, last))
    }

    /// The places of the key in the queue.
    pub(crate) fn waiting<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = &'a Waiting> {
        self.0.values().filter(move |it| it.key == *key).filter_map(|it| match &it.phase {
            Phase::Waiting(waiting) => Some(waiting),
            _ => None,
        })
    }

    /// The claim of the key with this child.
    pub(crate) fn with_child(&self, key: &str, child: &Place) -> Option<(Token, &Mine)> {
        let is_child = |it: &Mine| {
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
        found.map(|(token, mine)| (*token, mine))
    }

    /// Ends all claims, because their session has ended. Returns the children that may be left. Those of held leases
    /// are trusted for so long at most.
    pub(crate) fn end_all(&mut self, trusted: Duration) -> Vec<Stray> {
        let now = Instant::now();
        let left = |(token, mine): (Token, Mine)| {
            let (name, trusted_until) = match mine.phase {
                Phase::Claiming => (None, now),
                Phase::Waiting(Waiting { place, .. }) | Phase::Ending(Held { place, .. }) => (Some(place.name), now),
                Phase::Held(Held { place, until, .. }) => (Some(place.name), until.min(now + trusted)),
            };
            Stray { dir: mine.dir, name, token, trusted_until }
        };
        self.0.drain().map(left).collect()
    }
}
