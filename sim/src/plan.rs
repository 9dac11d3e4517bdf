//! What happens in a run: the processes with their tasks, and the faults. Made from a seed, and then made smaller.

use std::{fmt, time::SystemTime};

use clap::ValueEnum;
use fastrand::Rng;

use crate::trade::{Deal, Market};

/// A wait, in milliseconds, after which a calm run has served everybody: nine tasks hold one key for up to 1.5 s, four
/// times each.
pub(crate) const LONG_WAIT: u64 = 60_000;

/// A seed that no run had: the time.
pub fn fresh_seed() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(0)
}

/// The kind of trouble that a run has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Profile {
    /// None. Any error is a violation.
    Calm,
    /// Requests and answers that are late, lost, silent or repeated.
    Net,
    /// Processes that are stopped and go on.
    Stop,
    /// Processes that are killed and start again.
    Kill,
    /// Operators who steal leases.
    Steal,
    /// A clock of the store that is set back.
    Back,
    /// A clock of the store that is set forward. Leases expire early, and nothing but commits and fences is promised.
    Forward,
    /// Clocks of processes that are fast or slow, by less than the margin.
    Drift,
    /// A store that restarts.
    Restart,
    /// All of them but a clock that is set forward.
    Mix,
}

impl Profile {
    /// All of them, in the order in which the seeds use them.
    pub const ALL: [Self; 10] = [
        Self::Calm,
        Self::Net,
        Self::Stop,
        Self::Kill,
        Self::Steal,
        Self::Back,
        Self::Forward,
        Self::Drift,
        Self::Restart,
        Self::Mix,
    ];

    fn has(self, other: Self) -> bool {
        self == other || self == Self::Mix
    }
}

/// The kind of store that a run imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    /// A table of PostgreSQL.
    Sql,
    /// One Redis server, or the master of several.
    Redis,
    /// An ensemble of ZooKeeper.
    ZooKeeper,
    /// A cluster of etcd.
    Etcd,
    /// Tables of PostgreSQL, for stocks and rows with versions. No leases.
    Stock,
}

impl Kind {
    /// That of a seed. A third of the seeds have `Sql`.
    fn of(seed: u64) -> Self {
        match seed / 10 % 6 {
            0..2 => Self::Sql,
            2 => Self::Stock,
            3 => Self::Redis,
            4 => Self::ZooKeeper,
            _ => Self::Etcd,
        }
    }

    /// Whether claims live in a session of their process.
    pub(crate) fn has_sessions(self) -> bool {
        matches!(self, Self::ZooKeeper | Self::Etcd)
    }
}

/// A schedule: everything that a run depends on. Times are in milliseconds.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of what is drawn during the run: latencies, lost messages, pauses, tokens.
    pub seed: u64,
    /// The kind of trouble.
    pub profile: Profile,
    /// What all processes have in common.
    pub settings: Settings,
    /// The processes.
    pub processes: Vec<Process>,
    /// The faults, with the times at which they begin.
    pub faults: Vec<(u64, Fault)>,
}

/// What all processes have in common.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub kind: Kind,
    /// After how long without a sign of life a session ends, in milliseconds.
    pub session: u64,
    /// The ttl of the leases, in milliseconds.
    pub ttl: u64,
    /// The wait of requests that do not set their own, in milliseconds.
    pub wait: u64,
    /// How often a lease is handed over in a row.
    pub hand_over: u32,
    /// How many of the releases the store reports to each process, from 0 to 1.
    pub notifies: f64,
    /// Whether claims share a statement.
    pub batches: bool,
    /// Whether a write is visible everywhere at once. If not, leases are not handed over.
    pub shows_writes_at_once: bool,
    /// How many segments pieces are spread over, and how many connections a process has.
    pub segments: u32,
    pub connections: u32,
    /// A promise that the store breaks. `None` in every plan that is made from a seed.
    pub bug: Option<Bug>,
}

