//! Whether a caller who was told that somebody has the lease could know it.
//!
//! `Contended`, and `None` of a single attempt, decide whether a job is skipped. So they may not stand for a store that
//! did not answer: while the caller asked, or one before it in its process, a claim must have held the lease, or a
//! transaction must have locked its row. A claim of the process itself counts if it was answered, or another caller
//! still waits for its answer.

use std::collections::BTreeMap;

use lockkit::{
    Key,
    store::{Claim, Token},
};

use crate::{
    store::Request,
    world::{Outcome, World},
};

/// For how long a claim without an answer may still get one, in microseconds.
const OPEN_FOR: u64 = 500_000;

/// For how long a broken connection and an answer come at once, in microseconds: callers hear of them in any order.
const AT_ONCE: u64 = 1000;

/// A caller that asks for leases.
#[derive(Debug, Clone, Copy)]
struct Caller {
    number: u64,
    asked: u64,
    /// Since when it counts who holds the lease: since it asks, or one before it in its process.
    since: u64,
    /// Whether the process trusted the lease then.
    was_trusted: bool,
}

/// What a process knows of one of its claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It was sent at this time.
    Open(u64),
    Answered,
    /// It was sent at the first time, and since the second its answer does not come any more.
    Lost(u64, u64),
}

/// Who held each lease, and what the processes know of their claims. A lease has the first part of its key as its name.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// When each claim was last seen to hold a lease of this name, but for tickets and what else waits.
    held: BTreeMap<String, BTreeMap<Token, u64>>,
    /// The same, of tickets and the like.
    waited: BTreeMap<String, BTreeMap<Token, u64>>,
    /// When a transaction was last seen to lock a row.
    locked: BTreeMap<String, u64>,
    /// When the store last granted nothing because it may have forgotten leases.
    quarantined: Option<u64>,
    claims: BTreeMap<Token, (usize, Known)>,
    /// The releases of each process on their way, and when the last one was over: it has the lease until then.
    releasing: BTreeMap<(usize, String), (u32, u64)>,
    callers: BTreeMap<(usize, &'static str), Vec<Caller>>,
}

/// The first part of the key.
pub(crate) fn name(key: &Key) -> &str {
    key.split('/').next().unwrap_or_default()
}

/// The leases that a request releases.
fn released_by(request: &Request) -> Vec<String> {
    match request {
        Request::Release(releases) | Request::ReleaseUnpinned(releases) => {
            releases.iter().map(|it| name(&it.key).to_owned()).collect()
        }
        Request::Commit(_, writes) => writes.iter().map(|it| name(&it.key).to_owned()).collect(),
        _ => Vec::new(),
    }
}

/// The claims of a request that takes leases.
fn claims_of(request: &Request) -> &[Claim] {
    match request {
        Request::Acquire(claims) | Request::AcquireEach(claims) => claims,
        _ => &[],
    }
}

impl Refusals {
    pub(crate) fn sent(&mut self, process: usize, request: &Request, at: u64) {
        for claim in claims_of(request) {
            self.claims.entry(claim.token).or_insert((process, Known::Open(at)));
        }
        for name in released_by(request) {
            self.releasing.entry((process, name)).or_default().0 += 1;
        }
    }

    /// The answer of a request has reached its process, or will not.
    pub(crate) fn ended(&mut self, process: usize, request: &Request, outcome: Outcome, at: u64) {
        for name in released_by(request) {
            if let Some((open, last)) = self.releasing.get_mut(&(process, name)) {
                (*open, *last) = (open.saturating_sub(1), at);
            }
        }
        for claim in claims_of(request) {
            if let Some((_, known)) = self.claims.get_mut(&claim.token)
                && *known != Known::Answered
            {
                *known = match (outcome, *known) {
                    (Outcome::Answered, _) => Known::Answered,
                    (Outcome::Broken, Known::Open(sent)) => Known::Lost(sent, at),
                    // Its caller does not know that.
                    (Outcome::Broken | Outcome::Silent, known) => known,
                };
            }
        }
    }

    /// The process was killed. The claims that it made are those of another one to the next.
    pub(crate) fn killed(&mut self, process: usize) {
        self.claims.retain(|_, (of, _)| *of != process);
        self.releasing.retain(|(of, _), _| *of != process);
        self.callers.retain(|(of, _), _| *of != process);
    }

