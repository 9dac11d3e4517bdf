//! Everything outside of the processes: time, the network between them and the store, and the record of a run.
//!
//! Time is one number, in microseconds since the beginning of the run. What happens is an event at a time; events of
//! one time happen in the order in which they were planned.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::{
    Key,
    store::{AcquiredAll, Claim, Release, Renewal, Token},
};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::{
    agent::{Agent, Prepared, Timer, of_session},
    books::Books,
    judge::{Judge, short},
    plan::{Fault, Link, Op, Plan, Settings},
    refusals::Refusals,
    sessions::{SessionId, Sessions},
    store::{Reply, Request, Store, TxId},
    tables::{Answer, Query, Refusal},
};

/// How long the server keeps a transaction in which nothing is sent.
const IDLE_LIMIT: u64 = 5_000_000;

/// What happens at a time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A call reaches the store. The first arrival of a call is answered.
    Arrives { call: u64, is_first: bool },
    /// The answer of a call reaches its process, or its connection breaks.
    IsAnswered { call: u64 },
    /// A process hears that a key was released.
    Freed { process: usize, key: Key },
    /// The server ends a transaction whose client has gone, or its connection.
    Ends(TxId),
    /// A statement that still waits for a lock gives up.
    GivesUp { call: u64 },
    /// The server ends a transaction in which nothing was sent for long.
    IdlesAt(TxId),
    /// A session ends, unless it lives longer by now.
    SessionEnds(SessionId),
    /// A follower reports to the leader that the client of a session lives.
    Reports(SessionId),
    /// The least holding time of a lease ends.
    MinHoldEnds,
    /// The client of a session has something to do.
    Agent { process: usize, generation: u32, timer: Timer },
    /// One of the faults of the plan.
    Fault(Fault),
    /// A process that was stopped goes on.
    Continues { process: usize },
    /// A process that was killed starts again.
    Restarts { process: usize, tasks: Vec<Vec<Op>> },
}

/// A request on its way to the store, or its answer on its way back.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) process: usize,
    generation: u32,
    pub(crate) request: Request,
    pub(crate) sent: u64,
    back: u64,
    pub(crate) outcome: Outcome,
    pub(crate) answer: Option<oneshot::Sender<Option<Reply>>>,
    pub(crate) reply: Option<Reply>,
    /// The session that it belongs to, and whether it makes it live longer. 0 for none.
    pub(crate) session: SessionId,
    pub(crate) extends: bool,
}

/// What becomes of the answer of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Answered,
    /// The caller learns that the connection broke.
    Broken,
    /// The caller learns nothing.
    Silent,
}

/// What the world knows of one process.
#[derive(Debug)]
pub(crate) struct Place {
    /// The number of times that the process was started. Messages of an earlier one reach no later one.
    pub(crate) generation: u32,
    pub(crate) link: Link,
    pub(crate) is_stopped: bool,
    clock: Clock,
    /// Told when the process has sent something.
    pub(crate) sent: Arc<Notify>,
    /// Waits for releases, by key.
    listeners: BTreeMap<Key, Vec<oneshot::Sender<()>>>,
    /// Its client of a store with sessions.
    pub(crate) agent: Agent,
}

/// The monotonic clock of a process, which starts with it and has a rate of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// What the clock shows at the start.
    began: Instant,
    /// The time of the run at the start.
    at: u64,
    /// How many parts in a million the clock is fast.
    fast_ppm: i64,
}

impl Clock {
    pub(crate) fn new(began: Instant, at: u64, fast_ppm: i64) -> Self {
        Self { began, at, fast_ppm }
    }

    /// What the clock shows at this time of the run.
    pub(crate) fn shows(&self, at: u64) -> Instant {
        let elapsed = i128::from(at.saturating_sub(self.at)) * i128::from(1_000_000 + self.fast_ppm) / 1_000_000;
        self.began + Duration::from_micros(u64::try_from(elapsed).unwrap_or(0))
    }

