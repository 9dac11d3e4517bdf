//! What must hold in every run, and what is known of the leases of the processes to check it.
//!
//! A task registers each lease that it gets, and says when it gives the lease up. After each step of a process, all of
//! its leases are compared with the rows of the store. That is stronger than exclusion: a lease that is trusted without
//! its row is a violation even if nobody else has taken it yet.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use lockkit::{
    Key, Lease,
    store::{Acquired, AcquiredAll, Answer, Claim, Token},
    testing::simulation::{observer, token, trusts},
};
use tokio::time::Instant;

use crate::{
    client::Client,
    plan::{Plan, Profile},
    refusals,
    store::{FENCES, Reply, Request},
    world::World,
};

/// How long an ended lease is still looked at, in microseconds.
const WATCHED_FOR: u64 = 3_000_000;

/// How long a key may be free, in microseconds, while a caller waits for it.
const LATE: u64 = 1_000_000;

/// As [`LATE`], after a fault: a call that was on its way gets no answer for half of the ttl, and 500 ms at least, and
/// the ticket of a dead process lives for 3 s at most.
const LATE_AFTER_FAULTS: u64 = 4_000_000;

/// The least ttl of a ticket, in microseconds. Otherwise a ticket lives no longer than its lease.
const SHORTEST_TICKET: u64 = 500_000;

/// What a lease is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Alone,
    /// A permit of so many.
    Permit(usize),
    Reader,
    Writer,
}

/// A lease that a task has, or had.
#[derive(Debug)]
struct Handle {
    number: u64,
    lease: Lease<Client>,
    token: Token,
    fence: u64,
    kind: Kind,
    /// The task has given it up.
    is_over: bool,
    /// The process does not trust it any more.
    is_lost: bool,
    since: u64,
}

/// A caller that waits.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    number: u64,
    since: u64,
    until: u64,
}

/// The judge of one run.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what the plan of the run has")]
pub(crate) struct Judge {
    pub(crate) violations: Vec<String>,
    /// Whether trust without a row is a violation.
    is_exclusive: bool,
    /// Whether nothing may fail.
    pub(crate) is_calm: bool,
    /// Whether there are no faults, but perhaps thefts and the end of a process.
    is_faultless: bool,
    /// Whether no lease may be lost but by theft.
    pub(crate) is_undisturbed: bool,
    /// How long a key may be free while a caller waits.
    late: u64,
    /// Since when there has been no fault. `None` while a link is bad.
    pub(crate) calm_since: Option<u64>,
    /// The longest ttl of a lease, and the longest of each token, in microseconds.
    longest_ttl: u64,
    ttls: BTreeMap<Token, u64>,
    handles: BTreeMap<usize, Vec<Handle>>,
    fences: BTreeMap<Key, u64>,
    /// Which process claimed each token.
    owners: BTreeMap<Token, usize>,
    /// The tokens that the store may have forgotten, with whether there was a quarantine, until they are renewed. Their
    /// holders trust them without a row.
    forgotten: BTreeMap<Token, bool>,
    /// When an operator has taken each token away, and how many operators of a process are about to.
    stolen: BTreeMap<Token, u64>,
    /// Those whose theft the store has forgotten.
    restored: BTreeSet<Token>,
    stealing: BTreeMap<(usize, Key), u32>,
    /// The callers of each process and key, in the order of their arrival.
    waiting: BTreeMap<(usize, Key), VecDeque<Waiting>>,
    /// The processes that have closed their leases.
    closed: BTreeSet<usize>,
    /// How often data was written, as far as the tasks know, and how often they do not know.
    acknowledged: BTreeMap<Key, u64>,
    unknown: BTreeMap<Key, u64>,
    /// Since when the key of the claim that is executed next is free.
    free_since: Option<u64>,
    found_late: Option<String>,
}

