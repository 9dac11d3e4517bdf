//! The life of a lease in this process, as a state machine: it knows no clock, no I/O and no lock.
//!
//! [`Kept`](super::kept::Kept) passes events on and carries out the effects. A test runs every cell of the table of
//! [`life`](super).
//!
//! The trust lasts from the start of the last successful request for the ttl, less a margin. The store counts from a
//! later moment, so the holder stops first, however slow the network is. Two things break this: a clock that runs
//! faster than the margin allows, and a machine that was suspended (Linux does not count that time). `verify` and
//! `commit` query the database and do not depend on the clock.
//!
//! Only the holder's own process can pin its lease: `verify` is an event before its statement is sent, and is refused
//! once a release has begun, or a commit that releases. So the process knows when nothing can have pinned the lease,
//! and the cheap release (`lease_release_unpinned`) follows.
//!
//! A lease that is handed over keeps its token in the store, which cannot tell its last holder from the next. Here each
//! has a `Life` of its own: the last one is `Over` before the next begins.

use std::time::Duration;

use tokio::time::Instant;

use crate::value::error::LossReason;

/// What has become of one lease, and how long this process may trust in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Life {
    phase: Phase,
    pin: Pin,
    /// When the trust ends unless a renewal succeeds: the start of the last request that acquired or renewed the lease,
    /// plus its ttl, minus a margin. Counting from the *start* of the request keeps it before the store's own expiry,
    /// however long the answer took.
    until: Instant,
    /// The ttl of later renewals.
    ttl: Duration,
    /// The last renewal was not answered.
    is_silent: bool,
    /// The caller has the lease. Before that, the request may still wait for other leases. A ticket is never handed
    /// out.
    is_delivered: bool,
    report: Report,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// Its holder works, and may hand it over to a waiter of this process.
    Held,
    /// A commit is in flight after which it is handed over to a waiter. Nothing else hands it over.
    HandingOver,
    /// As `HandingOver`, but it will not be handed over after all.
    Cut,
    /// Only the store frees it.
    StoreOnly,
    /// It is being released: by releases, and by commits, that are not answered yet.
    Ending { ends: u32, row_released: bool },
    /// It is lost, released or handed over.
    Over(LossReason),
}

/// Whether a transaction of this process has had the lease's row locked, so that no other process could take the lease.
#[allow(unreachable_pub, reason = "the hidden operations of a database have it")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pin {
    /// None has.
    #[default]
    No,
    /// One was about to.
    Possible,
    /// One has, and may still have.
    Certain,
}

/// The end of the lease, for metrics and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Report {
    None,
    Due(LossReason),
    Done,
}

/// What happens to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Time has passed.
    Elapsed,
    /// The caller has the lease.
    Delivered,
    /// The store has renewed it. The request was sent at `sent`.
    Renewed { sent: Instant, ttl: Duration },
    /// As `Renewed`, and later renewals are for this ttl.
    Extended { sent: Instant, ttl: Duration },
    /// A renewal was not answered, and is repeated. Its outcome is unknown.
    Silent,
    /// The store does not have it any more.
    Gone,
    /// It was taken away.
    Stolen,
    /// The `Leases` were closed, which release it unless a release or a commit is in flight.
    Closed,
    /// From now on only the store frees it.
    StoreOnly,
    /// A transaction is about to lock its row.
    Verifying,
    /// A transaction has locked its row.
    Verified,
    /// A commit has come to this step.
    Committing(Step),
    /// The commit succeeded.
    Committed,
    /// The commit that had come to this step was refused.
    Refused(Step),
    /// Nobody will receive the answer of the commit.
    Unanswered,
    /// A release is about to be sent.
    Releasing,
    /// The store has released it.
    Released,
    /// A waiter of this process is about to get it.
    HandingOver,
    /// As `HandingOver`, from a holder whose commit has succeeded.
    HandingOverCommitted,
}

/// How far a commit has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The transaction renews the lease, which is handed over to a waiter after the commit.
    HandsOver,
    /// The transaction is about to release the lease.
    Releases,
    /// The transaction has released the lease.
    RowReleased,
}

/// What is to be done after an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    Nothing,
    /// Do not do it.
    Refuse,
    /// Renew the lease on.
    Renew,
    /// Release it in the store.
    Release(Pin),
    /// This is the life of the next holder's lease.
    HandOver(Life),
}