/// A promise that the store breaks, so that a test sees which of them the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bug {
    /// A claim takes what another one holds.
    GrantsTheHeld,
    /// A claim takes what a transaction has pinned or released.
    GrantsTheLocked,
    /// A grant has the last fence again.
    RepeatsFences,
    /// A renewal is acknowledged, and not done.
    SkipsRenewals,
    /// A renewal renews whatever lease has its key.
    RenewsByName,
    /// A release releases whatever lease has its key.
    ReleasesByName,
    /// A release is acknowledged, and not done.
    SkipsReleases,
    /// A release pays no heed to pins.
    ReleasesThePinned,
    /// A commit is acknowledged, and not done.
    LosesCommits,
    /// A transaction releases a lease that is not held by its token.
    CommitsForAnyone,
    /// A row whose clock was set back keeps its expiry.
    KeepsLateExpiries,
    /// A claim that arrives twice sets the expiry of its lease back to its own ttl.
    ShortensByRepeats,
    /// A server that has lost its memory grants leases at once.
    GrantsAtOnce,
    /// A grant has the next number as its fence, whatever the clock says.
    CountsFences,
    /// The guard of a transaction refuses no fence.
    GuardsNothing,
    /// A process that was stopped trusts its session in ZooKeeper as if it had not been.
    TrustsAfterSilence,
}

/// A process.
#[derive(Debug, Clone)]
pub struct Process {
    /// How many parts in a million its clock is fast.
    pub fast_ppm: i64,
    /// Its tasks, each with what it does one after the other.
    pub tasks: Vec<Vec<Op>>,
}

/// The network between a process and the store. Parts are from 0 to 1, times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Parts of the requests and of the answers that are lost.
    pub lost_requests: f64,
    pub lost_answers: f64,
    /// Part of the lost ones of which the caller hears nothing, instead of an error.
    pub silent: f64,
    /// Part of the requests that arrive a second time.
    pub repeated: f64,
    /// Part of the messages that travel for up to `slow_us`.
    pub slow: f64,
    pub slow_us: u64,
    /// How long the other messages travel at most.
    pub usual_us: u64,
}

impl Link {
    /// A good one.
    pub const GOOD: Self = Self {
        lost_requests: 0.0,
        lost_answers: 0.0,
        silent: 0.0,
        repeated: 0.0,
        slow: 0.0,
        slow_us: 0,
        usual_us: 3000,
    };

    /// One over which nothing comes.
    pub const CUT: Self = Self { lost_requests: 1.0, silent: 0.5, ..Self::GOOD };

    /// The same, if it loses messages, and often.
    pub(crate) fn losing_more(self) -> Self {
        let more = |part: f64| if part > 0.0 { part.max(0.4) } else { 0.0 };
        Self { lost_requests: more(self.lost_requests), lost_answers: more(self.lost_answers), ..self }
    }
}

/// A fault.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The link of a process is like this from now on.
    Link { process: usize, link: Link },
    /// A process is stopped for this long, in milliseconds, as by SIGSTOP.
    Stop { process: usize, lasts: u64 },
    /// A process ends as by SIGKILL. It starts again after this long, in milliseconds, with these tasks.
    Kill { process: usize, restarts: u64, tasks: Vec<Vec<Op>> },
    /// The clock of the store is set by this much, in milliseconds.
    Step { by: i64 },
    /// The store restarts: open transactions end.
    Restart,
    /// The replica that is promoted next gets no more writes.
    Lags,
    /// As `Restart`, of a server that remembers what the replica has got, or nothing. If that is not noticed, there is
    /// no quarantine.
    Forgets { is_noticed: bool },
}

/// One operation of a task, after a pause.
#[derive(Debug, Clone)]
pub struct Op {
    /// The pause before it, in milliseconds.
    pub pause: u64,
    /// What is done.
    pub what: What,
}

