//! Leases in the table of a database: one row, two processes, the messages between them, the server's clock, and a
//! standby.
//!
//! A process that is stopped does nothing, and a message that is lost is never delivered: neither needs an action.

use std::collections::BTreeSet;

use stateright::{Model, Property};

use crate::{
    check::{Protocol, Scope},
    life::{Effect, Event, Step, Trust},
};

/// The ttl of each lease.
const TTL: i8 = 2;
/// How long a lease stays taken after its grant, where requests have `min_hold`.
const MIN_HOLD: i8 = 2;
/// The server's clock at the beginning.
const START: i8 = 6;
/// How much a fence made from the clock rises in a tick.
const CLOCK: i16 = 4;
/// The fences of one grant.
const FENCES: i16 = 2;
/// How long a sweep leaves a row that is not in use.
const RETENTION: i8 = 1;
/// The clock of the standby is behind by no more than this.
const CLOCKS_DIFFER: i8 = 3;

/// At most one process trusts a lease.
pub const ONE: &str = "one holder trusts";
/// The row has the token of a holder that trusts, and has not expired.
pub const ROW: &str = "who trusts has the row";
/// The fence of each holder is greater than that of all earlier ones.
pub const FENCE: &str = "fences rise";
/// A lease that was lost is never trusted again.
pub const LOST: &str = "lost is for ever";
/// Only the newest holder commits.
pub const COMMIT: &str = "the newest holder commits";
/// `min_hold` is kept.
pub const HOLD: &str = "min_hold is kept";
/// A steal frees the lease that was looked at, and no later one.
pub const STEAL: &str = "a steal takes what was seen";
/// A request that polls for a ttl gets the lease, if all others are dead.
pub const AGAIN: &str = "free after a ttl";

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The trust counts from the answer to the claim.
    TrustFromAnswer,
    /// The trust counts from the answer to a renewal.
    TrustFromAnswerToRenewal,
    /// A renewal whose answer is late restores a trust that has ended.
    LateAnswerRestoresTrust,
    /// All claims of a process have one token.
    TokenOfProcess,
    /// A release does not compare the token.
    ReleaseByKey,
    /// Another clock than the server's, a tick ahead, decides what has expired.
    ExpiryByAnotherClock,
    /// A refused claim prolongs the lease.
    RefusalProlongs,
    /// The fence is a counter in the row.
    FenceIsCounter,
    /// The fence is the clock.
    FenceIsClock,
    /// The next grant leaves no room for the fences of hand-overs.
    NoSpareFences,
    /// A lease is handed over whose release was sent.
    HandsOverReleased,
    /// The trust of the next holder counts from the hand-over.
    TrustFromHandOver,
    /// A sweep deletes a row whose fence is above the clock.
    SweepForgetsFence,
    /// A sweep deletes a row at its expiry.
    SweepWithoutRetention,
    /// A sweep deletes, by key, a row that it has found free before.
    SweepInTwoSteps,
    /// An expiry that is further away than the ttl stays.
    NoCut,
    /// An expiry that is further away than the ttl counts as expired.
    CutFrees,
    /// A release ignores `min_hold`.
    MinHoldForgotten,
    /// A claim of a lease that is kept for `min_hold` succeeds: no process holds it.
    MinHoldIsFree,
    /// A steal does not compare the fence.
    StealByKey,
    /// A commit does not look at the row.
    CommitUnchecked,
    /// A claim takes an expired row that a transaction has pinned.
    PinIgnored,
    /// The lease is released before the commit.
    ReleaseBeforeCommit,
    /// A promotion waits for no ttl.
    PauseWithoutTtl,
    /// A promotion does not wait for clocks that differ.
    PauseWithoutClocks,
    /// A promotion does not wait until the clock has reached the fences of the standby.
    PauseWithoutFences,
}

/// The model with its bounds.
#[derive(Clone, Debug, Default)]
pub struct Table {
    bug: Option<Bug>,
    /// The last tick.
    time: i8,
    /// How many claims each process sends.
    claims: [u8; 2],
    /// How many of these happen at most.
    most: Budget,
    /// By how much the clock of the server can be set.
    steps: &'static [i8],
    /// Whether leases have a `min_hold`.
    min_hold: bool,
    /// Whether operators steal.
    steals: bool,
    /// Whether unused rows are swept.
    sweeps: bool,
    /// Whether holders verify and commit.
    commits: bool,
    failover: Option<Failover>,
}