/// How much earlier than the store this process treats a lease as expired, for clocks that run at different speeds: 1 %
/// of the ttl, at least 10 ms.
fn margin(ttl: Duration) -> Duration {
    (ttl / 100).max(Duration::from_millis(10))
}

impl Life {
    /// After a grant whose request was sent at `sent`.
    pub(crate) fn new(sent: Instant, ttl: Duration) -> Self {
        Self {
            phase: Phase::Held,
            pin: Pin::No,
            until: sent + ttl.saturating_sub(margin(ttl)),
            ttl,
            is_silent: false,
            is_delivered: false,
            report: Report::None,
        }
    }

    /// The life of the next holder's lease, which has the trust of this one.
    fn next(&self) -> Self {
        let Self { until, ttl, is_silent, .. } = *self;
        Self { phase: Phase::Held, pin: Pin::No, until, ttl, is_silent, is_delivered: false, report: Report::None }
    }

    pub(crate) fn on(&mut self, now: Instant, event: Event) -> Effect {
        if let Some(expired) = self.lost(now).filter(|_| !self.is_over()) {
            // The commit may still succeed, and then it is no loss.
            let commits =
                matches!(self.phase, Phase::HandingOver | Phase::Cut | Phase::Ending { row_released: true, .. });
            self.phase = Phase::Over(expired);
            if !commits {
                self.report_soon(expired);
            }
        }
        match event {
            Event::Elapsed => {}
            Event::Delivered => self.is_delivered = true,
            Event::Renewed { sent, ttl } | Event::Extended { sent, ttl } => {
                if self.is_over() {
                    return Effect::Refuse;
                }
                // Answers can arrive in a different order than their requests.
                self.until = self.until.max(sent + ttl.saturating_sub(margin(ttl)));
                self.is_silent = false;
                if matches!(event, Event::Extended { .. }) {
                    self.ttl = ttl;
                }
            }
            Event::Silent => self.is_silent = true,
            Event::Gone => match self.phase {
                // The answer of the commit is on its way.
                Phase::Ending { row_released: true, .. } => self.phase = Phase::Over(LossReason::Released),
                _ => self.lose(LossReason::Stolen),
            },
            Event::Stolen => self.lose(LossReason::Stolen),
            Event::Closed => match self.phase {
                Phase::HandingOver | Phase::Cut => self.phase = Phase::Cut,
                Phase::Ending { .. } => {}
                Phase::Over(_) => return Effect::Release(self.pin),
                Phase::Held | Phase::StoreOnly => {
                    self.phase = Phase::Over(LossReason::Closed);
                    return Effect::Release(self.pin);
                }
            },
            Event::StoreOnly => self.leave_to_store(),
            Event::Verifying => {
                if matches!(self.phase, Phase::Ending { .. } | Phase::Over(_)) {
                    return Effect::Refuse;
                }
                self.leave_to_store();
                self.pin = self.pin.max(Pin::Possible);
            }
            Event::Verified => self.pin = Pin::Certain,
            Event::Committing(step) => return self.commit(step),
            // However long the answer took: while the commit was in flight, nobody could take the lease.
            Event::Committed => {
                self.phase = Phase::Over(LossReason::Released);
                self.report_soon(LossReason::Released);
            }
            Event::Refused(step) => {
                if let Phase::Over(reason) = self.phase {
                    self.report_loss(reason);
                    return Effect::Nothing;
                }
                self.go_on(step);
                // Otherwise, what else is to end it has stopped the renewals.
                if self.phase == Phase::StoreOnly {
                    return Effect::Renew;
                }
            }
            Event::Unanswered => {
                if let Phase::Over(reason) = self.phase {
                    self.report_loss(reason);
                } else {
                    self.phase = Phase::Over(LossReason::Released);
                    self.report_soon(LossReason::Released);
                }
            }
            Event::Releasing => {
                self.end();
                return Effect::Release(self.pin);
            }
            Event::Released => self.released(),
            Event::HandingOver if self.phase != Phase::Held => return Effect::Refuse,
            Event::HandingOverCommitted if self.phase != Phase::HandingOver => return Effect::Refuse,
            Event::HandingOver | Event::HandingOverCommitted => {
                let next = self.next();
                self.phase = Phase::Over(LossReason::Released);
                self.report_soon(LossReason::Released);
                return Effect::HandOver(next);
            }
        }
        Effect::Nothing
    }

