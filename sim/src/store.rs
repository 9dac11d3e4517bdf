//! The store: rows, transactions and data, at times that the caller gives. It imitates lockkit's statements on
//! PostgreSQL: which row locks they take, which they wait for, and which they skip; or lockkit's scripts on Redis,
//! which may forget rows. The data are in a database in any case.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use lockkit::{
    Fence, Key,
    store::{Acquired, AcquiredAll, Answer, Claim, Grant, LeaseInfo, LeaseRecord, Previous, Release, Renewal, Token},
    testing::simulation::Pin,
};

use crate::{
    plan::{Bug, Plan, Settings},
    sessions::SessionId,
    tables::{Answer as Answered, ConnId, Query, Tables},
};

/// How many fences belong to each grant.
pub(crate) const FENCES: u64 = 256;

/// The store's clock at the beginning of a run, in microseconds since 1970: 2026-01-01.
const BEGINNING: i64 = 1_767_225_600_000_000;

/// Identifies a transaction.
pub(crate) type TxId = u64;

/// What a process asks of the store.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Acquire(Vec<Claim>),
    AcquireEach(Vec<Claim>),
    Look(Key),
    Renew(Vec<Renewal>),
    Release(Vec<Release>),
    /// By plain statements, which respect no pin.
    ReleaseUnpinned(Vec<Release>),
    List(String, u32),
    Sweep(Duration, u32),
    Begin(TxId),
    Pin(TxId, Key, Token),
    /// The fence guard: `lockkit::guard`.
    Guard(TxId, Key, u64),
    RenewInTx(TxId, Renewal),
    ReleaseInTx(TxId, Release, Pin),
    Read(TxId, Key),
    Commit(TxId, Vec<Write>),
    RollBack(TxId),
    /// On a connection of a pool.
    Query(ConnId, Query),
    /// Of the client of a session: opens one, joins it on another connection, and gives a sign of life.
    Open(SessionId),
    Connect,
    Ping,
    /// Removes the claim, if it was created by this time.
    GiveUp {
        key: Key,
        token: Token,
        created_by: u64,
    },
}

impl Request {
    /// The transaction that it is sent in, or its connection.
    pub(crate) fn tx(&self) -> Option<TxId> {
        match self {
            Self::Begin(tx)
            | Self::Pin(tx, ..)
            | Self::Guard(tx, ..)
            | Self::RenewInTx(tx, _)
            | Self::ReleaseInTx(tx, ..)
            | Self::Read(tx, _)
            | Self::Commit(tx, _)
            | Self::RollBack(tx)
            | Self::Query(tx, _) => Some(*tx),
            _ => None,
        }
    }

    /// Whether a store may execute it twice without harm. A claim may arrive again while its lease is held, not later:
    /// a driver that sends it again does so before its caller knows of the lease.
    pub(crate) fn may_be_repeated(&self) -> bool {
        matches!(
            self,
            Self::Acquire(_)
                | Self::Look(_)
                | Self::Renew(_)
                | Self::Release(_)
                | Self::ReleaseUnpinned(_)
                | Self::List(..)
        )
    }
}

/// What the store answers.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    All(AcquiredAll),
    Each(Vec<Option<Acquired>>),
    Found(Option<LeaseRecord>),
    Answers(Vec<Answer>),
    List(Vec<LeaseRecord>),
    Number(u64),
    Query(Answered),
    /// Whether the row was there.
    Row(bool),
    Done,
    /// There is no such transaction, or not any more.
    NoTransaction,
    /// The store cannot say it for now. Nothing was changed.
    Unknown,
    /// The session has ended.
    Expired,
}

/// The write of a section: it has read this value under this fence, and writes the next one.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub(crate) key: Key,
    pub(crate) read: u64,
    pub(crate) fence: u64,
}

/// One key. It is remembered after its release.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) token: Option<Token>,
    holder: String,
    fence: i64,
    acquired: i64,
    pub(crate) expires: i64,
    ttl: i64,
    renewals: u64,
}