impl Judge {
    pub(crate) fn new(plan: &Plan) -> Self {
        let is_calm = plan.is_calm();
        let longest_ttl = 1000 * plan.longest_ttl();
        let quarantine = if plan.forgets() { longest_ttl } else { 2000 * plan.settings.session };
        Self {
            forgotten: BTreeMap::new(),
            violations: Vec::new(),
            is_exclusive: plan.profile != Profile::Forward || plan.settings.kind.has_sessions(),
            is_calm,
            is_faultless: plan.is_faultless(),
            is_undisturbed: plan.is_undisturbed(),
            late: if is_calm { LATE } else { LATE_AFTER_FAULTS + longest_ttl / 2 + quarantine },
            calm_since: Some(0),
            longest_ttl,
            ttls: BTreeMap::new(),
            handles: BTreeMap::new(),
            fences: BTreeMap::new(),
            owners: BTreeMap::new(),
            stolen: BTreeMap::new(),
            restored: BTreeSet::new(),
            stealing: BTreeMap::new(),
            waiting: BTreeMap::new(),
            closed: BTreeSet::new(),
            acknowledged: BTreeMap::new(),
            unknown: BTreeMap::new(),
            free_since: None,
            found_late: None,
        }
    }

    /// A claim of a key is executed next that is free since then.
    pub(crate) fn before_claim(&mut self, free_since: Option<u64>) {
        self.free_since = free_since;
    }

    /// The store has executed a request.
    pub(crate) fn executed(&mut self, process: usize, request: &Request, reply: &Reply, now: u64) {
        let mut has_ttl = |token: Token, ttl: Duration| {
            let longest = self.ttls.entry(token).or_default();
            *longest = u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX).max(*longest);
        };
        match request {
            Request::Acquire(it) | Request::AcquireEach(it) => it.iter().for_each(|it| has_ttl(it.token, it.ttl)),
            Request::Renew(it) => it.iter().for_each(|it| has_ttl(it.token, it.ttl)),
            _ => {}
        }
        match (request, reply) {
            (Request::Acquire(claims), Reply::All(AcquiredAll::Granted(_))) => {
                for claim in claims {
                    self.granted(process, claim, now);
                }
            }
            (Request::AcquireEach(claims), Reply::Each(answers)) => {
                let granted = claims.iter().zip(answers).filter(|(_, it)| matches!(it, Some(Acquired::Granted(_))));
                granted.for_each(|(claim, _)| {
                    self.owners.insert(claim.token, process);
                });
            }
            (Request::Release(releases) | Request::ReleaseUnpinned(releases), Reply::Answers(answers)) => {
                for (release, _) in releases.iter().zip(answers).filter(|(_, it)| **it == Answer::Done) {
                    let is_foreign = self.owners.get(&release.token).is_some_and(|it| *it != process);
                    let is_theft = self.stealing.get(&(process, release.key.clone())).is_some_and(|it| *it > 0);
                    if is_foreign || is_theft {
                        self.stolen.insert(release.token, now);
                        self.restored.remove(&release.token);
                    }
                }
            }
            (Request::Renew(renewals), Reply::Answers(answers)) => {
                for (renewal, _) in renewals.iter().zip(answers).filter(|(_, it)| **it == Answer::Done) {
                    self.forgotten.remove(&renewal.token);
                }
            }
            (_, Reply::All(AcquiredAll::Held { key, free_in: Some(free_in) }))
                if free_in.as_micros() > u128::from(self.longest_ttl_of(key)) =>
            {
                self.violations.push(format!("`{key}` is held for {free_in:?}, longer than any ttl"));
            }
            _ => {}
        }
        self.free_since = None;
    }

    /// The store may have forgotten these tokens. It has the `restored` ones, whatever had become of them.
    pub(crate) fn forgets(&mut self, tokens: Vec<Token>, restored: Vec<Token>, is_noticed: bool) {
        for token in tokens {
            *self.forgotten.entry(token).or_insert(true) &= is_noticed;
        }
        self.restored.extend(restored);
    }

    /// Whether the store promises that nobody else is granted the lease while this one is trusted.
    fn is_promised(&self, token: Token) -> bool {
        !self.stolen.contains_key(&token) && self.forgotten.get(&token) != Some(&false)
    }

    /// The longest ttl of a lease or ticket with this key, in microseconds.
    fn longest_ttl_of(&self, key: &Key) -> u64 {
        if key.contains("/queue/") { self.longest_ttl.max(SHORTEST_TICKET) } else { self.longest_ttl }
    }

    fn granted(&mut self, process: usize, claim: &Claim, now: u64) {
        self.owners.insert(claim.token, process);
        let waiting = self.waiting.iter().filter(|((_, key), _)| *key == claim.key);
        let oldest = waiting.filter_map(|(_, it)| it.front()).map(|it| it.since).min();
        if let (Some(calm), Some(free), Some(oldest)) = (self.calm_since, self.free_since, oldest)
            && free.max(oldest).max(calm) + self.late < now
        {
            let waited = (now - free.max(oldest).max(calm)) / 1000;
            self.found_late = Some(format!("`{}` was free for {waited} ms while a caller waited", claim.key));
        }
    }

    pub(crate) fn take_late(&mut self) -> Option<String> {
        self.found_late.take()
    }

    /// A process was killed: nothing is left of its leases and callers.
    /// Returns the handles, which are dropped where the world is not locked.
    pub(crate) fn killed(&mut self, process: usize) -> Vec<Lease<Client>> {
        self.closed.remove(&process);
        self.waiting.retain(|(of, _), _| *of != process);
        self.stealing.retain(|(of, _), _| *of != process);
        self.handles.remove(&process).unwrap_or_default().into_iter().map(|it| it.lease).collect()
    }

    pub(crate) fn begin_theft(&mut self, process: usize, key: &Key) {
        *self.stealing.entry((process, key.clone())).or_default() += 1;
    }

    pub(crate) fn end_theft(&mut self, process: usize, key: &Key) {
        if let Some(thieves) = self.stealing.get_mut(&(process, key.clone())) {
            *thieves -= 1;
        }
    }

    pub(crate) fn was_stolen(&self, lease: &Lease<Client>) -> bool {
        self.stolen.contains_key(&token(lease))
    }

    pub(crate) fn acknowledged(&mut self, key: &Key) {
        *self.acknowledged.entry(key.clone()).or_default() += 1;
    }

    pub(crate) fn unknown(&mut self, key: &Key) {
        *self.unknown.entry(key.clone()).or_default() += 1;
    }
}