    fn commit(&mut self, step: Step) -> Effect {
        match step {
            Step::HandsOver if self.phase != Phase::Held => Effect::Refuse,
            Step::HandsOver => {
                self.phase = Phase::HandingOver;
                self.pin = Pin::Possible;
                Effect::Nothing
            }
            Step::Releases => {
                let before = self.pin;
                self.end();
                self.pin = self.pin.max(Pin::Possible);
                Effect::Release(before)
            }
            Step::RowReleased => {
                if let Phase::Ending { row_released, .. } = &mut self.phase {
                    *row_released = true;
                }
                Effect::Nothing
            }
        }
    }

    /// Why it is over. `None` while it is trusted.
    pub(crate) fn lost(&self, now: Instant) -> Option<LossReason> {
        match self.phase {
            Phase::Over(reason) => Some(reason),
            _ if now < self.until => None,
            _ => Some(if self.is_silent { LossReason::Unreachable } else { LossReason::Expired }),
        }
    }

    /// When the trust ends unless a renewal succeeds.
    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// The ttl of later renewals.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// Whether a transaction has pinned it, or may have.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pin != Pin::No
    }

    /// Since when it is lost. `None` if it is released.
    pub(crate) fn lost_since(&self, now: Instant) -> Option<Instant> {
        let lost = self.lost(now).filter(|it| !matches!(it, LossReason::Released | LossReason::Closed));
        lost.map(|_| self.until.min(now))
    }

    pub(crate) fn is_delivered(&self) -> bool {
        self.is_delivered
    }

    /// The end, once: when it is to be reported, and only if the caller had the lease.
    pub(crate) fn take_report(&mut self) -> Option<LossReason> {
        match self.report {
            Report::Due(reason) if self.is_delivered => {
                self.report = Report::Done;
                Some(reason)
            }
            _ => None,
        }
    }

    /// The first reason stays.
    fn lose(&mut self, reason: LossReason) {
        if !self.is_over() {
            self.phase = Phase::Over(reason);
            self.report_soon(reason);
        }
    }

    /// Reports a loss that was held back while a commit was in flight.
    fn report_loss(&mut self, reason: LossReason) {
        if !matches!(reason, LossReason::Released | LossReason::Closed) {
            self.report_soon(reason);
        }
    }

    fn report_soon(&mut self, reason: LossReason) {
        if self.report != Report::Done {
            self.report = Report::Due(reason);
        }
    }

    fn leave_to_store(&mut self) {
        self.phase = match self.phase {
            Phase::Held => Phase::StoreOnly,
            Phase::HandingOver => Phase::Cut,
            other => other,
        }
    }

    fn end(&mut self) {
        self.phase = match self.phase {
            Phase::Ending { ends, row_released } => Phase::Ending { ends: ends + 1, row_released },
            over @ Phase::Over(_) => over,
            Phase::Held | Phase::HandingOver | Phase::Cut | Phase::StoreOnly => {
                Phase::Ending { ends: 1, row_released: false }
            }
        }
    }

    fn released(&mut self) {
        if !self.is_over() {
            self.phase = Phase::Over(LossReason::Released);
        }
        self.pin = Pin::No;
        self.report_soon(LossReason::Released);
    }

    /// After a commit that was refused at this step. Nobody knows what the database has been told, so only the store
    /// frees the lease from now on.
    fn go_on(&mut self, step: Step) {
        self.phase = match (self.phase, step) {
            (phase @ Phase::Ending { .. }, Step::HandsOver) => phase,
            (Phase::Ending { ends, row_released }, Step::Releases | Step::RowReleased) if ends > 1 => {
                Phase::Ending { ends: ends - 1, row_released: row_released && step != Step::RowReleased }
            }
            _ => Phase::StoreOnly,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TTL: Duration = Duration::from_secs(10);
    const PHASES: [&str; 7] = ["Held", "HandingOver", "Cut", "StoreOnly", "Ending", "RowReleased", "Over"];
    /// Of `Ending` and `RowReleased`.
    const ENDS: [u32; 3] = [1, 2, 3];

    fn phase(name: &str, ends: u32) -> Phase {
        match name {
            "Held" => Phase::Held,
            "HandingOver" => Phase::HandingOver,
            "Cut" => Phase::Cut,
            "StoreOnly" => Phase::StoreOnly,
            "Ending" => Phase::Ending { ends, row_released: false },
            "RowReleased" => Phase::Ending { ends, row_released: true },
            "Over" | "Stolen" => Phase::Over(LossReason::Stolen),
            "Released" => Phase::Over(LossReason::Released),
            "Closed" => Phase::Over(LossReason::Closed),
            _ => panic!("no phase `{name}`"),
        }
    }

    fn event(name: &str, now: Instant) -> Event {
        let step = |name: &str| match name {
            "HandsOver" => Step::HandsOver,
            "Releases" => Step::Releases,
            "RowReleased" => Step::RowReleased,
            _ => panic!("no step `{name}`"),
        };
        match name.split_once(' ').unwrap_or((name, "")) {
            ("Elapsed", "") => Event::Elapsed,
            ("Delivered", "") => Event::Delivered,
            ("Renewed", "") => Event::Renewed { sent: now, ttl: TTL },
            ("Extended", "") => Event::Extended { sent: now, ttl: TTL },
            ("Silent", "") => Event::Silent,
            ("Gone", "") => Event::Gone,
            ("Stolen", "") => Event::Stolen,
            ("Closed", "") => Event::Closed,
            ("StoreOnly", "") => Event::StoreOnly,
            ("Verifying", "") => Event::Verifying,
            ("Verified", "") => Event::Verified,
            ("Committing", at) => Event::Committing(step(at)),
            ("Committed", "") => Event::Committed,
            ("Refused", at) => Event::Refused(step(at)),
            ("Unanswered", "") => Event::Unanswered,
            ("Releasing", "") => Event::Releasing,
            ("Released", "") => Event::Released,
            ("HandingOver", "") => Event::HandingOver,
            ("HandingOverCommitted", "") => Event::HandingOverCommitted,
            _ => panic!("no event `{name}`"),
        }
    }

    /// The next phase and the name of the effect that the cell names.
    fn expected(cell: &str, before: Phase) -> (Phase, &str) {
        let words: Vec<_> = cell.trim_matches(['(', ')']).split([',', ' ']).filter(|it| !it.is_empty()).collect();
        let (mut next, mut effect) = (before, "");
        for word in words {
            match (word, &mut next) {
                ("·", _) => {}
                ("refuse" | "renew" | "release" | "replace", _) => effect = word,
                ("+1", Phase::Ending { ends, .. }) => *ends += 1,
                ("-1", Phase::Ending { ends: 1, .. }) => (next, effect) = (Phase::StoreOnly, "renew"),
                ("-1", Phase::Ending { ends, .. }) => *ends -= 1,
                ("Ending" | "RowReleased", Phase::Ending { ends, .. }) => next = phase(word, *ends),
                (name, _) => next = phase(name, 1),
            }
        }
        (next, effect)
    }

    fn effect(effect: &Effect) -> &'static str {
        match effect {
            Effect::Nothing => "",
            Effect::Refuse => "refuse",
            Effect::Renew => "renew",
            Effect::Release(_) => "release",
            Effect::HandOver(_) => "replace",
        }
    }

    const KINDS: u32 = 23;

    /// The number of the kind of event, with each step. Does not compile until a new event has one.
    fn discriminant(event: Event) -> u32 {
        let step = |step| match step {
            Step::HandsOver => 0,
            Step::Releases => 1,
            Step::RowReleased => 2,
        };
        match event {
            Event::Elapsed => 0,
            Event::Delivered => 1,
            Event::Renewed { .. } => 2,
            Event::Extended { .. } => 3,
            Event::Silent => 4,
            Event::Gone => 5,
            Event::Stolen => 6,
            Event::Closed => 7,
            Event::StoreOnly => 8,
            Event::Verifying => 9,
            Event::Verified => 10,
            Event::Committed => 11,
            Event::Unanswered => 12,
            Event::Releasing => 13,
            Event::Released => 14,
            Event::HandingOver => 15,
            Event::HandingOverCommitted => 16,
            Event::Committing(at) => 17 + step(at),
            Event::Refused(at) => 20 + step(at),
        }
    }

    fn cells(line: &str) -> Vec<&str> {
        line.trim_matches('|').split('|').map(str::trim).collect()
    }

    #[test]
    fn each_event_does_in_each_phase_what_the_table_says() {
        let now = Instant::now();
        let mut rows = include_str!("table.md").lines().filter(|it| it.starts_with('|'));
        assert_eq!(cells(rows.next().unwrap())[1..], PHASES);
        let mut events = BTreeSet::new();
        for row in rows.skip(1).map(cells) {
            assert_eq!(row.len(), 1 + PHASES.len(), "{row:?}");
            for (name, cell) in PHASES.iter().zip(&row[1..]) {
                let reasons = [LossReason::Expired, LossReason::Unreachable, LossReason::Stolen, LossReason::Released];
                let phases = match *name {
                    "Over" => reasons.map(Phase::Over).to_vec(),
                    "Ending" | "RowReleased" => ENDS.map(|it| phase(name, it)).to_vec(),
                    _ => vec![phase(name, 1)],
                };
                for phase in phases {
                    let before = Life { phase, ..Life::new(now, TTL) };
                    let mut life = before.clone();
                    let done = life.on(now, event(row[0], now));
                    assert_eq!(
                        (life.phase, effect(&done)),
                        expected(cell, before.phase),
                        "{} in {:?}",
                        row[0],
                        before.phase
                    );

                    // Expired, it is as in `Over`.
                    let mut expired = before.clone();
                    let (mut over, late) = (
                        Life { phase: expired.lost(now + TTL).map_or(before.phase, Phase::Over), ..before },
                        now + TTL,
                    );
                    assert_eq!(
                        effect(&expired.on(late, event(row[0], now))),
                        effect(&over.on(late, event(row[0], now)))
                    );
                    assert_eq!(expired.phase, over.phase, "{} in {name}, expired", row[0]);
                }
            }
            events.insert(discriminant(event(row[0], now)));
        }
        assert_eq!(events, (0..KINDS).collect(), "each event has a row");
    }

    #[test]
    fn a_release_learns_whether_a_transaction_may_have_pinned_the_lease_before() {
        let now = Instant::now();
        let pin = |events: &[Event]| {
            let mut life = Life::new(now, TTL);
            for event in &events[..events.len() - 1] {
                life.on(now, *event);
            }
            match life.on(now, events[events.len() - 1]) {
                Effect::Release(pin) => pin,
                other => panic!("{other:?}"),
            }
        };
        let commit = Event::Committing(Step::Releases);
        assert_eq!(pin(&[Event::Releasing]), Pin::No);
        assert_eq!(pin(&[commit]), Pin::No, "its own pin does not count");
        assert_eq!(pin(&[commit, Event::Releasing]), Pin::Possible);
        assert_eq!(pin(&[commit, Event::Refused(Step::Releases), Event::Releasing]), Pin::Possible);
        assert_eq!(pin(&[Event::Committing(Step::HandsOver), commit]), Pin::Possible);
        assert_eq!(pin(&[Event::Releasing, Event::Verifying, Event::Releasing]), Pin::No, "it was refused");
        assert_eq!(pin(&[Event::Verifying, commit]), Pin::Possible);
        assert_eq!(pin(&[Event::Verifying, Event::Verified, commit]), Pin::Certain);
        assert_eq!(pin(&[Event::Verifying, Event::Verified, Event::Verifying, commit]), Pin::Certain);
        assert_eq!(pin(&[Event::Verifying, Event::Verified, Event::Stolen, Event::Releasing]), Pin::Certain);
    }

    #[test]
    fn the_trust_counts_from_the_start_of_the_request_and_ends_for_good() {
        let sent = Instant::now();
        let mut life = Life::new(sent, TTL);
        assert_eq!(life.until(), sent + TTL - margin(TTL));
        assert_eq!(life.lost(life.until() - Duration::from_nanos(1)), None);
        life.on(sent + TTL / 2, Event::Renewed { sent: sent + TTL / 2, ttl: TTL });
        let until = life.until();
        assert_eq!(until, sent + TTL / 2 + TTL - margin(TTL));
        // Answers can arrive in a different order than their requests.
        life.on(sent + TTL / 2, Event::Renewed { sent: sent + TTL / 4, ttl: TTL });
        assert_eq!(life.until(), until);
        assert_eq!(life.on(until, Event::Renewed { sent: until, ttl: TTL }), Effect::Refuse);
        assert_eq!(life.lost(until), Some(LossReason::Expired));
    }

    #[test]
    fn a_lease_that_expires_while_the_store_is_silent_was_unreachable() {
        let now = Instant::now();
        for (answered, reason) in [(false, LossReason::Unreachable), (true, LossReason::Expired)] {
            let mut life = Life::new(now, TTL);
            life.on(now, Event::Silent);
            if answered {
                life.on(now, Event::Renewed { sent: now, ttl: TTL });
            }
            life.on(now + TTL, Event::Elapsed);
            assert_eq!(life.phase, Phase::Over(reason));
        }
    }

    #[test]
    fn the_next_holder_has_the_trust_of_the_last_and_nothing_else_of_it() {
        let now = Instant::now();
        let mut life = Life::new(now, TTL);
        life.on(now, Event::Delivered);
        life.on(now, Event::Silent);
        life.on(now, Event::Committing(Step::HandsOver));
        let Effect::HandOver(next) = life.on(now, Event::HandingOverCommitted) else { panic!("{life:?}") };
        assert_eq!(next, Life { is_silent: true, ..Life::new(now, TTL) });
    }

    #[test]
    fn the_end_is_reported_once_and_only_to_the_holder() {
        let now = Instant::now();
        let reports = |events: &[Event]| {
            let mut life = Life::new(now, TTL);
            let reports = events.iter().filter_map(|event| {
                life.on(now, *event);
                life.take_report()
            });
            reports.collect::<Vec<_>>()
        };
        let (out, row_released) = (Event::Delivered, Event::Committing(Step::RowReleased));
        let commit = Event::Committing(Step::Releases);
        assert_eq!(reports(&[Event::Stolen]), []);
        assert_eq!(reports(&[out, Event::Stolen, Event::Gone, Event::Released]), [LossReason::Stolen]);
        assert_eq!(reports(&[out, Event::Released, Event::Stolen]), [LossReason::Released]);
        assert_eq!(reports(&[out, Event::Closed, Event::Gone]), [], "a release by `close` is none by its holder");
        assert_eq!(reports(&[out, commit, row_released, Event::Gone]), [], "the commit may still be refused");
        assert_eq!(reports(&[out, commit, row_released, Event::Gone, Event::Committed]), [LossReason::Released]);
        assert_eq!(reports(&[out, commit, Event::Unanswered, Event::Released]), [LossReason::Released]);
        assert_eq!(reports(&[out, commit, Event::Unanswered, Event::Gone]), [LossReason::Released]);
        assert_eq!(reports(&[out, Event::HandingOver]), [LossReason::Released]);
    }

    #[test]
    fn an_expiry_is_reported_but_not_while_the_commit_may_still_succeed() {
        let now = Instant::now();
        let late = |before: &[Event], after: &[Event]| {
            let mut life = Life::new(now, TTL);
            life.on(now, Event::Delivered);
            for event in before {
                life.on(now, *event);
            }
            let mut reports = Vec::new();
            for event in [&[Event::Elapsed], after].concat() {
                life.on(now + TTL, event);
                reports.extend(life.take_report());
            }
            reports
        };
        let hands_over = Event::Committing(Step::HandsOver);
        assert_eq!(late(&[], &[Event::Gone]), [LossReason::Expired]);
        assert_eq!(late(&[Event::Silent], &[]), [LossReason::Unreachable]);
        assert_eq!(late(&[hands_over], &[Event::Committed]), [LossReason::Released]);
        assert_eq!(late(&[hands_over, Event::StoreOnly], &[Event::Committed]), [LossReason::Released]);
        assert_eq!(late(&[hands_over], &[Event::Refused(Step::HandsOver)]), [LossReason::Expired]);
        assert_eq!(late(&[hands_over], &[Event::Unanswered]), [LossReason::Expired]);
        let released = [Event::Committing(Step::Releases), Event::Committing(Step::RowReleased)];
        assert_eq!(late(&released, &[Event::Committed]), [LossReason::Released]);
        assert_eq!(late(&released, &[Event::Gone, Event::Unanswered]), [LossReason::Expired]);
        assert_eq!(late(&released, &[Event::Refused(Step::RowReleased)]), [LossReason::Expired]);
    }
}