    /// The time of the run at which the clock shows this.
    pub(crate) fn time(&self, shown: Instant) -> u64 {
        let elapsed = i128::try_from(shown.saturating_duration_since(self.began).as_micros()).unwrap_or(i128::MAX);
        self.at + u64::try_from(elapsed * 1_000_000 / i128::from(1_000_000 + self.fast_ppm)).unwrap_or(u64::MAX)
    }
}

/// How much was done in a run.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    /// Calls of the processes to the store.
    pub calls: u64,
    /// Calls whose request or answer was lost.
    pub lost: u64,
    /// Leases that a task got.
    pub leases: u64,
    /// Of those, leases that were handed over by a holder of the same process.
    pub handed_over: u64,
    /// Commits that succeeded, that were refused, and that were not answered.
    pub commits: [u64; 3],
    /// Leases that their holder found lost.
    pub losses: u64,
    /// Grants of a lease that a holder still trusted, where the store does not promise that there is none.
    pub doubles: u64,
    /// Calls of `Stock::take` that took, and updates of rows that were written.
    pub takes: u64,
    pub updates: u64,
    /// Saves that found another version.
    pub conflicts: u64,
    /// Batches that took, and commits on connections of pools, whose answer was lost.
    pub unanswered: [u64; 2],
}

impl Counts {
    /// The answer to this query does not reach its caller.
    pub(crate) fn has_lost(&mut self, query: &Query, answer: &Answer) {
        match (query, answer) {
            (Query::TakeBatch { .. }, Answer::Portion(Some(_))) => self.unanswered[0] += 1,
            (Query::Commit, Answer::Done) => self.unanswered[1] += 1,
            _ => {}
        }
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        let Self { calls, lost, leases, handed_over, commits, losses, doubles, takes, updates, conflicts, unanswered } =
            other;
        self.calls += calls;
        self.lost += lost;
        self.leases += leases;
        self.handed_over += handed_over;
        self.losses += losses;
        self.doubles += doubles;
        self.takes += takes;
        self.updates += updates;
        self.conflicts += conflicts;
        let sums = self.commits.iter_mut().chain(&mut self.unanswered);
        for (sum, it) in sums.zip(commits.iter().chain(unanswered)) {
            *sum += it;
        }
    }
}

/// The world of one run. Clones are the same world.
#[derive(Debug, Clone)]
pub(crate) struct Shared(Arc<Mutex<World>>);

impl Shared {
    pub(crate) fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The world of one run.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now: u64,
    planned: BTreeMap<(u64, u64), Event>,
    /// The last number that was given to an event, a call, a transaction or a lease.
    last_number: u64,
    pub(crate) random: fastrand::Rng,
    pub(crate) settings: Settings,
    pub(crate) store: Store,
    /// The servers of a store with sessions. Otherwise the leases are in `store`.
    pub(crate) sessions: Option<Sessions>,
    pub(crate) places: Vec<Place>,
    calls: BTreeMap<u64, Call>,
    /// Calls that wait in the store for the end of a transaction.
    blocked: Vec<u64>,
    /// Calls whose callers learn nothing. Their senders are kept, because the drop of one is an answer.
    silenced: Vec<oneshot::Sender<Option<Reply>>>,
    /// When the last message of each transaction arrives: messages of one connection do not overtake each other.
    arrivals: BTreeMap<TxId, u64>,
    /// The connections of pools, with their processes.
    conns: BTreeMap<TxId, usize>,
    /// The connections of pools over which nothing comes any more, and those to end after the statement that waits.
    silent: BTreeSet<TxId>,
    closing: BTreeSet<TxId>,
    pub(crate) judge: Judge,
    pub(crate) books: Books,
    pub(crate) refusals: Refusals,
    pub(crate) counts: Counts,
    /// A digest of all that was sent and answered, to compare two runs.
    pub(crate) digest: u64,
    timeline: Option<Vec<String>>,
}

