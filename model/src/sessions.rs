//! Leases in ZooKeeper: sessions, of which the leader learns by the reports of a follower, and their ephemeral
//! children of a node. The first child holds the lease.
//!
//! A process trusts its lease for a part of the session timeout, from the start of a request that a write confirmed.

use stateright::{Model, Property};

use crate::{
    check::{Protocol, Scope},
    life::Trust,
};

/// The session timeout.
const SESSION: i8 = 4;
/// The longest time without a sign of life, after which a process leaves its connection. One that stays on it is in
/// [`stops`](crate::stops).
const SILENCE: i8 = 1;
/// The longest time between two reports of a follower.
const REPORT: i8 = 1;
/// How long a process trusts a confirmed session: 3/8 of the session timeout.
const TRUSTED: i8 = SESSION - SILENCE - REPORT;

/// At most one process trusts a lease.
pub const ONE: &str = "one holder trusts";
/// The fence of each grant is greater than that of all earlier ones.
pub const FENCE: &str = "fences rise";
/// A lease that was lost is never trusted again.
pub const LOST: &str = "lost is for ever";
/// A process knows of each child that its session keeps alive, and will delete it.
pub const KNOWN: &str = "no child is forgotten";
/// When all processes have died, the lease is free after the session timeout.
pub const AGAIN: &str = "free after the session timeout";

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The lease is trusted for the whole session timeout.
    TrustForSession,
    /// The trust counts from the answer to the claim.
    TrustFromAnswer,
    /// The trust counts from the answer to a renewal.
    TrustFromAnswerToRenewal,
    /// The lease is trusted until the process hears that its session has expired.
    TrustUntilHeard,
    /// A renewal is confirmed by a read.
    RenewalByRead,
    /// A process that was stopped continues on its old connection.
    SilenceIgnored,
    /// A waiter takes the lease when the child before its own is gone.
    BeforeIsGone,
    /// A claim whose answer was lost forgets its child.
    ChildForgotten,
    /// The children are not ephemeral.
    NotEphemeral,
    /// The fence is the number of the child, which begins anew with its node.
    FenceIsNumber,
}