/// A change of a row that its transaction has not committed.
#[derive(Debug, Clone)]
enum Change {
    Renewed { expires: i64, ttl: i64 },
    Released { token: Option<Token>, expires: i64, ttl: i64 },
}

/// Why a row cannot be claimed.
#[derive(Debug, Clone, Copy)]
enum Obstacle {
    /// Another claim has it for this long.
    Held(Duration),
    /// A transaction has locked it.
    Locked,
}

impl Obstacle {
    fn free_in(self) -> Option<Duration> {
        match self {
            Self::Held(free_in) => Some(free_in),
            Self::Locked => None,
        }
    }
}

/// The locks and changes of an open transaction.
#[derive(Debug, Default)]
struct Tx {
    pins: BTreeSet<Key>,
    guards: BTreeMap<Key, u64>,
    changes: BTreeMap<Key, Change>,
}

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) tables: Tables,
    rows: BTreeMap<Key, Row>,
    open: BTreeMap<TxId, Tx>,
    /// Those that have ended, so that a late message does not begin one again.
    ended: BTreeSet<TxId>,
    data: BTreeMap<Key, u64>,
    /// The greatest fence that the guard has let in, of each key.
    guarded: BTreeMap<Key, u64>,
    /// What is left of the rows when the store forgets them.
    replica: BTreeMap<Key, Row>,
    /// How long a store that has forgotten rows grants nothing, from its first claim or list on, and until when.
    quarantine: i64,
    is_another: bool,
    grants_from: i64,
    has_forgotten: bool,
    /// How far the clock was set, and how far back at most.
    stepped: i64,
    was_set_back: bool,
    bug: Option<Bug>,
    /// Draws what a statement may do or not, such as which of two plans it has.
    random: fastrand::Rng,
    /// The greatest fence of each key, also of a row that is gone, and that of its last commit.
    fences: BTreeMap<Key, i64>,
    committed: BTreeMap<Key, u64>,
    /// When each key became free, and the keys that were released since they were last taken from here.
    free_since: BTreeMap<Key, i64>,
    freed: Vec<Key>,
    /// When the last transaction ended that had locked each key.
    unlocked: BTreeMap<Key, i64>,
    violations: Vec<String>,
}

impl Row {
    /// Cuts an expiry that is further away than the ttl: the clock was set back.
    fn cut(&mut self, now: i64) {
        let ahead = (self.expires - self.ttl - now).max(0);
        self.expires -= ahead;
        self.acquired -= ahead;
    }

    fn is_held(&self, now: i64) -> bool {
        self.token.is_some() && self.expires > now
    }

    fn is_held_by(&self, token: Token, now: i64) -> bool {
        self.token == Some(token) && self.expires > now
    }

    fn record(&self, key: &Key, now: i64) -> Option<LeaseRecord> {
        let mut info = LeaseInfo::new(
            key.clone(),
            self.holder.clone(),
            fence(self.fence),
            SystemTime::UNIX_EPOCH + time(self.acquired),
        );
        info.held_for = time(now - self.acquired);
        info.expires_in = time(self.expires - now);
        info.renewals = self.renewals;
        info.ttl = Some(time(self.ttl));
        Some(LeaseRecord::new(self.token.filter(|_| self.is_held(now))?, info))
    }

    /// The expiry and the ttl after a renewal.
    fn renewed(&self, ttl: Duration, now: i64) -> (i64, i64) {
        let (ttl, expires) = (micros(ttl), now + micros(ttl));
        if self.expires > expires { (self.expires, self.ttl) } else { (expires, ttl) }
    }

    /// The token, expiry and ttl after a release.
    fn released(&self, min_hold: Duration, may_be_pinned: bool, now: i64) -> (Option<Token>, i64, i64) {
        let left = micros(min_hold) - (now - self.acquired).max(0);
        let token = (may_be_pinned || left > 0).then(Token::nobody);
        if left > 0 { (token, now + left, left) } else { (token, 0, self.ttl) }
    }
}