impl World {
    pub(crate) fn new(plan: &Plan, judge: Judge, is_logged: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(plan.seed ^ 0xfeed);
        Self {
            now: 0,
            planned: BTreeMap::new(),
            last_number: 0,
            store: Store::new(random.fork(), plan),
            random,
            settings: plan.settings,
            sessions: plan.settings.kind.has_sessions().then(|| {
                let Settings { kind, session, .. } = plan.settings;
                Sessions::new(kind, 1000 * session)
            }),
            places: Vec::new(),
            calls: BTreeMap::new(),
            blocked: Vec::new(),
            silenced: Vec::new(),
            arrivals: BTreeMap::new(),
            conns: BTreeMap::new(),
            silent: BTreeSet::new(),
            closing: BTreeSet::new(),
            judge,
            books: Books::of(plan),
            refusals: Refusals::default(),
            counts: Counts::default(),
            digest: plan.seed,
            timeline: is_logged.then(Vec::new),
        }
    }

    pub(crate) fn add_process(&mut self, link: Link) {
        let clock = Clock { began: Instant::now(), at: 0, fast_ppm: 0 };
        self.places.push(Place {
            generation: 0,
            link,
            is_stopped: false,
            clock,
            sent: Arc::default(),
            listeners: BTreeMap::new(),
            agent: Agent::default(),
        });
    }

    /// A process has started, with this clock.
    pub(crate) fn started(&mut self, process: usize, clock: Clock) {
        let place = &mut self.places[process];
        place.generation += 1;
        place.clock = clock;
        place.sent = Arc::default();
        place.listeners.clear();
        if self.sessions.is_some() {
            self.starts_agent(process);
        }
    }

    pub(crate) fn clock(&self, process: usize) -> Clock {
        self.places[process].clock
    }

    /// A fault has begun or ended.
    pub(crate) fn note_fault(&mut self) {
        let is_over = self.places.iter().all(|it| it.link == Link::GOOD && !it.is_stopped);
        self.judge.calm_since = is_over.then_some(self.now);
    }

    /// A number that nothing else has.
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn plan(&mut self, at: u64, event: Event) {
        let number = self.number();
        self.planned.insert((at.max(self.now), number), event);
    }

    pub(crate) fn next_event(&self) -> Option<u64> {
        self.planned.keys().next().map(|(at, _)| *at)
    }

    /// The next event that is due.
    pub(crate) fn take_due(&mut self) -> Option<Event> {
        let first = self.planned.first_entry().filter(|it| it.key().0 <= self.now)?;
        Some(first.remove())
    }

    /// The time of the run on the clock of a process that runs now.
    pub(crate) fn time_of(&self, process: usize) -> u64 {
        self.places[process].clock.time(Instant::now()).max(self.now)
    }

    /// A violation of what lockkit promises.
    pub(crate) fn violation(&mut self, mut what: String) {
        self.log("!", || format!("VIOLATION: {what}"));
        let now = self.now;
        let _ = write!(what, " (at {})", shown(now));
        self.judge.violations.push(what);
    }

    pub(crate) fn log(&mut self, whose: &str, what: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(timeline) = &mut self.timeline {
            timeline.push(format!("{:>10} {whose:<6} {}", shown(now), what()));
        }
    }

    /// What a process does at its own time.
    pub(crate) fn log_of(&mut self, process: usize, what: impl FnOnce() -> String) {
        let at = self.time_of(process);
        self.log_at(at, process, what);
    }

    fn log_at(&mut self, at: u64, process: usize, what: impl FnOnce() -> String) {
        if let Some(timeline) = &mut self.timeline {
            timeline.push(format!("{:>10} p{process:<5} {}", shown(at), what()));
        }
    }

    pub(crate) fn take_timeline(&mut self) -> Vec<String> {
        self.timeline.take().unwrap_or_default()
    }