/// The model with its bounds.
#[derive(Clone, Debug)]
pub struct Sessions {
    bug: Option<Bug>,
    /// The last tick.
    time: i8,
    /// How many claims each process sends.
    claims: &'static [u8],
    renewals: u8,
    /// Whether the follower is cut off from the leader at some time.
    cuts: bool,
    /// Whether the node of the lease is deleted at some time while it has no child.
    sweeps: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Connection {
    None,
    Follower,
    Leader,
    /// As `Leader`, for a process whose session never ends.
    Steady,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Child {
    number: i8,
    /// The number of the transaction that created it.
    created: i8,
    process: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// The claim was sent.
    Claiming {
        sent: i8,
    },
    /// The servers have answered that the child is there, and whether it is the first.
    Answered {
        child: Child,
        is_first: bool,
        sent: i8,
    },
    /// Its child waits behind this one.
    Queued {
        child: Child,
        before: Option<Child>,
    },
    Holding(Holder),
    /// The child is to be deleted.
    Leaving {
        child: Child,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Holder {
    child: Child,
    trust: Trust,
    renewal: Option<Renewal>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Renewal {
    sent: i8,
    is_answered: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    phase: Phase,
    claims: u8,
    connection: Connection,
    /// When it gave the last sign of life.
    seen: i8,
    /// The follower has not reported it.
    is_unreported: bool,
    /// When the leader lets its session expire. `None`: it has expired.
    session: Option<i8>,
}

/// What all know together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct State {
    now: i8,
    processes: Vec<Process>,
    children: Vec<Child>,
    /// The number of the last transaction, and of the next child.
    transaction: i8,
    number: i8,
    renewals: u8,
    reported: i8,
    is_cut: bool,
    has_swept: bool,
    // What the properties look at.
    greatest_fence: i8,
    has_fallen: bool,
    served: u8,
}

#[derive(Clone, Debug, PartialEq)]
#[doc(hidden)]
pub enum Action {
    Tick,
    Ping(usize),
    Report,
    Cut,
    Leave(usize),
    Connect(usize),
    Expire(usize),
    Claim(usize),
    Create(usize),
    Hear(usize),
    LoseAnswer(usize),
    Look(usize),
    GiveUp(usize),
    Renew(usize),
    Confirm(usize),
    HearRenewal(usize),
    Release(usize),
    Delete(usize),
    Sweep,
}

impl State {
    /// Whether a write of the process reaches the leader, which finds its session alive.
    fn can_write(&self, process: usize) -> bool {
        let it = &self.processes[process];
        let is_through = match it.connection {
            Connection::None => false,
            Connection::Follower => !self.is_cut,
            Connection::Leader | Connection::Steady => true,
        };
        is_through && it.session.is_some()
    }

    /// The process gives a sign of life.
    fn touch(&mut self, process: usize) {
        let now = self.now;
        let it = &mut self.processes[process];
        it.seen = now;
        match it.connection {
            Connection::None | Connection::Steady => {}
            Connection::Follower => it.is_unreported = true,
            Connection::Leader => it.session = it.session.map(|_| now + SESSION),
        }
    }

    fn delete(&mut self, child: Child) {
        self.transaction += 1;
        self.children.retain(|it| *it != child);
    }
}

impl Phase {
    fn holder(&self) -> Option<&Holder> {
        if let Self::Holding(it) = self { Some(it) } else { None }
    }

    fn child(&self) -> Option<Child> {
        match self {
            Self::Idle | Self::Claiming { .. } => None,
            Self::Answered { child, .. } | Self::Queued { child, .. } | Self::Leaving { child } => Some(*child),
            Self::Holding(holder) => Some(holder.child),
        }
    }
}

impl Sessions {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn trusted(&self) -> i8 {
        match self.bug {
            Some(Bug::TrustForSession) => SESSION,
            Some(Bug::TrustUntilHeard) => 2 * SESSION,
            _ => TRUSTED,
        }
    }

    fn expire(&self, s: &mut State, process: usize) {
        s.processes[process].session = None;
        if !self.has(Bug::NotEphemeral) {
            s.children.retain(|it| it.process != process);
        }
    }

    fn hear(&self, s: &mut State, process: usize) -> Option<()> {
        let now = s.now;
        let Phase::Answered { child, is_first, sent } = s.processes[process].phase else { return None };
        s.processes[process].phase = if is_first {
            let fence = if self.has(Bug::FenceIsNumber) { child.number } else { child.created };
            let trust = Trust::new(if self.has(Bug::TrustFromAnswer) { now } else { sent }, self.trusted());
            // A process that hears too late is no holder.
            if !trust.is_lost(now) {
                s.has_fallen |= fence <= s.greatest_fence;
                s.greatest_fence = s.greatest_fence.max(fence);
                s.served |= 1 << process;
            }
            Phase::Holding(Holder { child, trust, renewal: None })
        } else {
            Phase::Queued { child, before: s.children.iter().filter(|it| **it < child).max().copied() }
        };
        Some(())
    }

    /// The process connects again, or hears that its session has expired and opens another one.
    fn connect(s: &mut State, process: usize) {
        let now = s.now;
        let connection = if s.is_cut { Connection::Leader } else { Connection::Follower };
        let it = &mut s.processes[process];
        if it.session.is_none() {
            it.phase = Phase::Idle;
        }
        (it.connection, it.seen, it.session, it.is_unreported) = (connection, now, Some(now + SESSION), false);
    }

    /// Whether a new process gets the lease, if all others have died.
    fn is_free_again(&self, s: &State) -> bool {
        let mut s = s.clone();
        (0..s.processes.len()).for_each(|it| self.expire(&mut s, it));
        s.children.is_empty()
    }
}

impl Model for Sessions {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // The sessions of the others do not matter: they find the lease free, or not.
        let process = |(number, claims): (usize, &u8)| Process {
            phase: Phase::Idle,
            claims: *claims,
            connection: if self.cuts && number == 0 { Connection::Follower } else { Connection::Steady },
            seen: 0,
            is_unreported: false,
            session: Some(SESSION),
        };
        vec![State {
            now: 0,
            processes: self.claims.iter().enumerate().map(process).collect(),
            children: Vec::new(),
            transaction: 0,
            number: 1,
            renewals: self.renewals,
            reported: 0,
            is_cut: false,
            has_swept: false,
            greatest_fence: 0,
            has_fallen: false,
            served: 0,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.now < self.time && (s.is_cut || s.now - s.reported < REPORT) {
            actions.push(Action::Tick);
        }
        if !s.is_cut {
            actions.push(Action::Report);
        }
        if self.cuts && !s.is_cut {
            actions.push(Action::Cut);
        }
        if self.sweeps && !s.has_swept && s.children.is_empty() {
            actions.push(Action::Sweep);
        }
        for (number, process) in s.processes.iter().enumerate() {
            if process.connection != Connection::Steady && process.session.is_some_and(|it| it <= s.now) {
                actions.push(Action::Expire(number));
            }
            match process.connection {
                Connection::Steady => {}
                Connection::None => actions.push(Action::Connect(number)),
                Connection::Follower | Connection::Leader => {
                    if process.seen < s.now {
                        actions.push(Action::Ping(number));
                    }
                    if s.is_cut && process.connection == Connection::Follower {
                        actions.push(Action::Leave(number));
                    }
                }
            }
            let can_write = s.can_write(number);
            match &process.phase {
                Phase::Idle if process.claims > 0 && process.connection != Connection::None => {
                    actions.push(Action::Claim(number));
                }
                Phase::Claiming { .. } if can_write => actions.push(Action::Create(number)),
                Phase::Answered { .. } => actions.extend([Action::Hear(number), Action::LoseAnswer(number)]),
                Phase::Queued { .. } => {
                    if can_write {
                        actions.push(Action::Look(number));
                    }
                    actions.push(Action::GiveUp(number));
                }
                Phase::Holding(holder) => {
                    actions.push(Action::Release(number));
                    match &holder.renewal {
                        None if s.renewals > 0 && !holder.trust.is_lost(s.now) => actions.push(Action::Renew(number)),
                        None => {}
                        Some(Renewal { is_answered: true, .. }) => actions.push(Action::HearRenewal(number)),
                        Some(_) => {
                            let reads = self.has(Bug::RenewalByRead) && process.connection == Connection::Follower;
                            if can_write || reads {
                                actions.push(Action::Confirm(number));
                            }
                        }
                    }
                }
                Phase::Leaving { .. } if can_write => actions.push(Action::Delete(number)),
                Phase::Idle | Phase::Claiming { .. } | Phase::Leaving { .. } => {}
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        let now = s.now;
        match action {
            Action::Tick => {
                s.now += 1;
                for process in s.processes.iter_mut().filter(|it| it.connection != Connection::Steady) {
                    if now - process.seen >= SILENCE && !self.has(Bug::SilenceIgnored) {
                        process.connection = Connection::None;
                    }
                }
            }
            Action::Ping(process) => s.touch(process),
            Action::Report => {
                s.reported = now;
                for process in s.processes.iter_mut().filter(|it| it.is_unreported) {
                    process.is_unreported = false;
                    process.session = process.session.map(|_| now + SESSION);
                }
            }
            Action::Cut => {
                s.is_cut = true;
                s.processes.iter_mut().for_each(|it| it.is_unreported = false);
            }
            Action::Leave(process) => s.processes[process].connection = Connection::None,
            Action::Connect(process) => Self::connect(&mut s, process),
            Action::Expire(process) => self.expire(&mut s, process),
            Action::Claim(process) => {
                s.processes[process].claims -= 1;
                s.processes[process].phase = Phase::Claiming { sent: now };
            }
            Action::Create(process) => {
                let Phase::Claiming { sent } = s.processes[process].phase else { return None };
                s.touch(process);
                s.transaction += 1;
                let child = Child { number: s.number, created: s.transaction, process };
                s.number += 1;
                s.children.push(child);
                s.processes[process].phase = Phase::Answered { child, is_first: s.children[0] == child, sent };
            }
            Action::Hear(process) => self.hear(&mut s, process)?,
            Action::LoseAnswer(process) => {
                let child = s.processes[process].phase.child()?;
                s.processes[process].phase =
                    if self.has(Bug::ChildForgotten) { Phase::Idle } else { Phase::Leaving { child } };
            }
            Action::Look(process) => {
                let Phase::Queued { child, before } = s.processes[process].phase else { return None };
                s.touch(process);
                let is_first = if self.has(Bug::BeforeIsGone) {
                    !before.is_some_and(|it| s.children.contains(&it))
                } else {
                    s.children.first() == Some(&child)
                };
                if !is_first {
                    return None;
                }
                s.processes[process].phase = Phase::Answered { child, is_first, sent: now };
            }
            Action::GiveUp(process) | Action::Release(process) => {
                let child = s.processes[process].phase.child()?;
                s.processes[process].phase = Phase::Leaving { child };
            }
            Action::Renew(process) => {
                s.renewals -= 1;
                let Phase::Holding(holder) = &mut s.processes[process].phase else { return None };
                holder.renewal = Some(Renewal { sent: now, is_answered: false });
            }
            Action::Confirm(process) => {
                let is_there = s.processes[process].phase.child().is_some_and(|it| s.children.contains(&it));
                s.touch(process);
                let Phase::Holding(holder) = &mut s.processes[process].phase else { return None };
                if !is_there && !self.has(Bug::RenewalByRead) {
                    return None;
                }
                holder.renewal.as_mut()?.is_answered = true;
            }
            Action::HearRenewal(process) => {
                let trusted = self.trusted();
                let Phase::Holding(holder) = &mut s.processes[process].phase else { return None };
                let sent = holder.renewal.take()?.sent;
                let from = if self.has(Bug::TrustFromAnswerToRenewal) { now } else { sent };
                holder.trust.renewed(now, from, trusted);
            }
            Action::Delete(process) => {
                let child = s.processes[process].phase.child()?;
                s.touch(process);
                s.delete(child);
                s.processes[process].phase = Phase::Idle;
            }
            Action::Sweep => {
                s.has_swept = true;
                s.transaction += 1;
                s.number = 1;
            }
        }
        let now = s.now;
        for process in &mut s.processes {
            if let Phase::Holding(holder) = &mut process.phase {
                holder.trust.look(now);
            }
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn holders(s: &State) -> impl Iterator<Item = &Holder> {
            s.processes.iter().filter_map(|it| it.phase.holder())
        }
        vec![
            Property::always(ONE, |_, s: &State| holders(s).filter(|it| !it.trust.is_lost(s.now)).count() <= 1),
            Property::always(FENCE, |_, s: &State| !s.has_fallen),
            Property::always(LOST, |_, s: &State| !holders(s).any(|it| it.trust.has_returned(s.now))),
            Property::always(KNOWN, |_, s: &State| {
                let is_known = |child: &Child| {
                    let process = &s.processes[child.process];
                    process.session.is_none() || process.phase.child() == Some(*child)
                };
                s.children.iter().all(is_known)
            }),
            Property::always(AGAIN, |model: &Self, s: &State| model.is_free_again(s)),
            Property::sometimes("all are served, and all faults happen", |model: &Self, s: &State| {
                usize::try_from(s.served.count_ones()).unwrap_or(0) == model.claims.len()
                    && s.renewals == 0
                    && s.is_cut == model.cuts
                    && s.has_swept == model.sweeps
            }),
        ]
    }
}

impl Protocol for Sessions {
    type Bug = Bug;

    fn scopes() -> Vec<Scope<Self>> {
        let base = Self { bug: None, time: 4, claims: &[1, 1], renewals: 0, cuts: false, sweeps: false };
        vec![
            Scope {
                name: "sessions",
                model: Self { cuts: true, renewals: 1, ..base.clone() },
                limits: &[],
                bugs: &[
                    Bug::TrustForSession,
                    Bug::TrustFromAnswer,
                    Bug::TrustFromAnswerToRenewal,
                    Bug::TrustUntilHeard,
                    Bug::RenewalByRead,
                    Bug::SilenceIgnored,
                    Bug::ChildForgotten,
                    Bug::NotEphemeral,
                ],
            },
            Scope {
                name: "queue and sweep",
                model: Self { time: 0, claims: &[1, 1, 1], sweeps: true, ..base },
                limits: &[],
                bugs: &[Bug::BeforeIsGone, Bug::FenceIsNumber],
            },
        ]
    }

    fn with(self, bug: Bug) -> Self {
        Self { bug: Some(bug), ..self }
    }
}