/// What the tasks report. Each runs in its process.
impl World {
    /// A task has got a lease. Returns the number of the handle.
    pub(crate) fn registers(&mut self, process: usize, lease: &Lease<Client>, kind: Kind) -> u64 {
        let (at, number) = (self.time_of(process), self.number());
        let (key, fence, token) = (lease.key().clone(), lease.fence().get(), token(lease));
        let is_trusted = trusts(lease);
        self.log_of(process, || format!("HAS `{key}` with fence {}, as {number}", short(fence)));
        self.counts.leases += 1;
        let last = self.judge.fences.get(&key).copied().unwrap_or(0);
        let is_promised = self.judge.is_exclusive && self.judge.is_promised(token) && !self.store.fences_may_fall();
        if is_trusted && is_promised && fence <= last {
            self.violation(format!("`{key}` was given out with fence {} after {}", short(fence), short(last)));
        }
        if !is_trusted {
            self.violation(format!("p{process} was given `{key}`, which it had lost"));
        }
        if is_trusted && self.judge.closed.contains(&process) {
            self.violation(format!("p{process} got `{key}` after it was closed"));
        }
        if last + 1 == fence {
            self.counts.handed_over += 1;
        }
        self.judge.fences.insert(key, fence.max(last));
        let handle =
            Handle { number, lease: observer(lease), token, fence, kind, is_over: false, is_lost: false, since: at };
        self.judge.handles.entry(process).or_default().push(handle);
        number
    }

    /// The task gives the lease up.
    pub(crate) fn gives_up(&mut self, process: usize, number: u64) {
        self.log_of(process, || format!("gives up {number}"));
        let mut handles = self.judge.handles.get_mut(&process).into_iter().flatten();
        if let Some(handle) = handles.find(|it| it.number == number) {
            handle.is_over = true;
        }
    }

    /// The lease has ended, as its task was told.
    pub(crate) fn has_ended(&mut self, process: usize, number: u64, how: &str) {
        let mut handles = self.judge.handles.get(&process).into_iter().flatten();
        if handles.find(|it| it.number == number).is_some_and(|it| trusts(&it.lease)) {
            self.violation(format!("p{process} trusts its lease {number} after {how}"));
        }
    }

    /// The process has closed its leases. If no fault was in the way, none of them is left.
    pub(crate) fn is_closed(&mut self, process: usize, well: bool) {
        self.judge.closed.insert(process);
        let handles = self.judge.handles.get(&process).into_iter().flatten();
        if let Some(it) = handles.into_iter().find(|it| !it.is_over && trusts(&it.lease)) {
            let what = format!("p{process} trusts lease {} after it was closed", it.number);
            self.violation(what);
        }
        let at = self.time_of(process);
        let of_process = |it: &Token| self.judge.owners.get(it) == Some(&process);
        let left: Vec<_> = self.held(at).into_iter().filter(|(_, token)| of_process(token)).collect();
        if self.judge.is_faultless && !(well && left.is_empty()) {
            self.violation(format!("p{process} has closed (well: {well}) and left {left:?}"));
        }
    }

