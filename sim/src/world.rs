//! Everything outside of the processes: time, the network between them and the store, and the record of a run.
//!
//! Time is one number, in microseconds since the beginning of the run. What happens is an event at a time; events of
//! one time happen in the order in which they were planned.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::{
    Key,
    store::{AcquiredAll, Claim, Release, Renewal},
};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::{
    judge::{Judge, short},
    plan::{Fault, Link, Op, Settings},
    store::{Reply, Request, Store, TxId},
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
    /// The server ends a transaction whose client has gone.
    Ends(TxId),
    /// The server ends a transaction in which nothing was sent for long.
    IdlesAt(TxId),
    /// One of the faults of the plan.
    Fault(Fault),
    /// A process that was stopped goes on.
    Continues { process: usize },
    /// A process that was killed starts again.
    Restarts { process: usize, tasks: Vec<Vec<Op>> },
}

/// A request on its way to the store, or its answer on its way back.
#[derive(Debug)]
struct Call {
    process: usize,
    generation: u32,
    request: Request,
    back: u64,
    outcome: Outcome,
    answer: Option<oneshot::Sender<Option<Reply>>>,
    reply: Option<Reply>,
}

/// What becomes of the answer of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
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
    fn time(&self, shown: Instant) -> u64 {
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
}

impl Counts {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        let Self { calls, lost, leases, handed_over, commits, losses } = other;
        self.calls += calls;
        self.lost += lost;
        self.leases += leases;
        self.handed_over += handed_over;
        self.losses += losses;
        for (sum, it) in self.commits.iter_mut().zip(commits) {
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
    random: fastrand::Rng,
    pub(crate) settings: Settings,
    pub(crate) store: Store,
    pub(crate) places: Vec<Place>,
    calls: BTreeMap<u64, Call>,
    /// Calls that wait in the store for the end of a transaction.
    blocked: Vec<u64>,
    /// Calls whose callers learn nothing. Their senders are kept, because the drop of one is an answer.
    silenced: Vec<oneshot::Sender<Option<Reply>>>,
    /// When the last message of each transaction arrives: messages of one connection do not overtake each other.
    arrivals: BTreeMap<TxId, u64>,
    pub(crate) judge: Judge,
    pub(crate) counts: Counts,
    /// A digest of all that was sent and answered, to compare two runs.
    pub(crate) digest: u64,
    timeline: Option<Vec<String>>,
}

impl World {
    pub(crate) fn new(settings: Settings, judge: Judge, seed: u64, is_logged: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed ^ 0xfeed);
        Self {
            now: 0,
            planned: BTreeMap::new(),
            last_number: 0,
            store: Store::new(random.fork(), settings.bug),
            random,
            settings,
            places: Vec::new(),
            calls: BTreeMap::new(),
            blocked: Vec::new(),
            silenced: Vec::new(),
            arrivals: BTreeMap::new(),
            judge,
            counts: Counts::default(),
            digest: seed,
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
        });
    }

    /// A process has started, with this clock.
    pub(crate) fn started(&mut self, process: usize, clock: Clock) {
        let place = &mut self.places[process];
        place.generation += 1;
        place.clock = clock;
        place.sent = Arc::default();
        place.listeners.clear();
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
        // A process that was killed may still run while it is taken down.
        if self.places[process].generation != generation {
            self.silenced.push(answer);
            return;
        }
        let at = self.time_of(process);
        let link = self.places[process].link;
        let (call, there, back) = (self.number(), self.travel(link), self.travel(link));
        let chance = |random: &mut fastrand::Rng, of: f64| of > 0.0 && random.f64() < of;
        let is_lost = chance(&mut self.random, link.lost_requests);
        let outcome = if is_lost || chance(&mut self.random, link.lost_answers) {
            if chance(&mut self.random, link.silent) { Outcome::Silent } else { Outcome::Broken }
        } else {
            Outcome::Answered
        };
        self.counts.calls += 1;
        self.counts.lost += u64::from(outcome != Outcome::Answered);
        self.digest([at, call, process as u64]);
        let fate = match outcome {
            Outcome::Answered => "",
            _ if is_lost => ", lost",
            _ => ", answer lost",
        };
        self.log_of(process, || format!("sends  #{call} {}{fate}", brief(&request)));
        let mut arrives = at + there;
        if let Some(tx) = request.tx() {
            let last = self.arrivals.entry(tx).or_default();
            arrives = arrives.max(*last + 1);
            *last = arrives;
        }
        if chance(&mut self.random, link.repeated) && request.may_be_repeated() {
            let again = arrives + self.travel(link) + self.travel(link);
            let second = self.number();
            let request = request.clone();
            let repeated =
                Call { process, generation, request, back, outcome: Outcome::Silent, answer: None, reply: None };
            self.calls.insert(second, repeated);
            self.plan(again, Event::Arrives { call: second, is_first: false });
        }
        self.calls
            .insert(call, Call { process, generation, request, back, outcome, answer: Some(answer), reply: None });
        if is_lost {
            self.plan(arrives + back, Event::IsAnswered { call });
        } else {
            self.plan(arrives, Event::Arrives { call, is_first: true });
        }
        self.places[process].sent.notify_one();
    }

    /// How long one message travels.
    fn travel(&mut self, link: Link) -> u64 {
        let is_slow = link.slow > 0.0 && self.random.f64() < link.slow;
        let most = if is_slow { link.slow_us } else { link.usual_us };
        self.random.u64(100..=most.max(100))
    }

    /// A call reaches the store.
    pub(crate) fn arrives(&mut self, call: u64, is_first: bool) {
        let Some(Call { request, process, back, .. }) = self.calls.get(&call) else { return };
        let (request, process, back) = (request.clone(), *process, *back);
        if let (false, Request::Acquire(claims)) = (is_first, &request)
            && !claims.iter().all(|it| self.store.holds(&it.key, it.token, self.now))
        {
            self.calls.remove(&call);
            return;
        }
        if let Some(Claim { key, .. }) = claimed(&request) {
            self.judge.before_claim(self.store.free_since(key, self.now));
        }
        let Some(reply) = self.store.execute(&request, self.now) else {
            self.log("store", || format!("blocks #{call}"));
            self.blocked.push(call);
            return;
        };
        self.log("store", || format!("does   #{call} of p{process}: {} → {}", brief(&request), said(&reply)));
        self.digest([self.now, call, 1]);
        self.judge.executed(process, &request, &reply, self.now);
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
        if let Request::Commit(..) | Request::RollBack(_) = request {
            self.unblock();
        }
    }

    /// Notifies listeners, and collects what the store found wrong.
    fn after_change(&mut self) {
        for key in self.store.take_freed() {
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
        for call in std::mem::take(&mut self.blocked) {
            self.arrives(call, true);
        }
    }

    /// The server ends a transaction.
    pub(crate) fn end(&mut self, tx: TxId) {
        if self.store.is_open(tx) {
            self.log("store", || format!("ends transaction {tx}, whose client has gone"));
        }
        self.store.execute(&Request::RollBack(tx), self.now);
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

    /// The server restarts: transactions end, and calls in flight break.
    pub(crate) fn restart_store(&mut self) {
        self.store.restart();
        self.blocked.clear();
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
        let Some(Call { process, generation, outcome, answer, reply, .. }) = self.calls.remove(&call) else { return };
        let Some(answer) = answer else { return };
        if self.places[process].generation != generation {
            return;
        }
        self.digest([self.now, call, 2]);
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