/// What a task does. Times are in milliseconds.
#[derive(Debug, Clone)]
pub enum What {
    /// `try_acquire`.
    Try {
        key: Name,
        terms: Terms,
        work: Work,
    },
    /// `acquire`, which is dropped after this long.
    Acquire {
        key: Name,
        terms: Terms,
        dropped: Option<u64>,
        work: Work,
    },
    /// `run`, with this body.
    Run {
        key: Name,
        terms: Terms,
        continues: bool,
        body: Body,
        work: Work,
    },
    /// `Leases::any` of both keys.
    Any {
        work: Work,
    },
    /// `Leases::all` of both keys.
    All {
        hold: u64,
        commits: bool,
    },
    /// A permit of three, or several at once.
    Permits {
        take: u32,
        work: Work,
    },
    /// A reader, or a writer.
    Read {
        work: Work,
    },
    Write {
        work: Work,
    },
    /// `steal`, or `show` and `steal_if`.
    Steal {
        key: Name,
        looks: bool,
    },
    /// `show` and `list`.
    Look {
        key: Name,
    },
    /// `close`. The process does nothing more.
    Close,
    /// Something with a stock, or with rows that have versions.
    Deal(Deal),
}

/// The key of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    A,
    B,
    /// Whose requests are all fair.
    Fair,
}

impl Name {
    /// The key.
    pub fn key(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
            Self::Fair => "f",
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// The options of a request.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// By how much the ttl is longer than that of the settings.
    pub ttl_times: u32,
    pub min_hold: u64,
    /// Its own wait.
    pub wait: Option<u64>,
}

/// What is done under a lease.
#[derive(Debug, Clone)]
pub struct Work {
    /// Pauses, after each of which the lease is looked at.
    pub holds: Vec<u64>,
    /// Whether the lease is extended to three ttls in between.
    pub extends: bool,
    pub end: End,
}

/// How a lease ends.
#[derive(Debug, Clone)]
pub enum End {
    Release,
    Drop,
    /// A release whose future is dropped after this long.
    AbortedRelease(u64),
    /// A share outlives it for this long.
    Share(u64),
    /// A transaction.
    Section(Section),
    /// A share goes into a transaction in another task, while the lease is released after this long.
    Race(Section, u64),
}

/// How the body of `run` ends.
#[derive(Debug, Clone)]
pub enum Body {
    /// It returns, and the request releases the lease.
    Returns,
    /// It releases the lease itself.
    Releases,
    /// It lets its handle escape, with which this is done afterwards.
    Escapes(Stale),
    /// A task of its own goes on with its handle.
    Spawns(Section),
}

/// What is done with a handle whose body has ended.
#[derive(Debug, Clone)]
pub enum Stale {
    Release,
    Extend,
    Section(Section),
}

/// A transaction under a lease: it reads a number and writes the next one.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Whether it begins with `verify`.
    pub verifies: bool,
    /// The pause between the read and the end, in milliseconds.
    pub pause: u64,
    /// Whether another share of the lease lives meanwhile.
    pub is_shared: bool,
    pub fate: Fate,
    /// After how long all of it is dropped, in milliseconds.
    pub dropped: Option<u64>,
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// With the lease.
    Commits,
    /// Without it, as a verified one may. The lease is released afterwards.
    CommitsAlone,
    /// It is dropped, and then the lease is released.
    RollsBack,
    /// The lease is dropped first. A verified transaction commits all the same: its row is pinned.
    LeaseFirst,
}

/// Which kinds of operations a run has. Each run has some of them, so that each is met without the others.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a kind of its own")]
struct Mixture {
    modes: bool,
    commits: bool,
    drops: bool,
    min_holds: bool,
    is_fair: bool,
    shares: bool,
    extends: bool,
    ttls: bool,
    runs: bool,
    short_waits: bool,
    steals: bool,
    closes: bool,
    two_keys: bool,
    ttl: u64,
    longest_hold: u64,
    market: Option<Market>,
}