    /// Whether the process trusts a lease of this name, the first part of its key.
    pub(crate) fn trusts_any(&self, process: usize, name: &str) -> bool {
        let mut handles = self.judge.handles.get(&process).into_iter().flatten();
        handles.any(|it| refusals::name(it.lease.key()) == name && trusts(&it.lease))
    }

    /// The leases of this key that the process trusts, but for those that were given up.
    pub(crate) fn trusted(&self, process: usize, key: &Key) -> Vec<(u64, u64)> {
        let handles = self.judge.handles.get(&process).into_iter().flatten();
        let trusted = handles.filter(|it| !it.is_over && it.lease.key() == key && trusts(&it.lease));
        trusted.map(|it| (it.number, it.fence)).collect()
    }

    /// A lease of this key that the process has lost, and that was handed over by the holder with this fence: a theft
    /// from that holder may not end it.
    pub(crate) fn lost_with_fence_after(&self, process: usize, key: &Key, fence: u64) -> Option<u64> {
        let handles = self.judge.handles.get(&process).into_iter().flatten();
        let of_key = |it: &&Handle| self.judge.is_undisturbed && !it.is_over && it.lease.key() == key;
        let mut handles = handles.filter(of_key);
        let is_next = |it: &&Handle| it.fence > fence && it.fence < fence + FENCES && !trusts(&it.lease);
        handles.find(is_next).map(|it| it.number)
    }

    /// A caller begins to wait. Returns its number.
    pub(crate) fn waits(&mut self, process: usize, key: &Key, for_ms: u64) -> u64 {
        let (number, since) = (self.number(), self.time_of(process));
        let waiting = Waiting { number, since, until: since + 1000 * for_ms };
        self.judge.waiting.entry((process, key.clone())).or_default().push_back(waiting);
        number
    }

    /// A caller waits no longer.
    pub(crate) fn leaves(&mut self, process: usize, key: &Key, number: u64) {
        if let Some(queue) = self.judge.waiting.get_mut(&(process, key.clone())) {
            queue.retain(|it| it.number != number);
        }
    }

    /// A caller has got what it waited for, and leaves.
    pub(crate) fn is_served(&mut self, process: usize, key: &Key, number: u64) {
        let at = self.time_of(process);
        let queue = self.judge.waiting.get(&(process, key.clone()));
        let earlier = queue.and_then(|it| it.front().filter(|it| it.number != number && it.until > at + 1_000_000));
        if let Some(Waiting { number: earlier, .. }) = earlier.copied() {
            self.violation(format!("caller {number} of p{process} got `{key}` before caller {earlier}"));
        }
        self.leaves(process, key, number);
    }

    /// Compares the leases of a process with the store, at the process's own time.
    pub(crate) fn check(&mut self, process: usize) {
        let at = self.time_of(process);
        let mut found = Vec::new();
        let mut handles = self.judge.handles.remove(&process).unwrap_or_default();
        let mut trusted: BTreeMap<Key, u64> = BTreeMap::new();
        for it in &mut handles {
            let (key, is_trusted) = (it.lease.key(), trusts(&it.lease));
            if is_trusted && it.is_lost {
                found.push(format!("p{process} trusts `{key}` again that it had lost, lease {}", it.number));
            }
            it.is_lost |= !is_trusted;
            let (stolen, is_promised) = (self.judge.stolen.get(&it.token), self.judge.is_promised(it.token));
            let ttl = self.judge.ttls.get(&it.token).copied().unwrap_or(self.judge.longest_ttl);
            let is_restored = self.judge.restored.contains(&it.token);
            if is_trusted && !is_restored && stolen.is_some_and(|it| at > it + ttl) {
                found.push(format!("p{process} still trusts lease {} of `{key}`, which was stolen", it.number));
            }
            if !is_trusted || it.is_over || !is_promised {
                continue;
            }
            if let Some(other) = trusted.insert(key.clone(), it.number)
                && self.judge.is_exclusive
            {
                found.push(format!("p{process} trusts two leases of `{key}`, {other} and {}", it.number));
            }
            let is_forgotten = self.judge.forgotten.contains_key(&it.token);
            if self.judge.is_exclusive && !is_forgotten && !self.holds(key, it.token, at) {
                let row = self
                    .store
                    .expires_in(key, at)
                    .map_or_else(|| "the row has no token".to_owned(), |it| format!("the row expires in {it} µs"));
                found.push(format!("p{process} trusts lease {} of `{key}` without its row; {row}", it.number));
                it.is_over = true;
            }
        }
        handles.retain(|it| !it.is_lost || at < it.since + WATCHED_FOR);
        self.judge.handles.insert(process, handles);
        if self.judge.is_exclusive {
            found.extend(self.shared_wrongly(at));
        }
        for what in found {
            self.violation(what);
        }
    }

