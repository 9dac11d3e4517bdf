//! The servers of a store with sessions, ZooKeeper or etcd: the claims to a key stand in a queue, and those of a
//! session end with it. When a session expires is their decision, and no time of theirs is in an answer.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use lockkit::{
    Fence, Key,
    store::{AcquiredAll, Answer, Claim, Grant, LeaseInfo, LeaseRecord, Release, Renewal, Token},
};

use crate::{
    plan::Kind,
    store::{FENCES, Reply, Request},
};

/// The number of the last write before the run.
const BEGINNING: u64 = 1 << 32;

/// Identifies a session.
pub(crate) type SessionId = u64;

/// The servers.
#[derive(Debug)]
pub(crate) struct Sessions {
    kind: Kind,
    /// Of each session, in microseconds.
    pub(crate) timeout: u64,
    open: BTreeMap<SessionId, Session>,
    queues: BTreeMap<Key, Vec<Child>>,
    /// Since when each key has had its first child, or none.
    first_since: BTreeMap<Key, u64>,
    freed: Vec<Key>,
    writes: u64,
}

#[derive(Debug)]
struct Session {
    expires: u64,
    /// How often the follower reports to the leader that the client has sent something. `None` for a client of the
    /// leader.
    reports_every: Option<u64>,
    is_unreported: bool,
}

/// A claim in a queue. The first one may be granted.
#[derive(Debug)]
struct Child {
    token: Token,
    session: SessionId,
    holder: String,
    number: u64,
    ttl: Duration,
    created: u64,
    granted: Option<u64>,
}

impl Child {
    fn fence(&self) -> Fence {
        Fence::from(self.number * FENCES)
    }

    /// Its holder does not write when it renews, so its expiry is not known.
    fn record(&self, key: &Key, at: u64) -> LeaseRecord {
        let acquired = SystemTime::UNIX_EPOCH + Duration::from_micros(self.created);
        let mut info = LeaseInfo::new(key.clone(), self.holder.clone(), self.fence(), acquired);
        info.held_for = Duration::from_micros(at - self.created);
        (info.expires_in, info.ttl) = (self.ttl, Some(self.ttl));
        LeaseRecord::new(self.token, info)
    }
}

/// How long a process trusts a lease in ZooKeeper without a renewal: three eighths of the session timeout.
pub(crate) fn trusted(timeout: u64) -> u64 {
    timeout * 3 / 8
}

impl Sessions {
    pub(crate) fn new(kind: Kind, timeout: u64) -> Self {
        Self {
            kind,
            timeout,
            open: BTreeMap::new(),
            queues: BTreeMap::new(),
            first_since: BTreeMap::new(),
            freed: Vec::new(),
            writes: BEGINNING,
        }
    }

    pub(crate) fn opens(&mut self, id: SessionId, reports_every: Option<u64>, at: u64) {
        self.open.insert(id, Session { expires: at + self.timeout, reports_every, is_unreported: false });
    }

    /// When the session expires unless its client gives a sign of life. `None` if it has ended.
    pub(crate) fn expires(&self, id: SessionId) -> Option<u64> {
        self.open.get(&id).map(|it| it.expires)
    }

    /// The leader learns that the session is alive.
    pub(crate) fn extends(&mut self, id: SessionId, at: u64) {
        if let Some(session) = self.open.get_mut(&id) {
            (session.expires, session.is_unreported) = (at + self.timeout, false);
        }
    }

    /// The client has sent something. Returns when the leader learns of it, if that is later.
    pub(crate) fn touches(&mut self, id: SessionId, at: u64) -> Option<u64> {
        if self.kind == Kind::Etcd {
            return None;
        }
        let session = self.open.get_mut(&id)?;
        let Some(every) = session.reports_every else {
            self.extends(id, at);
            return None;
        };
        let is_first = !std::mem::replace(&mut session.is_unreported, true);
        is_first.then(|| (at / every + 1) * every)
    }

    /// The follower reports what it has heard.
    pub(crate) fn reports(&mut self, id: SessionId, at: u64) {
        if self.open.get(&id).is_some_and(|it| it.is_unreported) {
            self.extends(id, at);
        }
    }

    /// The follower dies before it has reported.
    pub(crate) fn loses_report(&mut self, id: SessionId) {
        if let Some(session) = self.open.get_mut(&id) {
            session.is_unreported = false;
        }
    }

    /// A new leader gives each session its whole timeout.
    pub(crate) fn elects(&mut self, at: u64) {
        for session in self.open.values_mut() {
            (session.expires, session.is_unreported) = (at + self.timeout, false);
        }
    }

    /// Ends the session if it has expired.
    pub(crate) fn ends(&mut self, id: SessionId, at: u64) {
        if self.open.remove(&id).is_some() {
            self.remove(at, |_, it| it.session == id);
        }
    }

    fn remove(&mut self, at: u64, which: impl Fn(&Key, &Child) -> bool) {
        for (key, queue) in &mut self.queues {
            let (first, len) = (queue.first().map(|it| it.number), queue.len());
            queue.retain(|it| !which(key, it));
            if queue.len() < len {
                self.freed.push(key.clone());
            }
            if queue.first().map(|it| it.number) != first {
                self.first_since.insert(key.clone(), at);
            }
        }
    }