impl Plan {
    /// The schedule of this seed, with the trouble and the kind of store of the seed, or these.
    pub fn of(seed: u64, profile: Option<Profile>, kind: Option<Kind>) -> Self {
        let random = &mut Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let nth = usize::try_from(seed % 10).unwrap_or(0);
        let profile = profile.unwrap_or(Profile::ALL[nth]);
        let kind = kind.unwrap_or(Kind::of(seed));
        let mut mix = Mixture {
            market: None,
            modes: random.u32(..10) < 4,
            commits: random.bool(),
            drops: random.u32(..10) < 6,
            min_holds: random.u32(..10) < 2,
            is_fair: random.u32(..10) < 2,
            shares: random.u32(..10) < 3,
            extends: random.u32(..10) < 3,
            ttls: random.u32(..10) < 2,
            runs: random.bool(),
            short_waits: random.u32(..10) < 4,
            steals: profile == Profile::Steal || profile == Profile::Mix && random.bool(),
            closes: random.u32(..10) < 2,
            two_keys: random.bool(),
            ttl: *pick(random, &[120, 300, 1000, 3000]),
            longest_hold: *pick(random, &[2, 20, 200, 500]),
        };
        let mut settings = Settings {
            kind,
            session: match kind {
                Kind::Sql | Kind::Redis | Kind::Stock => 0,
                Kind::ZooKeeper => [1000, 2000, 4000][usize::try_from(seed / 60 % 3).unwrap_or(0)],
                // That of the longest ttl: a quarter longer, in whole seconds.
                Kind::Etcd => (3 * mix.ttl * 5 / 4).div_ceil(1000).max(2) * 1000,
            },
            ttl: mix.ttl,
            wait: if mix.short_waits { 1000 } else { LONG_WAIT },
            hand_over: *pick(random, &[0, 1, 32, 32, 400]),
            notifies: if kind.has_sessions() { 1.0 } else { *pick(random, &[0.0, 1.0, 0.7]) },
            batches: random.bool(),
            shows_writes_at_once: random.u32(..10) < 9,
            segments: 0,
            connections: 1,
            bug: None,
        };
        if kind == Kind::Stock {
            let market = Market::of(random);
            (settings.segments, settings.connections) = (market.segments, market.connections);
            mix.market = Some(market);
        }
        let count = random.usize(1..=3);
        let processes: Vec<_> = (0..count)
            .map(|_| {
                let fast_ppm = if profile == Profile::Drift { *pick(random, &[0, 4000, -4000]) } else { 0 };
                let most = if count == 1 { 4 } else { 3 };
                let tasks_count = random.usize(1..=most);
                Process { fast_ppm, tasks: tasks(random, mix, tasks_count, 4) }
            })
            .collect();
        let faults = faults(random, profile, mix, settings, count);
        Self { seed, profile, settings, processes, faults }
    }

    /// Whether nothing is lost, late, stopped or killed.
    pub(crate) fn is_faultless(&self) -> bool {
        self.faults.is_empty() && !self.processes.iter().any(|it| it.fast_ppm != 0)
    }

    /// Whether no lease may be lost but by theft.
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.is_faultless() && !self.has(&|it| matches!(it, What::Close))
    }

    /// Whether the store loses its memory at some time.
    pub(crate) fn forgets(&self) -> bool {
        self.faults.iter().any(|(_, it)| matches!(it, Fault::Forgets { .. }))
    }

    /// Whether the only errors are those that the tasks ask for.
    pub(crate) fn is_calm(&self) -> bool {
        self.is_undisturbed() && !self.has(&|it| matches!(it, What::Steal { .. }))
    }

    /// Whether a task of the plan does such a thing.
    pub(crate) fn has(&self, such: &dyn Fn(&What) -> bool) -> bool {
        let again = self.faults.iter().filter_map(|(_, fault)| match fault {
            Fault::Kill { tasks, .. } => Some(tasks),
            _ => None,
        });
        self.processes.iter().map(|it| &it.tasks).chain(again).flatten().flatten().any(|it| such(&it.what))
    }

    /// The longest ttl of a lease, in milliseconds.
    pub(crate) fn longest_ttl(&self) -> u64 {
        3 * self.settings.ttl
    }
}

