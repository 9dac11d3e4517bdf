//! What the viewers see: reads of the leases that all of them share, and the part of them that one viewer asks for.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::join;
use lockkit::{
    Error, Fence, Key, LeaseStore, Leases,
    store::{LeaseInfo, Previous},
};
use lockkit_inspect::{waited_for, with_causes};
use serde::Serialize;
use tokio::{sync, time::Instant};

use crate::{
    history::{End, History, Hold, SPAN},
    sessions::{Database, Sessions},
};

/// How long before a viewer asks its read may have begun. A little less than the pause between two of its requests.
const FRESH: Duration = Duration::from_millis(900);

/// The most rows that a viewer gets, beside those of leases whose holder died.
const ROWS: usize = 200;

/// The most rows of leases whose holder died.
const DIED: usize = 50;

/// The leases as they were read last, and what happened before.
#[derive(Debug)]
pub(crate) struct Looks<S: LeaseStore> {
    leases: Leases<S>,
    database: Option<Database>,
    started: Instant,
    /// Only one viewer reads at a time.
    turn: sync::Mutex<()>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// When the last read was begun.
    looked: Option<Duration>,
    /// When it ended.
    at: Duration,
    /// Why it failed.
    problem: Option<String>,
    held: BTreeMap<Key, LeaseInfo>,
    /// Those that have expired without a release, and that nobody has taken since. On a store that forgets them, none.
    died: BTreeMap<Key, Previous>,
    /// The number of requests of processes that have waited for a key for 50 ms. Each has a ticket, a lease beside that
    /// of the key.
    waiting: BTreeMap<Key, usize>,
    /// `None` if no database is to be asked.
    sessions: Option<Sessions>,
    history: History,
}

/// What one viewer sees. Times are milliseconds, and count from the same moment as `now`.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    now: u64,
    /// How long the lanes go back.
    span: u64,
    pub(crate) held: usize,
    pub(crate) waiting: usize,
    pub(crate) died: usize,
    /// How many rows there are beside those that are shown.
    pub(crate) more: usize,
    /// In the order of their keys, those whose holder died last.
    pub(crate) rows: Vec<Row>,
    /// Who waits for whom in the database, if the application has named it.
    pub(crate) sessions: Option<Sessions>,
}

/// One key.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) key: String,
    pub(crate) state: State,
    pub(crate) holder: String,
    /// As text, because JavaScript's numbers end at 2^53.
    pub(crate) fence: String,
    /// How long it is or was held, if that is known.
    pub(crate) held: Option<u64>,
    /// How long it has still to live, or how long ago it ended.
    pub(crate) left: u64,
    pub(crate) ttl: u64,
    pub(crate) renewals: u64,
    pub(crate) waiting: usize,
    pub(crate) here: bool,
    /// Why it cannot be read, in the state `Unreadable`.
    pub(crate) flaw: Option<&'static str>,
    lane: Vec<Piece>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// lockkit has not written it so.
    Unreadable,
    Held,
    /// Released, and taken until its minimum hold has passed.
    Kept,
    Free,
    Died,
}

/// One holder in a lane.
#[derive(Debug, Serialize)]
struct Piece {
    from: u64,
    to: u64,
    fence: String,
    holder: String,
    end: &'static str,
}

impl<S: LeaseStore> Looks<S> {
    pub(crate) fn at(leases: Leases<S>, database: Option<Database>) -> Self {
        Self { leases, database, started: Instant::now(), turn: sync::Mutex::default(), seen: Mutex::default() }
    }

    /// The keys whose name or holder contains this text, after a new read of the leases if the last one is old. An
    /// error is a text for the operator.
    pub(crate) async fn view(&self, contains: &str) -> Result<View, String> {
        let since = self.now().saturating_sub(FRESH);
        if !self.has_looked(since) {
            let _turn = self.turn.lock().await;
            // Another viewer may have read meanwhile, however long that took.
            if !self.has_looked(since) {
                self.look().await;
            }
        }
        let seen = self.seen();
        match &seen.problem {
            Some(problem) => Err(problem.clone()),
            None => Ok(seen.view(contains)),
        }
    }

    fn has_looked(&self, since: Duration) -> bool {
        self.seen().looked.is_some_and(|it| it > since)
    }

    async fn look(&self) {
        let begun = self.now();
        let sessions = async { Some(self.database.as_ref()?.sessions().await) };
        let read = async {
            // In this order, a lease that expires in between is in both.
            let held = self.leases.list("").await?;
            Ok::<_, Error>((held, self.leases.expired("").await?))
        };
        let (read, sessions) = join(read, sessions).await;
        let mut seen = self.seen();
        seen.sessions = sessions;
        (seen.looked, seen.at) = (Some(begun), self.now());
        match read {
            Ok((held, died)) => seen.add(held, died),
            Err(err) => seen.problem = Some(with_causes(&err)),
        }
    }

    /// Takes the lease from the holder with this fence. `None` if that holder does not have it.
    pub(crate) async fn steal(&self, key: &str, fence: Fence) -> Result<Option<LeaseInfo>, Error> {
        let stolen = self.leases.steal_if(key, fence).await?;
        if let Some(lease) = &stolen {
            let mut seen = self.seen();
            seen.history.stolen(self.now(), lease);
            seen.held.remove(&lease.key);
        }
        Ok(stolen)
    }