/// How a standby is promoted.
#[derive(Clone, Copy, Debug)]
struct Failover {
    /// By how much its clock can differ from that of the old primary.
    clocks: &'static [i8],
    /// Whether the promotion waits as `docs/operating.md` says. If not, it takes a tick.
    pauses: bool,
    /// Whether grants are so rare that no fence is above the clock.
    calm: bool,
}

/// How many of these may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Budget {
    renewals: u8,
    repeats: u8,
    hand_overs: u8,
    steps: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[doc(hidden)]
pub enum Token {
    Of {
        process: u8,
        claim: u8,
    },
    /// Keeps a lease taken for its `min_hold`.
    Nobody,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    token: Option<Token>,
    fence: i16,
    acquired: i8,
    expires: i8,
    ttl: i8,
    /// The number of the grant.
    grant: u8,
    /// Whether an open transaction has pinned it.
    pinned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[doc(hidden)]
pub enum Message {
    Claim { token: Token, sent: i8 },
    Granted { token: Token, sent: i8, fence: i16, grant: u8 },
    Renew { token: Token, sent: i8 },
    Renewed { token: Token, sent: i8 },
    Release { token: Token },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Side {
    Idle,
    Asking {
        token: Token,
        sent: i8,
    },
    Holding(Holder),
    /// Its release was sent.
    Ending(Holder),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Holder {
    token: Token,
    fence: i16,
    grant: u8,
    trust: Trust,
    /// Its open transaction has pinned the row.
    pins: bool,
    /// It has released the lease and still writes: a bug.
    writes_late: bool,
}

/// What all know together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct State {
    now: i8,
    /// How much the server's clock is ahead of the processes'.
    ahead: i8,
    row: Option<Row>,
    standby: Option<Row>,
    /// The row that a sweep has found, or an operator seen, by its grant.
    seen: Option<u8>,
    has_failed_over: bool,
    /// The grant that an operator has ended.
    stolen: Option<u8>,
    sides: [Side; 2],
    claims: [u8; 2],
    left: Budget,
    net: BTreeSet<Message>,
    // What the properties look at.
    grants: u8,
    greatest_fence: i16,
    kept_until: i8,
    served: [bool; 2],
    broken: BTreeSet<&'static str>,
}

#[derive(Clone, Debug, PartialEq)]
#[doc(hidden)]
pub enum Action {
    Tick,
    Claim(usize),
    GiveUp(usize),
    Renew(usize),
    Release(usize),
    Ended(usize),
    HandOver(usize),
    Verify(usize),
    Commit(usize),
    CommitPlainly(usize),
    WriteLate(usize),
    Deliver(Message),
    Repeat(Message),
    Look,
    Steal,
    SweepFinds,
    Sweep,
    SetClock(i8),
    Replicate,
    FailOver(i8),
}

impl State {
    fn clock(&self) -> i8 {
        START + self.now + self.ahead
    }

    fn clock_fence(&self) -> i16 {
        i16::from(self.clock()) * CLOCK
    }

    /// A holder gets this fence.
    fn given(&mut self, fence: i16) {
        if fence <= self.greatest_fence {
            self.broken.insert(FENCE);
        }
        self.greatest_fence = self.greatest_fence.max(fence);
    }

    fn row_of(&mut self, token: Token) -> Option<&mut Row> {
        self.row.as_mut().filter(|it| it.token == Some(token))
    }

