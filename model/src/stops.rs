//! A session of ZooKeeper whose process is stopped and goes on on its old connection. Its follower reports signs of
//! life to the leader later, and a write that the follower forwards is none for the leader.
//!
//! The rule that a stop stands against grants is the library's own file, `stores/zookeeper/src/pulse.rs`. The times are
//! those of a session timeout of 12 s, in seconds.

use stateright::{Model, Property};

use crate::{
    check::{Protocol, Scope},
    life::{Trust, at, ticks},
    pulse::Pulse,
};

/// The session timeout.
const SESSION: i8 = 12;
/// The longest silence on a connection.
const SILENCE: i8 = SESSION / 3;
/// The longest time after which a client that runs pings.
const PING: i8 = SILENCE / 2;
/// The longest time between two reports of a follower.
const REPORT: i8 = SESSION / 4;
/// How long a process trusts a confirmed session.
const TRUSTED: i8 = SESSION - REPORT - SILENCE * 9 / 8;

/// At most one process trusts a lease.
pub const ONE: &str = "one holder trusts";

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A stop stands against nothing.
    StopForgotten,
    /// A stop counts only if the session timeout has almost passed.
    ShortStopForgotten,
    /// A stop counts until the next ping, which the follower may not have reported.
    PingEndsStop,
    /// A stop counts until a write is confirmed.
    WriteEndsStop,
    /// A stop counts until any connection is reported, also one that was made before it.
    AnyConnectionEndsStop,
}

/// The model with its bounds.
#[derive(Clone, Debug)]
pub struct Stops {
    bug: Option<Bug>,
    /// The last tick.
    time: i8,
    pauses: u8,
    claims: u8,
    renewals: u8,
    /// How often the process leaves its connection.
    leaves: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Connection {
    /// To the follower.
    Open,
    None {
        since: i8,
    },
    /// The leader has learned of it, and the process has not.
    Joined {
        since: i8,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// The claim was sent.
    Claiming {
        sent: i8,
    },
    /// The follower has received the claim.
    Forwarded {
        sent: i8,
    },
    /// The leader has created the child.
    Answered {
        sent: i8,
    },
    /// It holds the lease. The renewal that was sent, and whether the leader has confirmed it.
    Holding {
        trust: Trust,
        renewal: Option<(i8, bool)>,
    },
}

/// What all know together. A rival waits for the lease, whose session never ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct State {
    now: i8,
    runs: bool,
    connection: Connection,
    phase: Phase,
    pulse: Pulse,
    /// When the process gave the last sign of life.
    seen: i8,
    /// The follower has not reported it.
    is_unreported: bool,
    /// When the follower reported last.
    reported: i8,
    /// When the leader lets the session expire. `None`: it has expired, and the child of the process is gone.
    session: Option<i8>,
    rival_holds: bool,
    // What is left of the bounds.
    stops: u8,
    claims: u8,
    renewals: u8,
    leaves: u8,
    // What the properties look at.
    was_refused: bool,
    was_granted_after: bool,
}

#[derive(Clone, Debug, PartialEq)]
#[doc(hidden)]
pub enum Action {
    Tick,
    Report,
    Stop,
    Continue,
    Ping,
    Write,
    Leave,
    Join,
    HearJoined,
    Refuse,
    Claim,
    Forward,
    Create,
    Hear,
    Renew,
    Confirm,
    HearRenewal,
    Expire,
    Rival,
}

impl State {
    /// The process gives a sign of life to the follower.
    fn touch(&mut self) {
        (self.seen, self.is_unreported) = (self.now, true);
    }

    fn has_child(&self) -> bool {
        self.session.is_some() && matches!(self.phase, Phase::Answered { .. } | Phase::Holding { .. })
    }

    fn trusts(&self) -> bool {
        matches!(&self.phase, Phase::Holding { trust, .. } if !trust.is_lost(self.now))
    }
}

impl Stops {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn pulse(&self) -> Pulse {
        let (session, silence) = match self.bug {
            Some(Bug::PingEndsStop) => (0, SILENCE),
            Some(Bug::ShortStopForgotten) => (SESSION, SILENCE * 4),
            _ => (SESSION, SILENCE),
        };
        Pulse::new(at(0), ticks(session), ticks(silence))
    }