pub(crate) fn pick<'t, T>(random: &mut Rng, from: &'t [T]) -> &'t T {
    &from[random.usize(..from.len())]
}

fn tasks(random: &mut Rng, mix: Mixture, count: usize, most: usize) -> Vec<Vec<Op>> {
    let mut tasks: Vec<Vec<_>> = (0..count)
        .map(|_| {
            (0..random.usize(1..=most)).map(|_| Op { pause: random.u64(0..60), what: what(random, mix) }).collect()
        })
        .collect();
    if mix.market.is_none() && mix.closes && random.bool() {
        tasks.push(vec![Op { pause: random.u64(1..1500), what: What::Close }]);
    }
    tasks
}

fn what(random: &mut Rng, mix: Mixture) -> What {
    if let Some(market) = mix.market {
        return What::Deal(market.deal(random));
    }
    let key = if mix.two_keys && random.bool() { Name::B } else { Name::A };
    let (terms, work) = (terms(random, mix), work(random, mix));
    match random.u32(..100) {
        0..8 => What::Try { key, terms, work },
        8..12 => What::Look { key },
        12..24 if mix.drops => {
            let dropped = Some(random.u64(0..=2 * mix.longest_hold));
            What::Acquire { key, terms, dropped, work }
        }
        24..30 if mix.modes => What::Any { work },
        30..38 if mix.modes => What::Permits { take: random.u32(1..=2), work },
        38..44 if mix.modes => What::Read { work },
        44..50 if mix.modes => What::Write { work },
        50..56 if mix.modes => {
            What::All { hold: random.u64(..=mix.longest_hold), commits: mix.commits && random.bool() }
        }
        56..64 if mix.is_fair => {
            What::Acquire { key: Name::Fair, terms: Terms { wait: None, ..terms }, dropped: None, work }
        }
        64..70 if mix.steals => What::Steal { key, looks: random.bool() },
        70..82 if mix.runs => What::Run { key, terms, continues: random.bool(), body: body(random, mix), work },
        _ => What::Acquire { key, terms, dropped: None, work },
    }
}

fn terms(random: &mut Rng, mix: Mixture) -> Terms {
    Terms {
        ttl_times: if mix.ttls && random.bool() { 2 } else { 1 },
        min_hold: if mix.min_holds && random.u32(..3) == 0 { random.u64(1..300) } else { 0 },
        wait: (mix.short_waits && random.bool()).then(|| random.u64(0..600)),
    }
}

fn work(random: &mut Rng, mix: Mixture) -> Work {
    let holds = (0..random.usize(1..=3)).map(|_| random.u64(0..=mix.longest_hold)).collect();
    let end = match random.u32(..20) {
        0..3 => End::Drop,
        3..5 if mix.drops => End::AbortedRelease(random.u64(0..5)),
        5..7 if mix.shares => End::Share(random.u64(0..20)),
        7..9 if mix.commits && mix.shares => End::Race(section(random, mix), random.u64(0..10)),
        5..14 if mix.commits => End::Section(section(random, mix)),
        _ => End::Release,
    };
    Work { holds, extends: mix.extends && random.u32(..3) == 0, end }
}

fn section(random: &mut Rng, mix: Mixture) -> Section {
    const FATES: [Fate; 6] =
        [Fate::Commits, Fate::Commits, Fate::Commits, Fate::CommitsAlone, Fate::RollsBack, Fate::LeaseFirst];
    let verifies = random.u32(..5) > 0;
    let fate = *pick(random, &FATES);
    Section {
        verifies,
        pause: match random.u32(..8) {
            0..4 => 0,
            4 => random.u64(0..=2 * mix.ttl),
            _ => random.u64(0..=mix.longest_hold),
        },
        is_shared: mix.shares && random.u32(..3) == 0,
        fate: if verifies || fate != Fate::CommitsAlone { fate } else { Fate::Commits },
        dropped: (mix.drops && random.u32(..4) == 0).then(|| random.u64(0..40)),
    }
}