    /// The holder's transaction is committed.
    fn commit(&mut self, grant: u8) {
        if self.row.is_some_and(|it| it.grant != grant) {
            self.broken.insert(COMMIT);
        }
    }
}

impl Table {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The server runs the statement of a claim.
    fn claim(&self, s: &mut State, token: Token) -> Option<(i16, u8)> {
        let (clock, clock_fence) = (s.clock(), s.clock_fence());
        let last = s.row.map_or(0, |it| it.fence);
        if let Some(row) = &mut s.row {
            if row.token == Some(token) {
                row.expires = row.expires.max(clock + TTL);
                return Some((row.fence, row.grant));
            }
            let is_ahead = row.expires - row.ttl > clock;
            let decides = if self.has(Bug::ExpiryByAnotherClock) { clock + 1 } else { clock };
            let is_free = row.expires <= decides
                || self.has(Bug::CutFrees) && is_ahead
                || self.has(Bug::MinHoldIsFree) && row.token == Some(Token::Nobody);
            if !is_free || row.pinned && !self.has(Bug::PinIgnored) {
                if self.has(Bug::RefusalProlongs) {
                    row.expires = row.expires.max(clock + TTL);
                } else if is_ahead && !self.has(Bug::NoCut) {
                    row.acquired -= row.expires - row.ttl - clock;
                    row.expires = clock + row.ttl;
                }
                return None;
            }
        }
        let fence = match self.bug {
            Some(Bug::FenceIsCounter) => last + FENCES,
            Some(Bug::FenceIsClock) => clock_fence,
            Some(Bug::NoSpareFences) => clock_fence.max(last + 1),
            _ => clock_fence.max(last + FENCES),
        };
        if self.failover.is_some_and(|it| it.calm) && fence > clock_fence {
            return None;
        }
        s.grants += 1;
        s.given(fence);
        if clock < s.kept_until {
            s.broken.insert(HOLD);
        }
        s.kept_until = 0;
        s.row = Some(Row {
            token: Some(token),
            fence,
            acquired: clock,
            expires: clock + TTL,
            ttl: TTL,
            grant: s.grants,
            pinned: false,
        });
        Some((fence, s.grants))
    }

    /// The server runs the statement of a release.
    fn release(&self, s: &mut State, token: Token) {
        let clock = s.clock();
        let by_key = self.has(Bug::ReleaseByKey);
        let Some(row) = &mut s.row else { return };
        if row.token != Some(token) && !by_key || row.expires <= clock || row.pinned {
            return;
        }
        let kept_until = row.acquired + MIN_HOLD;
        if self.min_hold {
            s.kept_until = kept_until;
        }
        if self.min_hold && kept_until > clock && !self.has(Bug::MinHoldForgotten) {
            (row.token, row.expires, row.ttl) = (Some(Token::Nobody), kept_until, kept_until - clock);
        } else {
            (row.token, row.expires) = (None, 0);
        }
    }

    /// The server runs the statement of a renewal.
    fn renew(s: &mut State, token: Token) -> bool {
        let clock = s.clock();
        let Some(row) = s.row_of(token).filter(|it| it.expires > clock) else { return false };
        row.expires = row.expires.min(clock + row.ttl).max(clock + TTL);
        true
    }

    fn is_swept(&self, s: &State, row: &Row) -> bool {
        let retention = if self.has(Bug::SweepWithoutRetention) { 0 } else { RETENTION };
        let before = s.clock() - retention;
        let is_below = row.fence < i16::from(before) * CLOCK - FENCES;
        row.expires < before && (is_below || self.has(Bug::SweepForgetsFence))
    }

    fn deliver(&self, s: &mut State, message: Message) {
        let now = s.now;
        match message {
            Message::Claim { token, sent } => {
                if let Some((fence, grant)) = self.claim(s, token) {
                    s.net.insert(Message::Granted { token, sent, fence, grant });
                }
            }
            Message::Granted { token, sent, fence, grant } => {
                let Token::Of { process, .. } = token else { return };
                let from = if self.has(Bug::TrustFromAnswer) { now } else { sent };
                let trust = Trust::new(from, TTL);
                s.served[usize::from(process)] = true;
                s.sides[usize::from(process)] =
                    Side::Holding(Holder { token, fence, grant, trust, pins: false, writes_late: false });
            }
            Message::Renew { token, sent } => {
                if Self::renew(s, token) {
                    s.net.insert(Message::Renewed { token, sent });
                }
            }
            Message::Renewed { token, sent } => {
                let Some(holder) = s.sides.iter_mut().find_map(|it| it.holder_of(token)) else { return };
                let from = if self.has(Bug::TrustFromAnswerToRenewal) { now } else { sent };
                if self.has(Bug::LateAnswerRestoresTrust) && holder.trust.is_lost(now) {
                    holder.trust.restart(now, TTL);
                } else {
                    holder.trust.renewed(now, from, TTL);
                }
            }
            Message::Release { token } => self.release(s, token),
        }
    }