    /// Executes the request of this session. `None` if it has ended.
    pub(crate) fn execute(&mut self, id: SessionId, request: &Request, at: u64) -> Option<Reply> {
        self.open.get(&id)?;
        Some(match request {
            Request::Acquire(claims) => Reply::All(self.acquire(id, claims.first()?, at)),
            Request::Look(key) => Reply::Found(self.look(id, key, at)),
            Request::Renew(renewals) => Reply::Answers(renewals.iter().map(|it| self.renew(it)).collect()),
            Request::Release(releases) => Reply::Answers(releases.iter().map(|it| self.release(it, at)).collect()),
            Request::List(prefix, limit) => {
                let keys: Vec<_> = self.queues.keys().filter(|it| it.starts_with(prefix)).cloned().collect();
                let found = keys.iter().filter_map(|it| self.look(id, it, at));
                Reply::List(found.take(*limit as usize).collect())
            }
            Request::GiveUp { key, token, created_by } => {
                self.remove(at, |it, child| it == key && child.token == *token && child.created <= *created_by);
                Reply::Done
            }
            Request::Sweep(..) => Reply::Number(0),
            _ => Reply::Done,
        })
    }

    fn acquire(&mut self, id: SessionId, claim: &Claim, at: u64) -> AcquiredAll {
        let Claim { key, token, holder, ttl, queue: queues, .. } = claim;
        let queue = self.queues.entry(key.clone()).or_default();
        let place = queue.iter().position(|it| it.token == *token);
        if place.is_none() && (*queues || queue.is_empty()) {
            self.writes += 1;
            let holder = holder.to_string();
            let number = self.writes;
            queue.push(Child { token: *token, session: id, holder, number, ttl: *ttl, created: at, granted: None });
        }
        match queue.first_mut().filter(|it| it.token == *token) {
            Some(first) => {
                (first.ttl, first.granted) = (*ttl, first.granted.or(Some(at)));
                let mut grant = Grant::from(first.fence());
                grant.spare_fences = FENCES - 1;
                grant.ttl = (self.kind == Kind::ZooKeeper).then(|| Duration::from_micros(trusted(self.timeout)));
                AcquiredAll::Granted(vec![grant])
            }
            None => AcquiredAll::Held { key: key.clone(), free_in: None },
        }
    }

    /// A place of this session that may be granted is free for its owner.
    fn look(&self, id: SessionId, key: &Key, at: u64) -> Option<LeaseRecord> {
        let first = self.queues.get(key)?.first()?;
        (first.granted.is_some() || first.session != id).then(|| first.record(key, at))
    }

    fn renew(&self, renewal: &Renewal) -> Answer {
        if self.holds(&renewal.key, renewal.token) { Answer::Done } else { Answer::Gone }
    }

    fn release(&mut self, release: &Release, at: u64) -> Answer {
        let Release { key, token, min_hold, .. } = release;
        let is_own = |it: &&mut Child| it.token == *token;
        let Some(child) = self.queues.get_mut(key).and_then(|it| it.iter_mut().find(is_own)) else {
            return Answer::Gone;
        };
        let granted = child.granted;
        let held_for = Duration::from_micros(at - granted.unwrap_or(at));
        if granted.is_some() && held_for < *min_hold {
            (child.token, child.holder) = (Token::nobody(), String::new());
            (child.ttl, child.granted) = (min_hold.saturating_sub(held_for), Some(at));
            return Answer::Done;
        }
        self.remove(at, |it, child| it == key && child.token == *token);
        if granted.is_some() { Answer::Done } else { Answer::Gone }
    }

    /// The token holds the lease.
    pub(crate) fn holds(&self, key: &Key, token: Token) -> bool {
        let first = self.queues.get(key).and_then(|it| it.first());
        first.is_some_and(|it| it.token == token && it.granted.is_some())
    }

    /// All claims that have a place.
    pub(crate) fn held(&self) -> Vec<(Key, Token)> {
        let all = self.queues.iter().flat_map(|(key, it)| it.iter().map(|it| (key.clone(), it.token)));
        all.collect()
    }

    /// Since when the key has been free for the first one of its queue.
    pub(crate) fn free_since(&self, key: &Key) -> Option<u64> {
        let is_held = self.queues.get(key).and_then(|it| it.first()).is_some_and(|it| it.granted.is_some());
        if is_held { None } else { self.first_since.get(key).copied() }
    }

    pub(crate) fn take_freed(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.freed)
    }

    /// The claims without a holder whose least holding time has ended.
    pub(crate) fn end_min_holds(&mut self, at: u64) {
        let is_over = |it: &Child| {
            let until = |granted: u64| granted + u64::try_from(it.ttl.as_micros()).unwrap_or(u64::MAX);
            it.token.is_nobody() && it.granted.is_some_and(|granted| until(granted) <= at)
        };
        self.remove(at, |_, it| is_over(it));
    }
}

/// Whether the claim was granted.
pub(crate) fn is_granted(reply: &Reply) -> bool {
    matches!(reply, Reply::All(AcquiredAll::Granted(_)))
}