fn body(random: &mut Rng, mix: Mixture) -> Body {
    match random.u32(..8) {
        0 => Body::Releases,
        1 => Body::Escapes(match random.u32(..3) {
            0 => Stale::Release,
            1 if mix.commits => Stale::Section(section(random, mix)),
            _ => Stale::Extend,
        }),
        2..4 if mix.commits => Body::Spawns(section(random, mix)),
        _ => Body::Returns,
    }
}

fn faults(random: &mut Rng, profile: Profile, mix: Mixture, settings: Settings, count: usize) -> Vec<(u64, Fault)> {
    let ttl = settings.ttl;
    // While the tasks work.
    let horizon = if settings.kind == Kind::Stock { 400 } else { 200 + 6 * (mix.longest_hold + 80) };
    let mut faults = Vec::new();
    for process in 0..count {
        if matches!(profile, Profile::Net | Profile::Drift | Profile::Back) || profile == Profile::Mix && random.bool()
        {
            let mut at = 0;
            for _ in 0..random.usize(1..=2) {
                at += random.u64(0..=horizon / 2);
                let link = if random.u32(..4) == 0 { Link::CUT } else { link(random, ttl) };
                faults.push((at, Fault::Link { process, link }));
                at += random.u64(10..=2 * ttl);
                if random.bool() {
                    faults.push((at, Fault::Link { process, link: Link::GOOD }));
                }
            }
        }
        if profile.has(Profile::Stop) && random.u32(..4) > 0 {
            for _ in 0..random.usize(1..=2) {
                let lasts = [random.u64(1..50), random.u64(1..=ttl), random.u64(ttl..=3 * ttl)];
                let mut lasts = *pick(random, &lasts);
                // Most of what a stop can break is at the end of its session.
                if settings.kind.has_sessions() && random.bool() {
                    lasts = random.u64(settings.session / 2..=settings.session * 5 / 4);
                }
                faults.push((random.u64(1..=horizon), Fault::Stop { process, lasts }));
            }
        }
        if profile.has(Profile::Kill) && random.u32(..3) > 0 {
            let (at, restarts) = (random.u64(1..=horizon), random.u64(1..200));
            let tasks = tasks(random, mix, 1, 2);
            faults.push((at, Fault::Kill { process, restarts, tasks }));
        }
    }
    if profile.has(Profile::Back) && random.u32(..4) > 0 {
        faults.push((random.u64(1..=horizon), Fault::Step { by: -random.i64(1..5000) }));
    }
    if profile == Profile::Forward {
        for _ in 0..random.usize(1..=2) {
            let by = if random.u32(..3) == 0 { -random.i64(1..2000) } else { random.i64(1..5000) };
            faults.push((random.u64(1..=horizon), Fault::Step { by }));
        }
    }
    if profile.has(Profile::Restart) && random.u32(..4) > 0 {
        let at = random.u64(1..=horizon);
        if settings.kind == Kind::Redis && random.u32(..4) > 0 {
            if random.u32(..3) > 0 {
                faults.push((at, Fault::Lags));
            }
            faults.push((at + random.u64(0..=ttl), Fault::Forgets { is_noticed: random.u32(..4) > 0 }));
        } else {
            faults.push((at, Fault::Restart));
        }
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

fn link(random: &mut Rng, ttl: u64) -> Link {
    let most = if random.u32(..3) == 0 { 0.3 } else { 0.05 };
    let part = |random: &mut Rng, most: f64| if random.bool() { random.f64() * most } else { 0.0 };
    Link {
        lost_requests: part(random, most),
        lost_answers: part(random, 2.0 * most),
        silent: *pick(random, &[0.0, 0.5, 1.0]),
        repeated: part(random, 0.1),
        slow: part(random, 0.4),
        slow_us: 1000 * *pick(random, &[20, 200, 800, ttl]),
        usual_us: 1000 * *pick(random, &[2, 10, 30]),
    }
}