    /// Whether the message can still change something.
    fn matters(&self, s: &State, message: Message) -> bool {
        match message {
            Message::Claim { .. } => true,
            Message::Granted { token, .. } => {
                s.sides.iter().any(|it| matches!(it, Side::Asking { token: it, .. } if *it == token))
            }
            Message::Renewed { token, .. } => {
                s.sides.iter().any(|it| matches!(it, Side::Holding(it) | Side::Ending(it) if it.token == token))
            }
            Message::Renew { token, .. } | Message::Release { token } => {
                let has = |row: &Option<Row>| row.is_some_and(|it| it.token == Some(token));
                let is_claimed = |it: &Message| matches!(it, Message::Claim { token: it, .. } if *it == token);
                let any_token = matches!(self.bug, Some(Bug::TokenOfProcess | Bug::ReleaseByKey));
                any_token || has(&s.row) || has(&s.standby) || s.net.iter().any(is_claimed)
            }
        }
    }

    fn commit(&self, s: &mut State, process: usize) {
        let now = s.now;
        let clock = s.clock();
        let Side::Holding(holder) = &mut s.sides[process] else { return };
        let Effect::Release(_) = holder.trust.on(now, Event::Committing(Step::Releases)) else { return };
        let (token, grant, pins) = (holder.token, holder.grant, holder.pins);
        let row = s.row_of(token).filter(|it| pins || it.expires > clock);
        let is_mine = row.is_some();
        if let Some(row) = row {
            (row.token, row.expires, row.pinned) = (None, 0, false);
        }
        if is_mine || self.has(Bug::CommitUnchecked) {
            s.commit(grant);
        }
        s.sides[process] = Side::Idle;
    }

    fn fail_over(&self, s: &mut State, failover: Failover, differs: i8) {
        s.has_failed_over = true;
        s.row = s.standby.map(|it| Row { pinned: false, ..it });
        s.ahead += differs;
        for side in &mut s.sides {
            if let Side::Holding(holder) = side {
                holder.pins = false;
            }
        }
        s.now += if failover.pauses { self.pause(s) } else { 1 };
    }

    /// The longest ttl, how much the clocks can differ, and how far the fences of the standby are above its clock.
    fn pause(&self, s: &State) -> i8 {
        let above = s.row.map_or(0, |it| it.fence + FENCES) - s.clock_fence();
        let until_fences = i8::try_from((above + CLOCK - 1) / CLOCK).unwrap_or(i8::MAX).max(0);
        let part = |bug, length| if self.has(bug) { 0 } else { length };
        part(Bug::PauseWithoutTtl, TTL)
            + part(Bug::PauseWithoutClocks, CLOCKS_DIFFER)
            + part(Bug::PauseWithoutFences, until_fences)
    }

    /// Whether a request that polls for a ttl gets the lease, if all processes have died.
    fn is_free_again(&self, s: &State) -> bool {
        let mut s = s.clone();
        if let Some(row) = &mut s.row {
            row.pinned = false;
        }
        (0..=TTL).any(|_| {
            let taken = self.claim(&mut s, Token::Of { process: 9, claim: 0 });
            s.now += 1;
            taken.is_some()
        })
    }
}

impl Side {
    fn holder(&self) -> Option<&Holder> {
        if let Self::Holding(it) = self { Some(it) } else { None }
    }

