//! A lease in a majority of three Redis servers that can forget everything, and that have clocks of their own.
//!
//! A request to a server and its answer are one step. The requests of a round arrive in any order, or not at all.

use stateright::{Model, Property};

use crate::{
    check::{Protocol, Scope},
    life::Trust,
};

const SERVERS: usize = 3;
/// The ttl of each lease, and the longest one.
const TTL: i8 = 2;
/// A clock at the beginning.
const START: i8 = 4;

/// At most one process trusts a lease.
pub const ONE: &str = "one holder trusts";
/// The fence of each grant is greater than that of all earlier ones.
pub const FENCE: &str = "fences rise";
/// A lease that was lost is never trusted again.
pub const LOST: &str = "lost is for ever";
/// A request that polls for the quarantine and a ttl gets the lease, if all others are dead.
pub const AGAIN: &str = "free after a pause and a ttl";

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// One server is enough.
    NoMajority,
    /// A renewal by one server counts as done.
    RenewalWithoutMajority,
    /// The trust counts from the second round, which writes the fence.
    TrustFromSecondRound,
    /// The trust counts from the answer to a renewal.
    TrustFromAnswerToRenewal,
    /// A refused request is released without its token.
    ReleaseByKey,
    /// A server that forgot grants at once.
    NoQuarantine,
    /// The quarantine is a tick too short.
    ShortQuarantine,
    /// A claim in the quarantine begins it anew.
    QuarantineRestarts,
    /// The fence that a majority agreed on is not written back.
    NoSecondRound,
    /// The smallest fence of the majority is taken.
    SmallestFence,
    /// The fence is a counter of the server.
    FenceIsCounter,
    /// A lock has no expiry.
    NoExpiry,
}