    fn digest(&mut self, values: [u64; 3]) {
        for value in values {
            self.digest = (self.digest.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    /// A process sends a request. The answer is `None` if the connection breaks.
    pub(crate) fn send(
        &mut self,
        process: usize,
        generation: u32,
        request: Request,
        answer: oneshot::Sender<Option<Reply>>,
    ) {
        let at = self.time_of(process);
        self.send_at(process, generation, request, answer, at);
    }

    pub(crate) fn send_at(
        &mut self,
        process: usize,
        generation: u32,
        request: Request,
        answer: oneshot::Sender<Option<Reply>>,
        at: u64,
    ) {
        // A process that was killed may still run while it is taken down.
        if self.places[process].generation != generation {
            self.silenced.push(answer);
            return;
        }
        self.counts.calls += 1;
        self.places[process].sent.notify_one();
        let prepared = if self.sessions.is_some() && request.tx().is_none() {
            self.prepares(process, request, answer, at)
        } else {
            Prepared::Send(request, answer)
        };
        match prepared {
            Prepared::Send(request, answer) => self.transmit(process, request, Some(answer), at),
            Prepared::Answer(reply, answer) => {
                let call = self.number();
                let (generation, outcome, answer) = (self.places[process].generation, Outcome::Answered, Some(answer));
                let (request, reply) = (Request::Ping, Some(reply));
                let (sent, back, session, extends) = (at, 0, 0, false);
                let local = Call { process, generation, request, sent, back, outcome, answer, reply, session, extends };
                self.calls.insert(call, local);
                self.plan(at, Event::IsAnswered { call });
            }
            Prepared::Parked => {}
        }
    }

    /// Sends a request to the store.
    pub(crate) fn transmit(
        &mut self,
        process: usize,
        request: Request,
        answer: Option<oneshot::Sender<Option<Reply>>>,
        at: u64,
    ) {
        let mut link = self.places[process].link;
        let generation = self.places[process].generation;
        let session = match (&self.sessions, &request) {
            (Some(_), Request::Open(id)) => *id,
            (Some(_), request) if request.tx().is_none() => self.places[process].agent.session().unwrap_or(0),
            _ => 0,
        };
        let silence = if session == 0 { 0 } else { self.settings.session * 1000 * 3 / 8 };
        if session != 0 {
            link = of_session(link, self.settings.session * 1000);
        }
        if matches!(&request, Request::Query(_, query) if query.is_delicate()) {
            link = link.losing_more();
        }
        let extends = session != 0 && self.extends_session(process, &request, at);
        let (call, there, back) = (self.number(), self.travel(link), self.travel(link));
        let chance = |random: &mut fastrand::Rng, of: f64| of > 0.0 && random.f64() < of;
        let conn = if let Request::Query(conn, _) = request { Some(conn) } else { None };
        let is_silent = conn.is_some_and(|it| self.silent.contains(&it));
        let is_lost = is_silent || chance(&mut self.random, link.lost_requests);
        let outcome = if is_lost || chance(&mut self.random, link.lost_answers) {
            if is_silent || chance(&mut self.random, link.silent) { Outcome::Silent } else { Outcome::Broken }
        } else {
            Outcome::Answered
        };
        self.silent.extend(conn.filter(|_| outcome == Outcome::Silent));
        self.counts.lost += u64::from(outcome != Outcome::Answered && answer.is_some());
        self.refusals.sent(process, &request, at);
        self.digest([at, call, process as u64]);
        let fate = match outcome {
            Outcome::Answered => "",
            _ if is_lost => ", lost",
            _ => ", answer lost",
        };
        self.log_at(at, process, || format!("sends  #{call} {}{fate}", brief(&request)));
        let mut arrives = at + there;
        // The messages of a connection arrive in their order.
        if let Some(lane) = request.tx().or((session != 0).then_some(u64::MAX - process as u64)) {
            let last = self.arrivals.entry(lane).or_default();
            arrives = arrives.max(*last + 1);
            *last = arrives;
        }
        if chance(&mut self.random, link.repeated) && request.may_be_repeated() {
            let again = arrives + self.travel(link) + self.travel(link);
            let second = self.number();
            let request = request.clone();
            let (sent, outcome, answer, reply) = (at, Outcome::Silent, None, None);
            let repeated = Call { process, generation, request, sent, back, outcome, answer, reply, session, extends };
            self.calls.insert(second, repeated);
            self.plan(again, Event::Arrives { call: second, is_first: false });
        }
        // Something between them may still have a request when its connection to the caller breaks.
        if conn.is_some() && is_lost && outcome == Outcome::Broken && self.random.bool() {
            let late = arrives + self.random.u64(..4 * link.slow_us.max(link.usual_us));
            self.arrivals.extend(conn.map(|it| (it, late)));
            let second = self.number();
            let request = request.clone();
            let (sent, outcome, answer, reply) = (at, Outcome::Silent, None, None);
            let late_call = Call { process, generation, request, sent, back, outcome, answer, reply, session, extends };
            self.calls.insert(second, late_call);
            self.plan(late, Event::Arrives { call: second, is_first: false });
        }
        let back = if outcome == Outcome::Silent { back + silence } else { back };
        let (sent, reply) = (at, None);
        self.calls
            .insert(call, Call { process, generation, request, sent, back, outcome, answer, reply, session, extends });
        if is_lost {
            self.plan(arrives + back, Event::IsAnswered { call });
        } else {
            self.plan(arrives, Event::Arrives { call, is_first: true });
        }
    }

    /// How long one message travels.
    fn travel(&mut self, link: Link) -> u64 {
        let is_slow = link.slow > 0.0 && self.random.f64() < link.slow;
        let most = if is_slow { link.slow_us } else { link.usual_us };
        self.random.u64(100..=most.max(100))
    }

    /// A call reaches the store.
    pub(crate) fn arrives(&mut self, call: u64, is_first: bool) {
        if self.calls.get(&call).is_some_and(|it| it.session != 0) {
            self.arrives_in_session(call);
            return;
        }
        let Some(Call { request, process, back, outcome, .. }) = self.calls.get(&call) else {
            return self.blocked.retain(|it| *it != call);
        };
        let (request, process, back, is_answered) = (request.clone(), *process, *back, *outcome == Outcome::Answered);
        if let (false, Request::Acquire(claims)) = (is_first, &request)
            && !claims.iter().all(|it| self.store.holds(&it.key, it.token, self.now))
        {
            self.calls.remove(&call);
            return;
        }
        if let Some(Claim { key, .. }) = claimed(&request) {
            self.judge.before_claim(self.store.free_since(key, self.now));
        }
        let conn = if let Request::Query(conn, _) = request { Some(conn) } else { None };
        // The statements of a connection are executed one after the other.
        let is_behind = conn.is_some_and(|it| self.waits_on(it).is_some_and(|first| first != call));
        let mut executed = if is_behind { None } else { self.store.execute(&request, self.now) };
        if executed.is_some() && self.is_resent(process, &request) {
            executed = self.store.execute(&request, self.now);
        }
        let Some(reply) = executed else {
            if !self.blocked.contains(&call) {
                self.log("store", || format!("blocks #{call}"));
                self.blocked.push(call);
                if let Request::Query(_, Query::Lock { wait: Some(wait), .. }) = request {
                    self.plan(self.now + wait, Event::GivesUp { call });
                }
            }
            return;
        };
        self.blocked.retain(|it| *it != call);
        self.log("store", || format!("does   #{call} of p{process}: {} → {}", brief(&request), said(&reply)));
        self.digest([self.now, call, 1]);
        self.judge.executed(process, &request, &reply, self.now);
        if let (Request::Query(_, query), Reply::Query(answer)) = (&request, &reply) {
            self.queried(query, answer, is_answered);
        }
        self.find_doubles(&request, &reply);
        self.after_change();
        if let Request::Begin(tx) = request {
            self.plan(self.now + IDLE_LIMIT, Event::IdlesAt(tx));
        }
        if is_first && let Some(it) = self.calls.get_mut(&call) {
            it.reply = Some(reply);
            self.plan(self.now + back, Event::IsAnswered { call });
        } else {
            self.calls.remove(&call);
        }
        if let Some(conn) = conn {
            self.end_if_closing(conn);
        }
        if let Request::Commit(..) | Request::RollBack(_) | Request::Query(..) = request {
            self.unblock();
        }
    }

    /// Whether a proxy lost the answer to a statement of lockkit that proves what it did, and sends it again. The proxy
    /// answers with the second answer.
    fn is_resent(&mut self, process: usize, request: &Request) -> bool {
        let proves = matches!(request, Request::Query(_, Query::TakeBatch { .. }));
        let repeated = self.places[process].link.repeated;
        proves && repeated > 0.0 && self.random.f64() < repeated
    }

    /// The call that waits on this connection of a pool.
    fn waits_on(&self, conn: TxId) -> Option<u64> {
        let is_of = |call: &&u64| {
            self.calls.get(call).is_some_and(|it| matches!(it.request, Request::Query(of, _) if of == conn))
        };
        self.blocked.iter().find(is_of).copied()
    }

    /// A statement has waited for a lock as long as it may.
    pub(crate) fn lock_times_out(&mut self, call: u64) {
        let Some(Call { request: Request::Query(conn, _), back, .. }) = self.calls.get(&call) else { return };
        let (conn, back) = (*conn, *back);
        if self.waits_on(conn) != Some(call) {
            return;
        }
        self.blocked.retain(|it| *it != call);
        self.log("store", || format!("gives up #{call}"));
        let refused = self.store.tables.refuse(conn, Refusal::LockTimeout);
        if let Some(it) = self.calls.get_mut(&call) {
            it.reply = Some(Reply::Query(refused));
            self.plan(self.now + back, Event::IsAnswered { call });
        }
        self.end_if_closing(conn);
        self.unblock();
    }

    /// Ends a connection whose client has gone, once no statement waits on it.
    fn end_if_closing(&mut self, conn: TxId) {
        if self.closing.contains(&conn) && self.waits_on(conn).is_none() {
            self.end(conn);
        }
    }

    fn arrives_in_session(&mut self, call: u64) {
        let Some(mut it) = self.calls.remove(&call) else { return };
        if let (Some(Claim { key, .. }), Some(sessions)) = (claimed(&it.request), &self.sessions) {
            self.judge.before_claim(sessions.free_since(key));
        }
        let (process, back) = (it.process, it.back);
        let reply = self.reaches_servers(&it).unwrap_or(Reply::Expired);
        self.log("store", || format!("does   #{call} of p{process}: {} → {}", brief(&it.request), said(&reply)));
        self.digest([self.now, call, 1]);
        self.judge.executed(process, &it.request, &reply, self.now);
        self.find_doubles(&it.request, &reply);
        self.after_change();
        it.reply = Some(reply);
        self.calls.insert(call, it);
        self.plan(self.now + back, Event::IsAnswered { call });
    }

    pub(crate) fn session_ends(&mut self, id: SessionId) {
        let now = self.now;
        let Some(sessions) = &mut self.sessions else { return };
        match sessions.expires(id) {
            Some(expires) if expires > now => self.plan(expires, Event::SessionEnds(id)),
            Some(_) => {
                sessions.ends(id, now);
                self.log("store", || format!("ends session {id}"));
                self.after_change();
            }
            None => {}
        }
    }

    pub(crate) fn reports(&mut self, id: SessionId) {
        let now = self.now;
        if let Some(sessions) = &mut self.sessions {
            sessions.reports(id, now);
        }
    }

    pub(crate) fn min_hold_ends(&mut self) {
        let now = self.now;
        if let Some(sessions) = &mut self.sessions {
            sessions.end_min_holds(now);
        }
        self.after_change();
    }

    /// The calls on such a connection get no answers.
    pub(crate) fn break_calls(&mut self, such: impl Fn(&Call) -> bool) {
        let calls = self.calls.iter_mut().filter(|(_, it)| it.outcome == Outcome::Answered && such(it));
        let broken: Vec<_> = calls
            .map(|(call, it)| {
                it.outcome = Outcome::Broken;
                *call
            })
            .collect();
        for call in broken {
            self.plan(self.now, Event::IsAnswered { call });
        }
    }

    /// The process of a call.
    pub(crate) fn process_of(&self, call: u64) -> Option<usize> {
        self.calls.get(&call).map(|it| it.process)
    }

    /// Whether the servers have answered the call of a session.
    pub(crate) fn is_answered(&self, call: u64) -> bool {
        self.calls.get(&call).is_some_and(|it| it.session != 0 && it.outcome == Outcome::Answered)
    }

    /// Whether the token holds the lease at this time.
    pub(crate) fn holds(&self, key: &Key, token: Token, at: u64) -> bool {
        self.sessions.as_ref().map_or_else(|| self.store.holds(key, token, at), |it| it.holds(key, token))
    }

    /// The leases that are held at this time, and the claims that wait in the store.
    pub(crate) fn held(&self, at: u64) -> Vec<(Key, Token)> {
        self.sessions.as_ref().map_or_else(|| self.store.held(at), Sessions::held)
    }

    /// Notes who holds what, notifies listeners, and collects what the store found wrong.
    fn after_change(&mut self) {
        self.sees_holders(self.now);
        let mut freed = self.store.take_freed();
        freed.extend(self.sessions.iter_mut().flat_map(Sessions::take_freed));
        for key in freed {
            for process in 0..self.places.len() {
                if self.random.f64() < self.settings.notifies {
                    let delay = self.random.u64(100..20_000);
                    self.plan(self.now + delay, Event::Freed { process, key: key.clone() });
                }
            }
        }
        let found = self.store.take_violations().into_iter().chain(self.judge.take_late());
        for what in found.collect::<Vec<_>>() {
            self.violation(what);
        }
    }

    /// A transaction has ended, so what waited for it is tried again.
    fn unblock(&mut self) {
        for call in self.blocked.clone() {
            if self.blocked.contains(&call) {
                self.arrives(call, true);
            }
        }
    }

    /// The server ends a transaction.
    pub(crate) fn end(&mut self, tx: TxId) {
        if self.store.is_open(tx) {
            self.log("store", || format!("ends transaction {tx}, whose client has gone"));
        }
        // The server notices it between two statements.
        if self.waits_on(tx).is_some() {
            self.closing.insert(tx);
            return;
        }
        self.store.execute(&Request::RollBack(tx), self.now);
        self.store.tables.end(tx);
        self.unblock();
    }

    pub(crate) fn idles(&mut self, tx: TxId) {
        if !self.store.is_open(tx) {
            return;
        }
        let until = self.arrivals.get(&tx).copied().unwrap_or(0) + IDLE_LIMIT;
        if until > self.now {
            self.plan(until, Event::IdlesAt(tx));
        } else {
            self.end(tx);
        }
    }

    /// The client of a transaction has closed its connection.
    pub(crate) fn abandon(&mut self, tx: TxId) {
        let (delay, last) = (self.random.u64(100..60_000), self.arrivals.get(&tx).copied().unwrap_or(0));
        self.plan(self.now.max(last) + delay, Event::Ends(tx));
    }

    /// A process opens a connection of its pool. Returns its number.
    pub(crate) fn opens(&mut self, process: usize) -> TxId {
        let conn = self.number();
        self.conns.insert(conn, process);
        conn
    }

    /// A process has closed a connection of its pool.
    pub(crate) fn closes(&mut self, conn: TxId) {
        if self.conns.remove(&conn).is_some() {
            self.abandon(conn);
        }
    }

    /// A process has ended, and its connections with it.
    pub(crate) fn closes_all(&mut self, process: usize) {
        let conns: Vec<_> = self.conns.iter().filter(|(_, it)| **it == process).map(|(conn, _)| *conn).collect();
        for conn in conns {
            self.closes(conn);
        }
    }

    /// The server restarts: transactions end, and calls in flight break.
    pub(crate) fn restart_store(&mut self) {
        self.store.restart();
        self.blocked.clear();
        self.closing.clear();
        let now = self.now;
        if let Some(sessions) = &mut self.sessions {
            sessions.elects(now);
        }
        for process in 0..self.places.len() {
            if !self.places[process].is_stopped {
                self.breaks_connection(process, None);
            }
        }
        // A server that ends may say so instead of sending the answer to what it has executed.
        for it in self.calls.values_mut() {
            if let (Request::Query(_, query), Outcome::Answered, Some(reply)) = (&it.request, it.outcome, &mut it.reply)
                && self.random.bool()
            {
                if let Reply::Query(answer) = reply {
                    self.counts.has_lost(query, answer);
                }
                *reply = Reply::Query(Answer::Refused(Refusal::Gone));
            }
        }
        let broken: Vec<_> = self.calls.iter().filter(|(_, it)| it.reply.is_none()).map(|(call, _)| *call).collect();
        for call in broken {
            if let Some(it) = self.calls.get_mut(&call) {
                it.outcome = Outcome::Broken;
                self.plan(self.now + 1000, Event::IsAnswered { call });
            }
        }
    }

    /// The answer of a call arrives.
    pub(crate) fn answers(&mut self, call: u64) {
        let Some(mut it) = self.calls.remove(&call) else { return };
        let process = it.process;
        if self.places[process].generation != it.generation || it.answer.is_none() && it.session == 0 {
            return;
        }
        self.digest([self.now, call, 2]);
        if it.session != 0 {
            (it.reply, it.outcome) = (Some(self.hears(process, &it)), Outcome::Answered);
        }
        self.refusals.ended(process, &it.request, it.outcome, self.now);
        let Call { outcome, answer: Some(answer), reply, .. } = it else { return };
        match outcome {
            Outcome::Silent => self.silenced.push(answer),
            Outcome::Broken => drop(answer.send(None)),
            Outcome::Answered => drop(answer.send(reply)),
        }
    }

    /// Completes when the store reports a release of the key to this process. `None` if it reports none.
    pub(crate) fn listen(&mut self, process: usize, key: &Key) -> Option<oneshot::Receiver<()>> {
        (self.settings.notifies > 0.0).then(|| {
            let (sender, receiver) = oneshot::channel();
            self.places[process].listeners.entry(key.clone()).or_default().push(sender);
            receiver
        })
    }

    pub(crate) fn freed(&mut self, process: usize, key: &Key) {
        for listener in self.places[process].listeners.remove(key).unwrap_or_default() {
            // One that waits no longer needs no report.
            let _ = listener.send(());
        }
    }
}

fn claimed(request: &Request) -> Option<&Claim> {
    match request {
        Request::Acquire(claims) if claims.len() == 1 => claims.first(),
        _ => None,
    }
}

/// A time of the run in milliseconds, with three places.
pub(crate) fn shown(at: u64) -> String {
    format!("{}.{:03}", at / 1000, at % 1000)
}

/// The request in few words.
fn brief(request: &Request) -> String {
    let claims = |it: &[Claim]| it.iter().map(|it| (it.key.clone(), it.token)).collect::<Vec<_>>();
    let renewals = |it: &[Renewal]| it.iter().map(|it| (it.key.clone(), it.token)).collect::<Vec<_>>();
    let releases = |it: &[Release]| it.iter().map(|it| (it.key.clone(), it.token)).collect::<Vec<_>>();
    let (what, of) = match request {
        Request::Acquire(it) => ("acquire", claims(it)),
        Request::AcquireEach(it) => ("acquire each", claims(it)),
        Request::Renew(it) => ("renew", renewals(it)),
        Request::Release(it) => ("release", releases(it)),
        Request::ReleaseUnpinned(it) => ("release unpinned", releases(it)),
        Request::Guard(_, key, fence) => return format!("guard {key} with fence {}", short(*fence)),
        Request::Pin(_, key, token) => ("pin", vec![(key.clone(), *token)]),
        Request::RenewInTx(_, it) => ("renew in tx", vec![(it.key.clone(), it.token)]),
        Request::ReleaseInTx(_, it, _) => ("release in tx", vec![(it.key.clone(), it.token)]),
        other => return format!("{other:?}"),
    };
    let mut text = what.to_owned();
    for (key, token) in of {
        let _ = write!(text, " {key} {token:?}");
    }
    if let Some(tx) = request.tx() {
        let _ = write!(text, " (tx {tx})");
    }
    text
}

/// The reply in few words.
fn said(reply: &Reply) -> String {
    match reply {
        Reply::All(AcquiredAll::Granted(grants)) => {
            let fences: Vec<_> = grants.iter().map(|it| short(it.fence.get()).to_string()).collect();
            format!("granted, fence {}", fences.join(" "))
        }
        Reply::All(AcquiredAll::Held { free_in, .. }) => format!("held, free in {free_in:?}"),
        Reply::Found(found) => match found {
            Some(it) => format!("{:?}, expires in {:?}", it.token, it.info.expires_in),
            None => "free".to_owned(),
        },
        Reply::List(list) => list.iter().map(|it| it.info.key.as_str()).collect::<Vec<_>>().join(" "),
        other => format!("{other:?}"),
    }
}