    fn holder_of(&mut self, token: Token) -> Option<&mut Holder> {
        match self {
            Self::Holding(it) | Self::Ending(it) if it.token == token => Some(it),
            _ => None,
        }
    }
}

impl Model for Table {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            ahead: 0,
            row: None,
            standby: None,
            seen: None,
            has_failed_over: false,
            stolen: None,
            sides: [Side::Idle, Side::Idle],
            claims: [0; 2],
            left: self.most,
            net: BTreeSet::new(),
            grants: 0,
            greatest_fence: 0,
            kept_until: 0,
            served: [false; 2],
            broken: BTreeSet::new(),
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.now < self.time {
            actions.push(Action::Tick);
        }
        for (process, side) in s.sides.iter().enumerate() {
            match side {
                Side::Idle if s.claims[process] < self.claims[process] => actions.push(Action::Claim(process)),
                Side::Idle => {}
                Side::Asking { .. } => actions.push(Action::GiveUp(process)),
                Side::Holding(holder) => {
                    let is_trusted = !holder.trust.is_lost(s.now);
                    if holder.writes_late {
                        actions.push(Action::WriteLate(process));
                        continue;
                    }
                    if is_trusted && s.left.renewals > 0 {
                        actions.push(Action::Renew(process));
                    }
                    if is_trusted && s.left.hand_overs > 0 {
                        actions.push(Action::HandOver(process));
                    }
                    if self.commits {
                        if is_trusted && !holder.pins {
                            actions.push(Action::Verify(process));
                        }
                        if holder.pins {
                            actions.push(Action::CommitPlainly(process));
                        }
                        actions.push(Action::Commit(process));
                    }
                    if !holder.pins {
                        actions.push(Action::Release(process));
                    }
                }
                Side::Ending(_) => {
                    actions.push(Action::Ended(process));
                    if s.left.hand_overs > 0 {
                        actions.push(Action::HandOver(process));
                    }
                }
            }
        }
        for message in &s.net {
            actions.push(Action::Deliver(*message));
            if s.left.repeats > 0 {
                actions.push(Action::Repeat(*message));
            }
        }
        if self.steals && s.stolen.is_none() {
            actions.push(if s.seen.is_some() { Action::Steal } else { Action::Look });
        }
        if self.sweeps {
            let is_due = s.row.is_some_and(|it| self.is_swept(s, &it));
            if self.has(Bug::SweepInTwoSteps) {
                if s.seen.is_some() {
                    actions.push(Action::Sweep);
                } else if is_due {
                    actions.push(Action::SweepFinds);
                }
            } else if is_due {
                actions.push(Action::Sweep);
            }
        }
        // No wait is long enough for a clock that is set back after grants that are lost.
        let may_step = self.failover.is_none() || s.standby == s.row && !s.has_failed_over;
        if s.left.steps > 0 && may_step {
            actions.extend(self.steps.iter().map(|by| Action::SetClock(*by)));
        }
        if let Some(failover) = self.failover
            && !s.has_failed_over
        {
            if s.standby != s.row {
                actions.push(Action::Replicate);
            }
            actions.extend(failover.clocks.iter().map(|differs| Action::FailOver(*differs)));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        let now = s.now;
        match action {
            Action::Tick => s.now += 1,
            Action::Claim(process) => {
                let number = if self.has(Bug::TokenOfProcess) { 0 } else { s.claims[process] };
                let token = Token::Of { process: u8::try_from(process).ok()?, claim: number };
                s.claims[process] += 1;
                s.sides[process] = Side::Asking { token, sent: now };
                s.net.insert(Message::Claim { token, sent: now });
            }
            Action::GiveUp(process) => {
                let Side::Asking { token, .. } = s.sides[process] else { return None };
                s.sides[process] = Side::Idle;
                s.net.insert(Message::Release { token });
            }
            Action::Renew(process) => {
                s.left.renewals -= 1;
                let token = s.sides[process].holder()?.token;
                s.net.insert(Message::Renew { token, sent: now });
            }
            Action::Release(process) => {
                let Side::Holding(mut holder) = s.sides[process].clone() else { return None };
                holder.trust.on(now, Event::Releasing);
                s.net.insert(Message::Release { token: holder.token });
                s.sides[process] = if s.left.hand_overs > 0 { Side::Ending(holder) } else { Side::Idle };
            }
            Action::Ended(process) => s.sides[process] = Side::Idle,
            Action::HandOver(process) => {
                let (Side::Holding(mut holder) | Side::Ending(mut holder)) = s.sides[process].clone() else {
                    return None;
                };
                let next = match holder.trust.on(now, Event::HandingOver) {
                    Effect::HandOver(_) if self.has(Bug::TrustFromHandOver) => Trust::new(now, TTL),
                    Effect::HandOver(next) => Trust::of(next),
                    _ if self.has(Bug::HandsOverReleased) => holder.trust.clone(),
                    _ => return None,
                };
                s.left.hand_overs -= 1;
                let fence = holder.fence + 1;
                s.given(fence);
                s.sides[process] = Side::Holding(Holder { fence, trust: next, ..holder });
            }
            Action::Verify(process) => {
                let clock = s.clock();
                let Side::Holding(mut holder) = s.sides[process].clone() else { return None };
                if holder.trust.on(now, Event::Verifying) == Effect::Refuse {
                    return None;
                }
                let row = s.row_of(holder.token).filter(|it| it.expires > clock)?;
                row.pinned = true;
                holder.trust.on(now, Event::Verified);
                holder.pins = true;
                s.sides[process] = Side::Holding(holder);
            }
            Action::CommitPlainly(process) => {
                let Side::Holding(holder) = &mut s.sides[process] else { return None };
                holder.pins = false;
                let (token, grant) = (holder.token, holder.grant);
                s.commit(grant);
                if let Some(row) = s.row_of(token) {
                    row.pinned = false;
                }
            }
            Action::Commit(process) if self.has(Bug::ReleaseBeforeCommit) => {
                let token = s.sides[process].holder()?.token;
                let clock = s.clock();
                let row = s.row_of(token).filter(|it| it.expires > clock)?;
                (row.token, row.expires, row.pinned) = (None, 0, false);
                if let Side::Holding(holder) = &mut s.sides[process] {
                    holder.trust.on(now, Event::Released);
                    holder.writes_late = true;
                }
            }
            Action::Commit(process) => self.commit(&mut s, process),
            Action::WriteLate(process) => {
                let grant = s.sides[process].holder()?.grant;
                s.commit(grant);
                s.sides[process] = Side::Idle;
            }
            Action::Deliver(message) => {
                s.net.remove(&message);
                self.deliver(&mut s, message);
            }
            Action::Repeat(message) => {
                s.left.repeats -= 1;
                self.deliver(&mut s, message);
            }
            Action::Look => s.seen = Some(s.row.filter(|it| it.token.is_some())?.grant),
            Action::Steal => {
                let seen = s.seen?;
                let row = s.row.as_mut().filter(|it| it.grant == seen || self.has(Bug::StealByKey))?;
                (row.token, row.expires) = (None, 0);
                s.stolen = Some(row.grant);
                if row.grant != seen {
                    s.broken.insert(STEAL);
                }
            }
            Action::SweepFinds => s.seen = Some(s.row?.grant),
            Action::Sweep => {
                s.row = None;
                s.seen = None;
            }
            Action::SetClock(by) => {
                s.left.steps -= 1;
                s.ahead += by;
            }
            Action::Replicate => s.standby = s.row,
            Action::FailOver(differs) => self.fail_over(&mut s, self.failover?, differs),
        }
        let now = s.now;
        for side in &mut s.sides {
            if let Side::Holding(holder) = side {
                holder.trust.look(now);
            }
        }
        s.net = s.net.iter().copied().filter(|it| self.matters(&s, *it)).collect();
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn trusting(s: &State) -> impl Iterator<Item = &Holder> {
            let holders = s.sides.iter().filter_map(Side::holder);
            holders.filter(|it| !it.trust.is_lost(s.now) && s.stolen != Some(it.grant))
        }
        vec![
            Property::always(ONE, |_, s: &State| trusting(s).count() <= 1),
            Property::always(ROW, |_, s: &State| {
                let has_row = |token| s.row.is_some_and(|it| it.token == Some(token) && it.expires > s.clock());
                trusting(s).all(|it| has_row(it.token))
            }),
            Property::always(FENCE, |_, s: &State| !s.broken.contains(FENCE)),
            Property::always(LOST, |_, s: &State| {
                !s.sides.iter().filter_map(Side::holder).any(|it| it.trust.has_returned(s.now))
            }),
            Property::always(COMMIT, |_, s: &State| !s.broken.contains(COMMIT)),
            Property::always(HOLD, |_, s: &State| !s.broken.contains(HOLD)),
            Property::always(STEAL, |_, s: &State| !s.broken.contains(STEAL)),
            Property::always(AGAIN, |model: &Self, s: &State| model.is_free_again(s)),
            Property::sometimes("both are served, and all faults happen", |model: &Self, s: &State| {
                s.served == [true; 2]
                    && s.left == Budget::default()
                    && (s.has_failed_over || model.failover.is_none())
                    && (s.stolen.is_some() || !model.steals)
            }),
        ]
    }
}

impl Protocol for Table {
    type Bug = Bug;