    fn is_refused(&self, s: &State) -> bool {
        !self.has(Bug::StopForgotten) && s.pulse.clone().stopped(at(s.now)).is_some()
    }
}

impl Model for Stops {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let Self { bug: _, time: _, pauses: stops, claims, renewals, leaves } = *self;
        vec![State {
            now: 0,
            runs: true,
            connection: Connection::Open,
            phase: Phase::Idle,
            pulse: self.pulse(),
            seen: 0,
            is_unreported: false,
            reported: 0,
            session: Some(SESSION),
            rival_holds: false,
            stops,
            claims,
            renewals,
            leaves,
            was_refused: false,
            was_granted_after: false,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        let is_open = s.connection == Connection::Open;
        // A process that runs pings in time, and hears of its connection at once.
        let must_act = s.runs
            && match s.connection {
                Connection::Open => s.now - s.seen >= PING,
                Connection::None { .. } => false,
                Connection::Joined { .. } => true,
            };
        if s.now < self.time && s.now - s.reported < REPORT && !must_act {
            actions.push(Action::Tick);
        }
        if s.is_unreported || s.now - s.reported >= REPORT {
            actions.push(Action::Report);
        }
        if s.session.is_some_and(|it| it <= s.now) {
            actions.push(Action::Expire);
        }
        if !s.rival_holds && !s.has_child() {
            actions.push(Action::Rival);
        }
        match s.connection {
            // The leader joins it to its session, if that has not expired.
            Connection::None { .. } if s.session.is_some() => actions.push(Action::Join),
            Connection::Joined { .. } if s.runs => actions.push(Action::HearJoined),
            _ => {}
        }
        let can_write = is_open && s.session.is_some();
        match &s.phase {
            Phase::Claiming { .. } if is_open => actions.push(Action::Forward),
            Phase::Forwarded { .. } if can_write && !s.rival_holds => actions.push(Action::Create),
            Phase::Holding { renewal: Some((_, false)), .. } if can_write => actions.push(Action::Confirm),
            _ => {}
        }
        if !s.runs {
            actions.push(Action::Continue);
            return;
        }
        if s.stops > 0 {
            actions.push(Action::Stop);
        }
        if is_open && s.seen < s.now {
            actions.push(Action::Ping);
        }
        if self.has(Bug::WriteEndsStop) && can_write {
            actions.push(Action::Write);
        }
        match &s.phase {
            Phase::Idle if is_open && s.claims > 0 => {
                actions.push(if self.is_refused(s) { Action::Refuse } else { Action::Claim });
            }
            Phase::Answered { .. } if is_open => actions.push(Action::Hear),
            Phase::Holding { trust, renewal: None } if is_open && s.renewals > 0 && !trust.is_lost(s.now) => {
                actions.push(Action::Renew);
            }
            Phase::Holding { renewal: Some((_, true)), .. } if is_open => actions.push(Action::HearRenewal),
            _ => {}
        }
        if is_open && s.leaves > 0 && matches!(s.phase, Phase::Idle) {
            actions.push(Action::Leave);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        let now = s.now;
        match action {
            Action::Tick => {
                s.now += 1;
                if s.runs {
                    s.pulse.beat(at(s.now));
                }
            }
            Action::Report => {
                if s.is_unreported {
                    s.session = s.session.map(|_| now + SESSION);
                }
                (s.reported, s.is_unreported) = (now, false);
            }
            Action::Stop => {
                s.stops -= 1;
                s.runs = false;
            }
            Action::Continue => {
                s.runs = true;
                s.pulse.beat(at(now));
            }
            Action::Ping => s.touch(),
            Action::Write => {
                s.touch();
                s.pulse.reconnected(at(now));
            }
            Action::Leave => {
                s.leaves -= 1;
                (s.connection, s.is_unreported) = (Connection::None { since: now }, false);
            }
            Action::Join => {
                let Connection::None { since } = s.connection else { return None };
                (s.connection, s.session) = (Connection::Joined { since }, Some(now + SESSION));
            }
            Action::HearJoined => {
                let Connection::Joined { since } = s.connection else { return None };
                s.connection = Connection::Open;
                s.pulse.reconnected(at(if self.has(Bug::AnyConnectionEndsStop) { now } else { since }));
                s.touch();
            }
            Action::Refuse => s.was_refused = true,
            Action::Claim => {
                // Forgets a stop that is over.
                let _ = s.pulse.stopped(at(now));
                s.claims -= 1;
                s.phase = Phase::Claiming { sent: now };
            }
            Action::Forward => {
                let Phase::Claiming { sent } = s.phase else { return None };
                s.touch();
                s.phase = Phase::Forwarded { sent };
            }
            Action::Create => {
                let Phase::Forwarded { sent } = s.phase else { return None };
                s.phase = Phase::Answered { sent };
            }
            Action::Hear => {
                let Phase::Answered { sent } = s.phase else { return None };
                let trust = Trust::new(sent, TRUSTED);
                s.was_granted_after |= s.was_refused && !trust.is_lost(now);
                s.phase = Phase::Holding { trust, renewal: None };
            }
            Action::Renew => {
                s.renewals -= 1;
                let Phase::Holding { renewal, .. } = &mut s.phase else { return None };
                *renewal = Some((now, false));
            }
            Action::Confirm => {
                s.touch();
                let Phase::Holding { renewal: Some((_, is_confirmed)), .. } = &mut s.phase else { return None };
                *is_confirmed = true;
            }
            Action::HearRenewal => {
                let Phase::Holding { trust, renewal } = &mut s.phase else { return None };
                let (sent, _) = renewal.take()?;
                trust.renewed(now, sent, TRUSTED);
            }
            Action::Expire => s.session = None,
            Action::Rival => s.rival_holds = true,
        }
        let now = s.now;
        if let Phase::Holding { trust, .. } = &mut s.phase {
            trust.look(now);
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE, |_, s: &State| !(s.rival_holds && s.trusts())),
            Property::sometimes("a process that was refused is granted the lease", |_, s: &State| s.was_granted_after),
            Property::sometimes("the rival follows", |_, s: &State| {
                s.rival_holds && matches!(s.phase, Phase::Holding { .. })
            }),
        ]
    }
}

impl Protocol for Stops {
    type Bug = Bug;

    fn scopes() -> Vec<Scope<Self>> {
        let base = Self { bug: None, time: 16, pauses: 1, claims: 1, renewals: 0, leaves: 0 };
        vec![
            Scope {
                name: "a stop on one connection",
                model: Self { renewals: 1, ..base.clone() },
                limits: &[],
                bugs: &[Bug::StopForgotten, Bug::ShortStopForgotten, Bug::PingEndsStop, Bug::WriteEndsStop],
            },
            Scope {
                name: "a stop between two connections",
                model: Self { leaves: 1, ..base },
                limits: &[],
                bugs: &[Bug::AnyConnectionEndsStop],
            },
        ]
    }

    fn with(self, bug: Bug) -> Self {
        Self { bug: Some(bug), ..self }
    }
}