impl Store {
    pub(crate) fn new(random: fastrand::Rng, plan: &Plan) -> Self {
        let Settings { bug, .. } = plan.settings;
        Self {
            tables: Tables::default(),
            guarded: BTreeMap::new(),
            replica: BTreeMap::new(),
            quarantine: 1000 * plan.longest_ttl().cast_signed(),
            is_another: false,
            grants_from: 0,
            has_forgotten: false,
            was_set_back: false,
            rows: BTreeMap::new(),
            open: BTreeMap::new(),
            ended: BTreeSet::new(),
            data: BTreeMap::new(),
            stepped: 0,
            bug,
            random,
            fences: BTreeMap::new(),
            committed: BTreeMap::new(),
            free_since: BTreeMap::new(),
            freed: Vec::new(),
            unlocked: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    /// Executes the request at this time of the run. `None` if it must wait for the end of a transaction.
    pub(crate) fn execute(&mut self, request: &Request, at: u64) -> Option<Reply> {
        let now = self.clock(at);
        Some(match request {
            Request::Acquire(claims) => Reply::All(self.acquire_all(claims, now)),
            Request::AcquireEach(claims) => Reply::Each(claims.iter().map(|it| self.acquire_each(it, now)).collect()),
            Request::Look(key) => {
                let is_quarantined = self.is_quarantined(now);
                let found = self.row(key, now).and_then(|it| it.record(key, now));
                if is_quarantined && found.is_none() { Reply::Unknown } else { Reply::Found(found) }
            }
            Request::Renew(renewals) => Reply::Answers(renewals.iter().map(|it| self.renew(it, now)).collect()),
            Request::Release(releases) => {
                Reply::Answers(releases.iter().map(|it| self.release(it, true, now)).collect())
            }
            Request::ReleaseUnpinned(releases) => {
                Reply::Answers(releases.iter().map(|it| self.release(it, false, now)).collect())
            }
            Request::List(..) if self.is_quarantined(now) => Reply::Unknown,
            Request::List(prefix, limit) => Reply::List(self.list(prefix, *limit, now)),
            Request::Sweep(retention, limit) => Reply::Number(self.sweep(*retention, *limit, now)),
            Request::Begin(tx) => {
                if !self.ended.contains(tx) {
                    self.open.insert(*tx, Tx::default());
                }
                Reply::Done
            }
            Request::RollBack(tx) => {
                self.end(*tx, now);
                Reply::Done
            }
            Request::Pin(tx, ..)
            | Request::Guard(tx, ..)
            | Request::RenewInTx(tx, _)
            | Request::ReleaseInTx(tx, ..)
            | Request::Read(tx, _)
            | Request::Commit(tx, _)
                if !self.open.contains_key(tx) =>
            {
                Reply::NoTransaction
            }
            Request::Pin(tx, key, token) => Reply::Row(self.pin(*tx, key, *token, now)?),
            Request::Guard(tx, key, fence) => Reply::Row(self.guard(*tx, key, *fence)?),
            Request::RenewInTx(tx, renewal) => Reply::Answers(vec![self.renew_in_tx(*tx, renewal, now)]),
            Request::ReleaseInTx(tx, release, pin) => Reply::Row(self.release_in_tx(*tx, release, *pin, now)?),
            Request::Read(_, key) => Reply::Number(self.value(key)),
            Request::Query(conn, query) => Reply::Query(self.tables.execute(*conn, query)?),
            Request::Open(_) | Request::Connect | Request::Ping | Request::GiveUp { .. } => Reply::Done,
            Request::Commit(tx, writes) => {
                self.commit(*tx, writes, now);
                Reply::Done
            }
        })
    }

    fn acquire_all(&mut self, claims: &[Claim], now: i64) -> AcquiredAll {
        for claim in claims {
            if let Some(obstacle) = self.in_the_way(claim, now) {
                return AcquiredAll::Held { key: claim.key.clone(), free_in: obstacle.free_in() };
            }
        }
        AcquiredAll::Granted(claims.iter().map(|it| self.grant(it, now)).collect())
    }

    /// `None` where a batch says nothing, and the claim is sent alone.
    fn acquire_each(&mut self, claim: &Claim, now: i64) -> Option<Acquired> {
        match self.in_the_way(claim, now) {
            None => Some(Acquired::Granted(self.grant(claim, now))),
            Some(Obstacle::Locked) => None,
            Some(held) => Some(Acquired::Held { free_in: held.free_in() }),
        }
    }

    /// Why the row cannot be claimed now.
    fn in_the_way(&mut self, claim: &Claim, now: i64) -> Option<Obstacle> {
        // A claim of a released lease may be a plain UPDATE, which does not notice that the row is pinned.
        let is_plain = self.random.bool();
        let (is_pinned, is_changed) = (self.is_pinned(&claim.key), self.is_changed(&claim.key, None));
        let skips_locked = !self.has(Bug::GrantsTheLocked);
        if self.has(Bug::GrantsTheHeld) {
            return None;
        }
        let quarantined = if self.is_quarantined(now) { self.grants_from } else { now };
        if let Some(free_in) = u64::try_from(quarantined - now).ok().filter(|it| *it > 0)
            && !self.row(&claim.key, now).is_some_and(|it| it.is_held(now))
        {
            return Some(Obstacle::Held(Duration::from_micros(free_in)));
        }
        let row = self.row(&claim.key, now)?;
        if row.is_held(now) && row.token != Some(claim.token) {
            return Some(Obstacle::Held(time(row.expires - now)));
        }
        let is_skipped = is_changed || is_pinned && !(is_plain && row.token.is_none());
        (is_skipped && skips_locked).then_some(Obstacle::Locked)
    }

    fn grant(&mut self, claim: &Claim, now: i64) -> Grant {
        let Claim { key, token, holder, ttl, .. } = claim;
        let shortens = self.has(Bug::ShortensByRepeats);
        if let Some(row) = self.rows.get_mut(key).filter(|it| it.token == Some(*token)) {
            (row.expires, row.ttl) = if shortens { (now + micros(*ttl), micros(*ttl)) } else { row.renewed(*ttl, now) };
            row.renewals += 1;
            return granted(row.fence);
        }
        let before = self.rows.remove(key);
        let number = match &before {
            Some(before) if self.has(Bug::RepeatsFences) => before.fence,
            before if self.has(Bug::CountsFences) => before.as_ref().map_or(1, |it| it.fence) + FENCES.cast_signed(),
            before => before.as_ref().map_or(now, |it| now.max(it.fence + FENCES.cast_signed())),
        };
        let row = Row {
            token: Some(*token),
            holder: holder.to_string(),
            fence: number,
            acquired: now,
            expires: now + micros(*ttl),
            ttl: micros(*ttl),
            renewals: 0,
        };
        self.rows.insert(key.clone(), row);
        let may_fall = self.fences_may_fall();
        if let Some(last) = self.fences.insert(key.clone(), number)
            && last + FENCES.cast_signed() > number
            && !may_fall
        {
            self.violations.push(format!("a grant of `{key}` has fence {number} after {last}"));
        }
        let previous = before.filter(|it| it.token.is_some_and(|it| !it.is_nobody()));
        granted(number).after(previous.map(|it| Previous::new(it.holder, fence(it.fence), time(now - it.expires))))
    }

    fn renew(&mut self, Renewal { key, token, ttl, .. }: &Renewal, now: i64) -> Answer {
        let (is_changed, by_name) = (self.is_changed(key, None), self.has(Bug::RenewsByName));
        if self.has(Bug::SkipsRenewals) {
            return Answer::Done;
        }
        let is_there = |it: &Row| it.is_held_by(*token, now) || by_name && it.is_held(now);
        let Some(row) = self.row(key, now).filter(|it| is_there(it)) else { return Answer::Gone };
        if is_changed {
            return Answer::Busy;
        }
        (row.expires, row.ttl) = row.renewed(*ttl, now);
        row.renewals += 1;
        Answer::Done
    }

    fn release(&mut self, release: &Release, respects_pins: bool, now: i64) -> Answer {
        let Release { key, token, min_hold, .. } = release;
        let is_pinned = self.is_pinned(key);
        let is_locked = self.is_changed(key, None) || respects_pins && is_pinned && !self.has(Bug::ReleasesThePinned);
        let by_name = self.has(Bug::ReleasesByName);
        if self.has(Bug::SkipsReleases) {
            return Answer::Done;
        }
        let is_there = |it: &Row| it.is_held_by(*token, now) || by_name && it.is_held(now);
        let Some(row) = self.row(key, now).filter(|it| is_there(it)) else { return Answer::Gone };
        if is_locked {
            return Answer::Busy;
        }
        (row.token, row.expires, row.ttl) = row.released(*min_hold, false, now);
        if is_pinned && !respects_pins {
            self.violations.push(format!("`{key}` was released by a plain statement under the pin of a transaction"));
        }
        self.note_freed(key, now);
        Answer::Done
    }

    fn list(&mut self, prefix: &str, limit: u32, now: i64) -> Vec<LeaseRecord> {
        let rows = self.rows.iter_mut().filter(|(key, _)| key.starts_with(prefix));
        let held = rows.filter_map(|(key, row)| {
            row.cut(now);
            row.record(key, now)
        });
        held.take(limit as usize).collect()
    }

    fn sweep(&mut self, retention: Duration, limit: u32, now: i64) -> u64 {
        let then = now - micros(retention);
        let old = self.rows.iter().filter(|(_, it)| it.expires < then && it.fence < then - FENCES.cast_signed());
        let keys: Vec<_> =
            old.map(|(key, _)| key.clone()).filter(|it| !self.is_locked(it)).take(limit as usize).collect();
        keys.iter().filter_map(|it| self.rows.remove(it)).count() as u64
    }

    /// Waits for a transaction that changed the row, not for one that pins it.
    fn pin(&mut self, tx: TxId, key: &Key, token: Token, now: i64) -> Option<bool> {
        if self.is_changed(key, Some(tx)) {
            return None;
        }
        let is_held = self.row(key, now).is_some_and(|it| it.is_held_by(token, now));
        if is_held && let Some(tx) = self.open.get_mut(&tx) {
            tx.pins.insert(key.clone());
        }
        Some(is_held)
    }

    /// Waits for every transaction that has passed it, so that the next one reads what this one writes.
    fn guard(&mut self, tx: TxId, key: &Key, fence: u64) -> Option<bool> {
        if self.open.iter().any(|(id, it)| *id != tx && it.guards.contains_key(key)) {
            return None;
        }
        let is_let_in = self.guarded.get(key).is_none_or(|it| *it <= fence) || self.has(Bug::GuardsNothing);
        if is_let_in && let Some(tx) = self.open.get_mut(&tx) {
            tx.guards.insert(key.clone(), fence);
        }
        Some(is_let_in)
    }

    fn renew_in_tx(&mut self, tx: TxId, Renewal { key, token, ttl, .. }: &Renewal, now: i64) -> Answer {
        let is_changed = self.is_changed(key, Some(tx));
        let Some(row) = self.row(key, now).filter(|it| it.is_held_by(*token, now)) else { return Answer::Gone };
        if is_changed {
            return Answer::Busy;
        }
        let (expires, ttl) = row.renewed(*ttl, now);
        self.change(tx, key, Change::Renewed { expires, ttl });
        Answer::Done
    }

    /// Waits for a transaction that changed the row, not for one that pins it.
    fn release_in_tx(&mut self, tx: TxId, release: &Release, pin: Pin, now: i64) -> Option<bool> {
        let Release { key, token, min_hold, .. } = release;
        if self.is_changed(key, Some(tx)) {
            return None;
        }
        let for_anyone = self.has(Bug::CommitsForAnyone);
        let is_there = |it: &Row| for_anyone || it.token == Some(*token) && (pin == Pin::Certain || it.expires > now);
        let Some(row) = self.row(key, now).filter(|it| is_there(it)) else { return Some(false) };
        let (token, expires, ttl) = row.released(*min_hold, pin != Pin::No, now);
        self.change(tx, key, Change::Released { token, expires, ttl });
        Some(true)
    }

    fn change(&mut self, tx: TxId, key: &Key, change: Change) {
        if let Some(tx) = self.open.get_mut(&tx) {
            tx.changes.insert(key.clone(), change);
        }
    }

    fn commit(&mut self, tx: TxId, writes: &[Write], now: i64) {
        if self.has(Bug::LosesCommits) {
            self.end(tx, now);
            return;
        }
        let (pins, guards) = self.open.get(&tx).map(|it| (it.pins.clone(), it.guards.clone())).unwrap_or_default();
        let changes = self.end(tx, now);
        for (key, fence) in &guards {
            self.guarded.insert(key.clone(), *fence);
        }
        for Write { key, .. } in writes {
            if !pins.contains(key) && !changes.contains_key(key) && !guards.contains_key(key) {
                self.violations.push(format!("a commit has written `{key}` without the row of its lease"));
            }
        }
        for (key, change) in changes {
            let Some(row) = self.rows.get_mut(&key) else {
                self.violations.push(format!("the row of `{key}` has gone under the lock of a transaction"));
                continue;
            };
            match change {
                Change::Renewed { expires, ttl } => {
                    (row.expires, row.ttl) = (expires, ttl);
                    row.renewals += 1;
                }
                Change::Released { token, expires, ttl } => {
                    (row.token, row.expires, row.ttl) = (token, expires, ttl);
                    self.note_freed(&key, now);
                }
            }
        }
        for Write { key, read, fence } in writes {
            let value = self.data.entry(key.clone()).or_default();
            if value != read {
                let what = format!("a commit under fence {fence} had read {read} of `{key}`, which was {value}");
                self.violations.push(format!("lost update: {what}"));
            }
            *value = read + 1;
            // The guard lets a holder in several times.
            if let Some(last) = self.committed.insert(key.clone(), *fence)
                && (last > *fence || last == *fence && !guards.contains_key(key))
            {
                self.violations.push(format!("stale commit: of `{key}` under fence {fence} after {last}"));
            }
        }
    }

    /// Ends the transaction, and returns what it has changed.
    fn end(&mut self, tx: TxId, now: i64) -> BTreeMap<Key, Change> {
        self.ended.insert(tx);
        let Tx { pins, guards: _, changes } = self.open.remove(&tx).unwrap_or_default();
        for key in pins.iter().chain(changes.keys()) {
            self.unlocked.insert(key.clone(), now);
        }
        changes
    }

    fn row(&mut self, key: &Key, now: i64) -> Option<&mut Row> {
        let cuts = !self.has(Bug::KeepsLateExpiries);
        let row = self.rows.get_mut(key)?;
        if cuts {
            row.cut(now);
        }
        Some(row)
    }

    /// Whether nothing is granted, because leases may be forgotten. The first claim or list notices it.
    fn is_quarantined(&mut self, now: i64) -> bool {
        if std::mem::take(&mut self.is_another) && !self.has(Bug::GrantsAtOnce) {
            self.grants_from = now + self.quarantine;
        }
        self.grants_from = self.grants_from.min(now + self.quarantine);
        self.grants_from > now
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Whether a transaction other than this one has changed the row.
    fn is_changed(&self, key: &Key, own: Option<TxId>) -> bool {
        self.open.iter().any(|(id, it)| Some(*id) != own && it.changes.contains_key(key))
    }

    fn is_pinned(&self, key: &Key) -> bool {
        self.open.values().any(|it| it.pins.contains(key))
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.is_pinned(key) || self.is_changed(key, None)
    }

    fn note_freed(&mut self, key: &Key, now: i64) {
        self.free_since.insert(key.clone(), now);
        self.freed.push(key.clone());
    }
}

/// What the simulation asks of the store beside its processes.
impl Store {
    /// The store's clock at this time of the run.
    pub(crate) fn clock(&self, at: u64) -> i64 {
        BEGINNING + at.cast_signed() + self.stepped
    }

    /// Whether a fence may be lower than an earlier one of its key.
    pub(crate) fn fences_may_fall(&self) -> bool {
        self.has_forgotten && self.was_set_back
    }

    pub(crate) fn step(&mut self, micros: i64) {
        self.stepped += micros;
        self.was_set_back |= micros < 0;
    }

    /// The replica has got all that was written so far, and gets no more.
    pub(crate) fn lags(&mut self) {
        self.replica = self.rows.clone();
    }

    /// The server restarts or its replica is promoted. Returns the tokens of which it may not know any more, or not as
    /// much.
    pub(crate) fn forget(&mut self, is_noticed: bool, at: u64) -> Vec<Token> {
        let now = self.clock(at);
        (self.has_forgotten, self.is_another) = (true, is_noticed);
        let replica = std::mem::take(&mut self.replica);
        let rows = std::mem::replace(&mut self.rows, replica);
        rows.into_values().filter(|it| it.is_held(now)).filter_map(|it| it.token).collect()
    }

    /// The tokens of all rows.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = Token> {
        self.rows.values().filter_map(|it| it.token)
    }

    /// An operator declares that nothing was forgotten.
    pub(crate) fn declare_new(&mut self) {
        (self.is_another, self.grants_from) = (false, 0);
    }

    /// Ends all transactions, as a server that restarts.
    pub(crate) fn restart(&mut self) {
        self.ended.extend(std::mem::take(&mut self.open).into_keys());
        self.tables.restart();
    }

    pub(crate) fn is_open(&self, tx: TxId) -> bool {
        self.open.contains_key(&tx)
    }

    /// Whether the token holds the lease at this time.
    pub(crate) fn holds(&self, key: &Key, token: Token, at: u64) -> bool {
        self.rows.get(key).is_some_and(|it| it.is_held_by(token, self.clock(at)))
    }

    /// The expiry of the row of this key from now, in microseconds, if it has a token.
    pub(crate) fn expires_in(&self, key: &Key, at: u64) -> Option<i64> {
        let row = self.rows.get(key)?;
        row.token.map(|_| row.expires - self.clock(at))
    }

    /// The keys whose rows a transaction has locked.
    pub(crate) fn locked(&self) -> impl Iterator<Item = &Key> {
        self.open.values().flat_map(|it| it.pins.iter().chain(it.changes.keys()))
    }

    /// Whether it grants nothing at this time, because leases may be forgotten.
    pub(crate) fn grants_nothing(&self, at: u64) -> bool {
        self.is_another || self.grants_from > self.clock(at)
    }

    /// The leases that are held at this time.
    pub(crate) fn held(&self, at: u64) -> Vec<(Key, Token)> {
        let now = self.clock(at);
        let held = self.rows.iter().filter(|(_, it)| it.is_held(now));
        held.filter_map(|(key, it)| Some((key.clone(), it.token?))).collect()
    }

    /// Since when the key has been free, if it was ever released, or has expired.
    pub(crate) fn free_since(&self, key: &Key, at: u64) -> Option<u64> {
        let row = self.rows.get(key)?;
        let since = if row.expires > 0 { row.expires } else { *self.free_since.get(key)? };
        let since = since.max(self.unlocked.get(key).copied().unwrap_or(since));
        let ago = self.clock(at) - since;
        u64::try_from(ago).ok().map(|it| at.saturating_sub(it))
    }

    pub(crate) fn open_transactions(&self) -> usize {
        self.open.len() + self.tables.open_transactions()
    }

    /// The value of the data of this key.
    pub(crate) fn value(&self, key: &Key) -> u64 {
        self.data.get(key).copied().unwrap_or(0)
    }

    /// The keys that were released since the last call.
    pub(crate) fn take_freed(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.freed)
    }

    pub(crate) fn take_violations(&mut self) -> Vec<String> {
        let mut violations = std::mem::take(&mut self.violations);
        violations.extend(self.tables.take_violations());
        violations
    }
}

fn granted(number: i64) -> Grant {
    let mut grant = Grant::from(fence(number));
    grant.spare_fences = FENCES - 1;
    grant
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn time(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn fence(number: i64) -> Fence {
    Fence::from(u64::try_from(number).unwrap_or(0))
}