    fn scopes() -> Vec<Scope<Self>> {
        let budget = Budget::default();
        let failover = |clocks, pauses, calm| Some(Failover { clocks, pauses, calm });
        let base = Self { time: 2, claims: [1, 1], ..Self::default() };
        vec![
            Scope {
                name: "requests",
                model: Self { claims: [2, 1], most: Budget { renewals: 1, repeats: 1, ..budget }, ..base.clone() },
                limits: &[],
                bugs: &[
                    Bug::TrustFromAnswer,
                    Bug::TrustFromAnswerToRenewal,
                    Bug::LateAnswerRestoresTrust,
                    Bug::TokenOfProcess,
                    Bug::ReleaseByKey,
                    Bug::ExpiryByAnotherClock,
                    Bug::RefusalProlongs,
                ],
            },
            Scope {
                name: "hand-over",
                model: Self { most: Budget { renewals: 1, hand_overs: 1, ..budget }, ..base.clone() },
                limits: &[],
                bugs: &[Bug::NoSpareFences, Bug::HandsOverReleased, Bug::TrustFromHandOver],
            },
            Scope {
                name: "sweep, clock set back",
                model: Self {
                    sweeps: true,
                    time: 3,
                    steps: &[-1],
                    most: Budget { steps: 1, ..budget },
                    ..base.clone()
                },
                limits: &[],
                bugs: &[
                    Bug::FenceIsCounter,
                    Bug::FenceIsClock,
                    Bug::SweepForgetsFence,
                    Bug::SweepWithoutRetention,
                    Bug::SweepInTwoSteps,
                    Bug::NoCut,
                    Bug::CutFrees,
                ],
            },
            Scope {
                name: "min_hold",
                model: Self { min_hold: true, ..base.clone() },
                limits: &[],
                bugs: &[Bug::MinHoldForgotten, Bug::MinHoldIsFree],
            },
            Scope {
                name: "steal",
                model: Self { steals: true, ..base.clone() },
                limits: &[],
                bugs: &[Bug::StealByKey],
            },
            Scope {
                name: "transactions",
                model: Self { commits: true, ..base.clone() },
                limits: &[],
                bugs: &[Bug::CommitUnchecked, Bug::PinIgnored, Bug::ReleaseBeforeCommit],
            },
            Scope {
                name: "clock set forward",
                model: Self { commits: true, steps: &[TTL], most: Budget { steps: 1, ..budget }, ..base.clone() },
                limits: &[ONE, ROW],
                bugs: &[Bug::CommitUnchecked],
            },
            Scope {
                name: "failover",
                model: Self { commits: true, failover: failover(&[0, -2], false, false), ..base.clone() },
                limits: &[ONE, ROW, FENCE],
                bugs: &[],
            },
            Scope {
                name: "failover, clocks agree, few grants",
                model: Self { commits: true, failover: failover(&[0], false, true), ..base.clone() },
                limits: &[ONE, ROW],
                bugs: &[Bug::FenceIsCounter],
            },
            Scope {
                name: "failover after a pause",
                model: Self {
                    time: 1,
                    claims: [2, 1],
                    failover: failover(&[0, -CLOCKS_DIFFER], true, false),
                    steps: &[-CLOCKS_DIFFER],
                    most: Budget { steps: 1, ..budget },
                    ..base
                },
                limits: &[],
                bugs: &[Bug::PauseWithoutTtl, Bug::PauseWithoutClocks, Bug::PauseWithoutFences],
            },
        ]
    }

    fn with(self, bug: Bug) -> Self {
        Self { bug: Some(bug), ..self }
    }
}