/// The model with its bounds.
#[derive(Clone, Debug)]
pub struct Quorum {
    bug: Option<Bug>,
    /// The last tick.
    time: i8,
    /// How many claims each process sends.
    claims: [u8; 2],
    renewals: u8,
    /// How many servers forget everything, at once.
    losses: usize,
    /// How much the clock of each server is ahead.
    clocks: [i8; SERVERS],
    /// The clock of a server can be set forward by a ttl, once.
    jumps: bool,
    /// Holders release the lease. If not, it expires.
    releases: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Token {
    process: u8,
    claim: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Server {
    lock: Option<(Token, i8)>,
    /// The last fence of the key.
    last: i8,
    ahead: i8,
    /// Until when it grants nothing.
    quarantine: i8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Side {
    Idle,
    /// The first round: which servers were asked, which have granted, and the greatest or smallest fence of these.
    Claiming {
        token: Token,
        sent: i8,
        asked: [bool; SERVERS],
        granted: u8,
        fence: i8,
    },
    /// The second round: which servers were asked, and which have written the fence.
    Raising {
        token: Token,
        sent: i8,
        asked: [bool; SERVERS],
        written: u8,
        fence: i8,
    },
    Holding(Holder),
    /// Which servers have not been asked to release it.
    Releasing {
        token: Token,
        open: [bool; SERVERS],
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Holder {
    token: Token,
    trust: Trust,
    renewal: Option<Renewal>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Renewal {
    sent: i8,
    asked: [bool; SERVERS],
    done: u8,
}

/// What all know together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct State {
    now: i8,
    servers: [Server; SERVERS],
    sides: [Side; 2],
    claims: [u8; 2],
    renewals: u8,
    has_forgotten: bool,
    has_jumped: bool,
    // What the properties look at.
    greatest_fence: i8,
    has_fallen: bool,
    served: [bool; 2],
    has_renewed: bool,
}

#[derive(Clone, Debug, PartialEq)]
#[doc(hidden)]
pub enum Action {
    Tick,
    Claim(usize),
    /// The next request of a process arrives at a server.
    Ask {
        process: usize,
        server: usize,
    },
    /// The process waits for no more answers.
    Decide(usize),
    Renew(usize),
    Release(usize),
    Die(usize),
    /// This server, and those after it that forget at the same time.
    Forget(usize),
    Jump(usize),
}

impl State {
    fn clock(&self, server: usize) -> i8 {
        START + self.now + self.servers[server].ahead
    }
}

impl Quorum {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn needed(&self) -> u8 {
        if self.has(Bug::NoMajority) { 1 } else { 2 }
    }

    /// A server runs the script of a claim. Returns the fence.
    fn claim(&self, s: &mut State, server: usize, token: Token) -> Option<i8> {
        let clock = s.clock(server);
        let it = &mut s.servers[server];
        if it.lock.is_some_and(|(_, expires)| expires <= clock) {
            it.lock = None;
        }
        if it.quarantine > clock && self.has(Bug::QuarantineRestarts) {
            it.quarantine = clock + TTL;
        }
        if it.lock.is_some() || it.quarantine > clock {
            return None;
        }
        it.lock = Some((token, if self.has(Bug::NoExpiry) { i8::MAX } else { clock + TTL }));
        it.last = if self.has(Bug::FenceIsCounter) { it.last + 1 } else { clock.max(it.last + 1) };
        Some(it.last)
    }

    fn raise(s: &mut State, server: usize, token: Token, fence: i8) -> bool {
        let clock = s.clock(server);
        let it = &mut s.servers[server];
        let holds = it.lock.is_some_and(|(lock, expires)| lock == token && expires > clock);
        if holds {
            it.last = it.last.max(fence);
        }
        holds
    }

    fn renew(s: &mut State, server: usize, token: Token) -> bool {
        let clock = s.clock(server);
        let lock = s.servers[server].lock.as_mut().filter(|(lock, expires)| *lock == token && *expires > clock);
        lock.map(|(_, expires)| *expires = clock + TTL).is_some()
    }

    fn release(&self, s: &mut State, server: usize, token: Token) {
        let by_key = self.has(Bug::ReleaseByKey);
        let it = &mut s.servers[server];
        it.lock = it.lock.filter(|(lock, _)| *lock != token && !by_key);
    }

    fn forget(&self, s: &mut State, server: usize) {
        let clock = s.clock(server);
        let length = match self.bug {
            Some(Bug::NoQuarantine) => 0,
            Some(Bug::ShortQuarantine) => TTL - 1,
            _ => TTL,
        };
        let it = &mut s.servers[server];
        (it.lock, it.last, it.quarantine) = (None, 0, clock + length);
    }

    fn ask(&self, s: &mut State, process: usize, server: usize) -> Option<()> {
        let mut side = s.sides[process].clone();
        match &mut side {
            Side::Claiming { token, asked, granted, fence, .. } => {
                asked[server] = true;
                if let Some(given) = self.claim(s, server, *token) {
                    let smallest = self.has(Bug::SmallestFence) && *granted > 0;
                    *fence = if smallest { given.min(*fence) } else { given.max(*fence) };
                    *granted += 1;
                }
            }
            Side::Raising { token, asked, written, fence, .. } => {
                asked[server] = true;
                *written += u8::from(Self::raise(s, server, *token, *fence));
            }
            Side::Holding(Holder { token, renewal: Some(renewal), .. }) => {
                renewal.asked[server] = true;
                renewal.done += u8::from(Self::renew(s, server, *token));
            }
            Side::Releasing { token, open } => {
                open[server] = false;
                self.release(s, server, *token);
            }
            Side::Idle | Side::Holding(_) => return None,
        }
        s.sides[process] = match side {
            Side::Releasing { open, .. } if open == [false; SERVERS] => Side::Idle,
            side => side,
        };
        Some(())
    }

    fn decide(&self, s: &mut State, process: usize) -> Option<()> {
        let now = s.now;
        let needed = self.needed();
        let refused = |token| Side::Releasing { token, open: [true; SERVERS] };
        s.sides[process] = match s.sides[process].clone() {
            Side::Claiming { token, sent, granted, fence, .. } if granted >= needed => {
                if self.has(Bug::NoSecondRound) {
                    Self::granted(s, process, token, sent, fence)
                } else {
                    Side::Raising { token, sent, asked: [false; SERVERS], written: 0, fence }
                }
            }
            Side::Raising { token, sent, written, fence, .. } if written >= needed => {
                let from = if self.has(Bug::TrustFromSecondRound) { now } else { sent };
                Self::granted(s, process, token, from, fence)
            }
            Side::Claiming { token, .. } | Side::Raising { token, .. } => refused(token),
            Side::Holding(mut holder) => {
                let renewal = holder.renewal.take()?;
                let is_done = renewal.done >= needed || self.has(Bug::RenewalWithoutMajority) && renewal.done > 0;
                if is_done {
                    let from = if self.has(Bug::TrustFromAnswerToRenewal) { now } else { renewal.sent };
                    holder.trust.renewed(now, from, TTL);
                    s.has_renewed = true;
                }
                Side::Holding(holder)
            }
            Side::Idle | Side::Releasing { .. } => return None,
        };
        Some(())
    }

    fn granted(s: &mut State, process: usize, token: Token, sent: i8, fence: i8) -> Side {
        let trust = Trust::new(sent, TTL);
        // A process that hears too late is no holder.
        if !trust.is_lost(s.now) {
            s.has_fallen |= fence <= s.greatest_fence;
            s.greatest_fence = s.greatest_fence.max(fence);
            s.served[process] = true;
        }
        Side::Holding(Holder { token, trust, renewal: None })
    }

    /// Whether a request that polls gets the lease from a majority, if the processes that hold or wait have died and
    /// the others have released what they did not get.
    fn is_free_again(&self, s: &State) -> bool {
        let mut s = s.clone();
        let sides = s.sides.clone();
        for side in sides {
            let (Side::Claiming { token, .. } | Side::Raising { token, .. } | Side::Releasing { token, .. }) = side
            else {
                continue;
            };
            (0..SERVERS).for_each(|it| self.release(&mut s, it, token));
        }
        let token = Token { process: 9, claim: 0 };
        (0..=2 * TTL).any(|_| {
            let granted = (0..SERVERS).filter(|it| self.claim(&mut s, *it, token).is_some()).count();
            (0..SERVERS).for_each(|it| self.release(&mut s, it, token));
            s.now += 1;
            granted >= 2
        })
    }
}

impl Side {
    fn holder(&self) -> Option<&Holder> {
        if let Self::Holding(it) = self { Some(it) } else { None }
    }

    /// The servers that the current round has not reached.
    fn open(&self) -> [bool; SERVERS] {
        match self {
            Self::Claiming { asked, .. }
            | Self::Raising { asked, .. }
            | Self::Holding(Holder { renewal: Some(Renewal { asked, .. }), .. }) => asked.map(|it| !it),
            Self::Releasing { open, .. } => *open,
            Self::Idle | Self::Holding(_) => [false; SERVERS],
        }
    }
}

impl Model for Quorum {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let server = |ahead| Server { lock: None, last: 0, ahead, quarantine: 0 };
        vec![State {
            now: 0,
            servers: self.clocks.map(server),
            sides: [Side::Idle, Side::Idle],
            claims: self.claims,
            renewals: self.renewals,
            has_forgotten: false,
            has_jumped: false,
            greatest_fence: 0,
            has_fallen: false,
            served: [false; 2],
            has_renewed: false,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.now < self.time {
            actions.push(Action::Tick);
        }
        for (process, side) in s.sides.iter().enumerate() {
            for server in (0..SERVERS).filter(|it| side.open()[*it]) {
                actions.push(Action::Ask { process, server });
            }
            match side {
                Side::Idle if s.claims[process] > 0 => actions.push(Action::Claim(process)),
                Side::Idle => {}
                // Before the last answer too: the others are lost.
                Side::Claiming { .. } | Side::Raising { .. } => actions.push(Action::Decide(process)),
                Side::Holding(holder) => {
                    match &holder.renewal {
                        Some(_) => actions.push(Action::Decide(process)),
                        None if s.renewals > 0 && !holder.trust.is_lost(s.now) => actions.push(Action::Renew(process)),
                        None => {}
                    }
                    if self.releases {
                        actions.push(Action::Release(process));
                    }
                }
                // What was not released is released later, or never.
                Side::Releasing { .. } => actions.push(Action::Die(process)),
            }
        }
        if self.losses > 0 && !s.has_forgotten {
            actions.extend((0..SERVERS).map(Action::Forget));
        }
        if self.jumps && !s.has_jumped {
            actions.extend((0..SERVERS).map(Action::Jump));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        let now = s.now;
        match action {
            Action::Tick => s.now += 1,
            Action::Claim(process) => {
                s.claims[process] -= 1;
                let token = Token { process: u8::try_from(process).ok()?, claim: s.claims[process] };
                s.sides[process] = Side::Claiming { token, sent: now, asked: [false; SERVERS], granted: 0, fence: 0 };
            }
            Action::Ask { process, server } => self.ask(&mut s, process, server)?,
            Action::Decide(process) => self.decide(&mut s, process)?,
            Action::Renew(process) => {
                s.renewals -= 1;
                let Side::Holding(holder) = &mut s.sides[process] else { return None };
                holder.renewal = Some(Renewal { sent: now, asked: [false; SERVERS], done: 0 });
            }
            Action::Release(process) => {
                let token = s.sides[process].holder()?.token;
                s.sides[process] = Side::Releasing { token, open: [true; SERVERS] };
            }
            Action::Die(process) => s.sides[process] = Side::Idle,
            Action::Forget(first) => {
                s.has_forgotten = true;
                (first..first + self.losses).for_each(|it| self.forget(&mut s, it % SERVERS));
            }
            Action::Jump(server) => {
                s.has_jumped = true;
                s.servers[server].ahead += TTL;
            }
        }
        let now = s.now;
        for side in &mut s.sides {
            if let Side::Holding(holder) = side {
                holder.trust.look(now);
            }
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE, |_, s: &State| {
                s.sides.iter().filter_map(Side::holder).filter(|it| !it.trust.is_lost(s.now)).count() <= 1
            }),
            Property::always(FENCE, |_, s: &State| !s.has_fallen),
            Property::always(LOST, |_, s: &State| {
                !s.sides.iter().filter_map(Side::holder).any(|it| it.trust.has_returned(s.now))
            }),
            Property::always(AGAIN, |model: &Self, s: &State| model.is_free_again(s)),
            Property::sometimes("both are served, and all faults happen", |model: &Self, s: &State| {
                s.served == [true; 2]
                    && s.has_forgotten == (model.losses > 0)
                    && (s.has_renewed || model.renewals == 0)
                    && s.has_jumped == model.jumps
            }),
        ]
    }
}

impl Protocol for Quorum {
    type Bug = Bug;

    fn scopes() -> Vec<Scope<Self>> {
        let base = Self {
            bug: None,
            time: 2,
            claims: [1, 1],
            renewals: 0,
            losses: 0,
            clocks: [0; SERVERS],
            jumps: false,
            releases: false,
        };
        vec![
            Scope {
                name: "requests, clocks differ",
                model: Self { time: 0, claims: [2, 1], clocks: [-2, 0, 2], releases: true, ..base.clone() },
                limits: &[],
                bugs: &[Bug::NoMajority, Bug::ReleaseByKey, Bug::NoSecondRound, Bug::SmallestFence, Bug::NoExpiry],
            },
            Scope {
                name: "renewals",
                model: Self { renewals: 1, ..base.clone() },
                limits: &[],
                bugs: &[Bug::TrustFromSecondRound, Bug::TrustFromAnswerToRenewal, Bug::RenewalWithoutMajority],
            },
            Scope {
                name: "a server forgets",
                model: Self { losses: 1, ..base.clone() },
                limits: &[],
                bugs: &[Bug::NoQuarantine, Bug::ShortQuarantine, Bug::FenceIsCounter],
            },
            Scope {
                name: "a majority forgets, clocks differ",
                model: Self { losses: 2, clocks: [-2, 0, 2], ..base.clone() },
                limits: &[FENCE],
                bugs: &[Bug::QuarantineRestarts],
            },
            Scope {
                name: "a clock is set forward",
                model: Self { time: 0, jumps: true, ..base },
                limits: &[ONE, FENCE],
                bugs: &[],
            },
        ]
    }

    fn with(self, bug: Bug) -> Self {
        Self { bug: Some(bug), ..self }
    }
}