    /// The leases that are trusted at this time, also by processes whose clocks stand elsewhere.
    fn trusted_at(&self, at: u64) -> impl Iterator<Item = (usize, &Handle)> {
        let handles = self.judge.handles.iter().flat_map(|(process, it)| it.iter().map(|it| (*process, it)));
        handles.filter(move |(process, it)| {
            let until = || self.clock(*process).time(Instant::from_std(it.lease.trusted_until()));
            !it.is_over && !it.is_lost && it.since <= at && until() > at
        })
    }

    /// Finds grants of leases that others still trust.
    pub(crate) fn find_doubles(&mut self, request: &Request, reply: &Reply) {
        let granted: Vec<_> = match (request, reply) {
            (Request::Acquire(claims), Reply::All(AcquiredAll::Granted(_))) => claims.iter().collect(),
            (Request::AcquireEach(claims), Reply::Each(answers)) => {
                let answers = claims.iter().zip(answers);
                answers.filter(|(_, it)| matches!(it, Some(Acquired::Granted(_)))).map(|(it, _)| it).collect()
            }
            _ => return,
        };
        let mut found = Vec::new();
        let mut excused = 0;
        for (process, it) in self.trusted_at(self.now) {
            let is_same = |claim: &&Claim| claim.key == *it.lease.key() && claim.token != it.token;
            if !granted.iter().any(is_same) || self.judge.stolen.contains_key(&it.token) {
                continue;
            }
            if self.judge.is_exclusive && self.judge.is_promised(it.token) {
                found.push(format!("`{}` is granted while p{process} trusts lease {}", it.lease.key(), it.number));
            } else {
                excused += 1;
            }
        }
        self.counts.doubles += excused;
        for what in found {
            self.violation(what);
        }
    }

    /// Readers beside a writer, and more permits than there are.
    fn shared_wrongly(&self, at: u64) -> Vec<String> {
        let mut held: BTreeMap<&Kind, usize> = BTreeMap::new();
        for (_, it) in self.trusted_at(at).filter(|(_, it)| it.kind != Kind::Alone) {
            if self.judge.is_promised(it.token) {
                *held.entry(&it.kind).or_default() += 1;
            }
        }
        let mut found = Vec::new();
        let (readers, writers) = (held.get(&Kind::Reader).unwrap_or(&0), held.get(&Kind::Writer).unwrap_or(&0));
        if *writers > 1 || *writers == 1 && *readers > 0 {
            found.push(format!("{writers} writers beside {readers} readers"));
        }
        for (kind, count) in held {
            if let Kind::Permit(of) = kind
                && count > *of
            {
                found.push(format!("{count} permits of {of} are held"));
            }
        }
        found
    }

    /// What the data says at the end: every acknowledged write is there, and no other but those without an answer.
    pub(crate) fn check_data(&mut self) {
        for key in ["a", "b", "f"].map(Key::from) {
            let written = self.store.value(&key);
            let acknowledged = self.judge.acknowledged.get(&key).copied().unwrap_or(0);
            let unknown = self.judge.unknown.get(&key).copied().unwrap_or(0);
            if written < acknowledged || written > acknowledged + unknown {
                let what = format!("{acknowledged} writes of `{key}` were acknowledged and {unknown} not answered");
                self.violation(format!("{what}, but {written} are there"));
            }
        }
    }
}

/// A fence without the digits that all have in common.
pub(crate) fn short(fence: u64) -> u64 {
    fence % 10_000_000_000
}