    /// Whether a caller of the process other than this one waits for an answer that may come at this time, to a claim
    /// for this name that was sent then.
    fn is_awaited(&self, process: usize, name: &'static str, number: u64, sent: u64, at: u64) -> bool {
        let mut callers = self.callers.get(&(process, name)).into_iter().flatten();
        at < sent + OPEN_FOR && callers.any(|it| it.number != number && it.asked <= sent)
    }

    fn is_known(&self, process: usize, name: &'static str, Caller { number, since, .. }: Caller, at: u64) -> bool {
        // Whether the process may be refused because of this claim.
        let counts = |token: &Token, is_waiting: bool| match self.claims.get(token).filter(|(of, _)| *of == process) {
            None => true,
            Some((_, Known::Open(sent))) => self.is_awaited(process, name, number, *sent, at),
            Some((_, Known::Lost(sent, lost))) => {
                at < lost + AT_ONCE && self.is_awaited(process, name, number, *sent, at)
            }
            Some((_, Known::Answered)) => !is_waiting,
        };
        let has_held = |seen: &BTreeMap<String, BTreeMap<Token, u64>>, is_waiting| {
            let mut claims = seen.get(name).into_iter().flatten();
            claims.any(|(token, last)| *last >= since && counts(token, is_waiting))
        };
        let releasing = self.releasing.get(&(process, name.to_owned()));
        has_held(&self.held, false)
            || has_held(&self.waited, true)
            || releasing.is_some_and(|(open, last)| *open > 0 || *last >= since)
            || self.locked.get(name).is_some_and(|it| *it >= since)
            || self.quarantined.is_some_and(|it| it >= since)
    }
}

impl World {
    /// Notes who holds which lease at this time.
    pub(crate) fn sees_holders(&mut self, at: u64) {
        for (key, token) in self.held(at) {
            let is_waiting = key.contains("/queue/") || key.ends_with("/gather");
            let refusals = &mut self.refusals;
            let seen = if is_waiting { &mut refusals.waited } else { &mut refusals.held };
            seen.entry(name(&key).to_owned()).or_default().insert(token, at);
        }
        for key in self.store.locked() {
            self.refusals.locked.insert(name(key).to_owned(), at);
        }
        if self.store.grants_nothing(at) {
            self.refusals.quarantined = Some(at);
        }
    }

    /// A task asks for leases with these names, of which it needs each, or any. Returns the number of the caller.
    pub(crate) fn asks(&mut self, process: usize, names: impl IntoIterator<Item = &'static str>) -> u64 {
        let (number, now) = (self.number(), self.time_of(process));
        self.sees_holders(now);
        for name in names {
            let trusts = self.trusts_any(process, name);
            let before = self.refusals.callers.entry((process, name)).or_default();
            let since = before.iter().map(|it| it.since).min().unwrap_or(now);
            let was_trusted = trusts || before.iter().any(|it| it.was_trusted);
            before.push(Caller { number, asked: now, since, was_trusted });
        }
        number
    }

    /// The caller has its answer, or has gone.
    pub(crate) fn asks_no_more(&mut self, process: usize, number: u64) {
        for ((of, _), callers) in &mut self.refusals.callers {
            if *of == process {
                callers.retain(|it| it.number != number);
            }
        }
    }

    /// The caller was told that somebody has the lease.
    pub(crate) fn is_refused(&mut self, process: usize, number: u64, needs_one: bool) {
        let at = self.time_of(process);
        self.sees_holders(at);
        let asked: Vec<_> = {
            let callers = self.refusals.callers.iter().filter(|((of, _), _)| *of == process);
            let caller = |callers: &[Caller]| callers.iter().find(|it| it.number == number).copied();
            callers.filter_map(|((_, name), callers)| Some((*name, caller(callers)?))).collect()
        };
        let noticed = self.noticed(process, at);
        let is_known = |(name, caller): &(&'static str, Caller)| {
            let is_trusted = caller.was_trusted || self.trusts_any(process, name);
            is_trusted || self.refusals.is_known(process, name, *caller, noticed)
        };
        let is_right = if needs_one { asked.iter().all(is_known) } else { asked.iter().any(is_known) };
        if !is_right {
            let names: Vec<_> = asked.iter().map(|it| it.0).collect();
            self.violation(format!("p{process} was told that somebody has `{}`, and nobody had", names.join("`, `")));
        }
    }
}