    fn now(&self) -> Duration {
        self.started.elapsed() + SPAN
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn add(&mut self, leases: Vec<LeaseInfo>, died: Vec<(Key, Previous)>) {
        self.problem = None;
        self.waiting.clear();
        self.held.clear();
        for lease in leases {
            match waited_for(&lease.key) {
                Some(key) => *self.waiting.entry(Key::from(key)).or_default() += 1,
                None => _ = self.held.insert(lease.key.clone(), lease),
            }
        }
        let is_lease = |key: &Key| !self.held.contains_key(key) && waited_for(key).is_none();
        self.died = died.into_iter().filter(|(key, _)| is_lease(key)).collect();
        self.history.saw(self.at, self.held.values());
        self.history.died(self.at, &self.died);
    }

    fn view(&self, contains: &str) -> View {
        let held = self.held.iter().map(|(key, lease)| (key, Of::Held(lease)));
        let died = self.died.iter().map(|(key, died)| (key, Of::Died(died)));
        let gone =
            self.history.lanes().filter(|(key, _)| !self.held.contains_key(*key) && !self.died.contains_key(*key));
        let gone = gone.filter_map(|(key, holds)| Some((key, Of::Gone(holds.last()?))));
        let found = held.chain(died).chain(gone);
        let found = found.filter(|(key, of)| key.contains(contains) || of.holder().contains(contains));
        let found: Vec<_> = found.map(|(key, of)| (of.state(), key, of)).collect();
        let count = |state| found.iter().filter(|it| it.0 == state).count();
        let held = count(State::Held) + count(State::Kept) + count(State::Unreadable);
        let died = count(State::Died);
        let waiting = found.iter().map(|(_, key, _)| self.waiting(key)).sum();
        let all = found.len();
        let (mut dead, mut shown): (Vec<_>, Vec<_>) = found.into_iter().partition(|it| it.0 == State::Died);
        // If there is not room for all, what is free is left out first, and the deaths that are the longest ago.
        shown.sort_by_key(|(state, key, _)| (*state, *key));
        shown.truncate(ROWS);
        dead.sort_by_key(|(_, _, of)| self.left(*of));
        dead.truncate(DIED);
        shown.append(&mut dead);
        // In the order of the keys, so that a row does not move when its state changes.
        shown.sort_by_key(|(state, key, _)| (*state == State::Died, *key));
        let more = all - shown.len();
        let rows = shown.into_iter().map(|(state, key, of)| self.row(state, key, of)).collect();
        let sessions = self.sessions.clone();
        View { now: millis(self.at), span: millis(SPAN), held, waiting, died, more, rows, sessions }
    }

    fn waiting(&self, key: &Key) -> usize {
        self.waiting.get(key).copied().unwrap_or_default()
    }

    /// How long it has still to live, or how long ago it ended.
    fn left(&self, of: Of<'_>) -> Duration {
        match of {
            Of::Held(lease) => lease.expires_in,
            Of::Gone(last) => self.at.saturating_sub(last.to),
            Of::Died(died) => died.expired_for,
        }
    }

    fn row(&self, state: State, key: &Key, of: Of<'_>) -> Row {
        let (fence, held) = match of {
            Of::Held(lease) => (lease.fence, Some(lease.held_for)),
            Of::Gone(last) => (last.fence, Some(last.length())),
            Of::Died(died) => {
                let seen = self.history.lane(key).last().filter(|it| it.fence == died.fence);
                (died.fence, seen.map(Hold::length))
            }
        };
        let lease = if let Of::Held(lease) = of { Some(lease) } else { None };
        Row {
            key: key.to_string(),
            state,
            holder: of.holder().to_owned(),
            fence: fence.to_string(),
            held: held.map(millis),
            left: millis(self.left(of)),
            ttl: millis(lease.map_or(Duration::ZERO, |it| it.ttl.unwrap_or(it.expires_in))),
            renewals: lease.map_or(0, |it| it.renewals),
            waiting: self.waiting(key),
            here: lease.is_some_and(|it| it.is_this_process),
            flaw: lease.and_then(|it| it.flaw),
            lane: self.history.lane(key).iter().map(Piece::of).collect(),
        }
    }
}

/// What a row is made of.
#[derive(Clone, Copy)]
enum Of<'s> {
    Held(&'s LeaseInfo),
    /// The last holder of a key that has none.
    Gone(&'s Hold),
    /// The last holder, of which the store knows that it died.
    Died(&'s Previous),
}

impl Of<'_> {
    fn state(&self) -> State {
        match self {
            Self::Held(lease) if lease.flaw.is_some() => State::Unreadable,
            Self::Held(lease) if lease.is_released => State::Kept,
            Self::Held(_) => State::Held,
            Self::Gone(last) if last.end == End::Died => State::Died,
            Self::Gone(_) => State::Free,
            Self::Died(_) => State::Died,
        }
    }

    fn holder(&self) -> &str {
        match self {
            Self::Held(lease) => &lease.holder,
            Self::Gone(last) => &last.holder,
            Self::Died(died) => &died.holder,
        }
    }
}

impl Piece {
    fn of(hold: &Hold) -> Self {
        let end = match hold.end {
            End::Held => "held",
            End::Released => "released",
            End::Died => "died",
            End::Stolen => "stolen",
            End::Unseen => "unseen",
        };
        let (fence, holder) = (hold.fence.to_string(), hold.holder.clone());
        Self { from: millis(hold.from), to: millis(hold.to), fence, holder, end }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
