//! How the first caller of a queue goes on, as a state machine: it knows no clock, no I/O and no chance.
//!
//! | answer | the next attempt |
//! |---|---|
//! | taken | none |
//! | held for a known time | after growing pauses, but when that time is over at the latest |
//! | held for an unknown time | after growing pauses of their own |
//! | held by a holder of this process | after the longest pause, but when its trust is over at the latest |
//! | queued behind tickets | after the releases that are ahead, or the pause that the answer names |
//! | silent, at once | as held for an unknown time |
//! | silent for longer than the longest pause | after the shortest pause: the attempt has taken its time |
//!
//! A release ends a pause. When the deadline has passed, there is no next attempt, but for the first one.

use std::time::Duration;

use tokio::time::Instant;

use crate::policy::Backoff;

/// Pauses between two attempts. The first are short because many locks are held briefly.
const PAUSES: Backoff = Backoff { base: Duration::from_millis(4), cap: Duration::from_millis(250) };

/// How often a caller asks the store though a holder of its process has the lease, which may have been stolen.
const ASK_ANYWAY: Duration = Duration::from_secs(1);

/// Time limit of the first attempt when the caller's own wait is shorter.
pub(crate) const FIRST_ANSWER: Duration = Duration::from_millis(500);

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum Outcome<T> {
    /// The lease is taken.
    Done(T),
    /// Another holder has the lease. It becomes free after `free_in`, unless it is renewed or released earlier. `None`:
    /// the expiry is unknown, for example because another transaction has the row locked.
    Held { free_in: Option<Duration> },
    /// The request has a ticket, and waits for older ones or is the next one. Retry after `ahead` releases in this
    /// process, or after `pause`.
    Ticketed { ahead: u32, pause: Duration },
    /// The store did not answer within the time limit.
    Silent,
}

/// What was known of the lease when the deadline passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another holder had the lease.
    Held,
    /// The store had not answered.
    NoAnswer,
    /// This caller had not reached the head of the queue: other callers of this process were before it. `answered`: one
    /// of those had learned, since this one joined, who has the lease. For a caller that asks again also: had got what
    /// others may have, too.
    NotFirst { answered: bool },
}

/// What the caller does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<T> {
    Done(T),
    GiveUp(Refused),
    Pause(Pause),
}

/// A random time between these. A release ends the pause; with `ahead` above 1, the `ahead`-th release does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) least: Duration,
    pub(super) most: Duration,
    pub(super) ahead: u32,
}

#[derive(Debug)]
pub(super) struct Asking {
    deadline: Instant,
    /// When the current attempt was sent, or the last one answered.
    asked: Instant,
    is_first_attempt: bool,
    /// What is known if the deadline passes during an attempt.
    known: Refused,
    /// The number of pauses so far: after answers, and after those that tell no expiry.
    pauses: u32,
    blind_pauses: u32,
}

impl Asking {
    pub(super) fn new(now: Instant, deadline: Instant) -> Self {
        Self { deadline, asked: now, is_first_attempt: true, known: Refused::NoAnswer, pauses: 0, blind_pauses: 0 }
    }

    /// Whether the deadline has passed. Another attempt would have no time for an answer.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        !self.is_first_attempt && now >= self.deadline
    }

    /// The holder of this process who is waited for without an attempt. From time to time there is none, because the
    /// lease may have been stolen from it.
    pub(super) fn waits_for<H>(&self, now: Instant, holder: Option<H>) -> Option<H> {
        holder.filter(|_| now < self.asked + ASK_ANYWAY)
    }

    /// An attempt is sent. Returns its time limit, after which nothing more is known than [`known`](Self::known).
    pub(super) fn send(&mut self, now: Instant) -> Instant {
        self.asked = now;
        if self.is_first_attempt { self.deadline.max(now + FIRST_ANSWER) } else { self.deadline }
    }

    pub(super) fn known(&self) -> Refused {
        self.known
    }

    /// A holder of this process has the lease, and trusts in it for this time. Its release, or its loss, ends a pause.
    pub(super) fn held_here<T>(&mut self, now: Instant, left: Duration) -> Next<T> {
        self.known = Refused::Held;
        self.blind_pauses = 0;
        self.pause(now, Pause::exact(PAUSES.cap).at_most(after(left)))
    }

    /// The attempt was answered.
    pub(super) fn answered<T>(&mut self, now: Instant, outcome: Outcome<T>) -> Next<T> {
        let took = now.saturating_duration_since(self.asked);
        self.asked = now;
        if !matches!(outcome, Outcome::Silent) {
            self.known = Refused::Held;
        }
        let pause = match outcome {
            Outcome::Done(taken) => return Next::Done(taken),
            Outcome::Held { free_in: Some(free_in) } => {
                self.blind_pauses = 0;
                Pause::growing(&mut self.pauses).at_most(after(free_in))
            }
            Outcome::Ticketed { ahead, pause } => Pause { ahead, ..Pause::exact(pause.min(PAUSES.cap)) },
            Outcome::Silent if took > PAUSES.cap => Pause::exact(PAUSES.base),
            // Neither a row lock nor a quick failure tells how long the lease is held.
            Outcome::Held { free_in: None } | Outcome::Silent => Pause::growing(&mut self.blind_pauses),
        };
        self.pause(now, pause)
    }

    fn pause<T>(&mut self, now: Instant, pause: Pause) -> Next<T> {
        self.is_first_attempt = false;
        let left = self.deadline.saturating_duration_since(now);
        if left.is_zero() { Next::GiveUp(self.known) } else { Next::Pause(pause.at_most(left)) }
    }
}

impl Pause {
    fn exact(pause: Duration) -> Self {
        Self { least: pause, most: pause, ahead: 0 }
    }

    /// Partly random, so that the processes do not ask at the same times.
    fn growing(number: &mut u32) -> Self {
        let most = PAUSES.ceiling(*number);
        *number += 1;
        Self { least: most / 2, most, ahead: 0 }
    }

    fn at_most(self, limit: Duration) -> Self {
        Self { least: self.least.min(limit), most: self.most.min(limit), ..self }
    }
}

/// Just after this time, so that the expiry is not missed by a tick.
fn after(left: Duration) -> Duration {
    left + Duration::from_millis(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    const HELD: Outcome<()> = Outcome::Held { free_in: Some(Duration::from_secs(9)) };

    const LOCKED: Outcome<()> = Outcome::Held { free_in: None };

    fn asking() -> (Instant, Asking) {
        let start = Instant::now();
        (start, Asking::new(start, start + Duration::from_secs(60)))
    }

    fn between(least: u32, most: u32) -> Next<()> {
        Next::Pause(Pause { least: least * MILLI, most: most * MILLI, ahead: 0 })
    }

    #[test]
    fn each_answer_leads_to_the_pause_of_the_table() {
        let free_in = |millis: u32| Outcome::Held { free_in: Some(millis * MILLI) };
        let queued = |ahead, millis: u32| Outcome::Ticketed { ahead, pause: millis * MILLI };
        let pause = |outcome: Outcome<()>, took: u32| {
            let (start, mut asking) = asking();
            asking.send(start);
            asking.answered(start + took * MILLI, outcome)
        };
        assert_eq!(pause(Outcome::Done(()), 0), Next::Done(()));
        assert_eq!(pause(HELD, 0), between(2, 4));
        assert_eq!(pause(free_in(2), 0), between(2, 3));
        assert_eq!(pause(free_in(0), 0), between(1, 1));
        assert_eq!(pause(LOCKED, 0), between(2, 4));
        assert_eq!(pause(Outcome::Silent, 250), between(2, 4));
        assert_eq!(pause(Outcome::Silent, 251), between(4, 4));
        assert_eq!(pause(queued(0, 20), 0), between(20, 20));
        let behind = Pause { ahead: 3, ..Pause::exact(PAUSES.cap) };
        assert_eq!(pause(queued(3, 900), 0), Next::Pause(behind));
        let (start, mut asking) = asking();
        assert_eq!(asking.held_here(start, 9000 * MILLI), between(250, 250));
        assert_eq!(asking.held_here(start, 7 * MILLI), between(8, 8));
    }

    #[test]
    fn the_pauses_grow_and_those_without_an_expiry_grow_on_their_own() {
        let (start, mut asking) = asking();
        let mut next = |outcome| asking.answered(start, outcome);
        for most in [4, 8, 16, 32, 64, 128, 250, 250] {
            assert_eq!(next(HELD), between(most / 2, most));
        }
        assert_eq!([next(LOCKED), next(Outcome::Silent), next(LOCKED)], [between(2, 4), between(4, 8), between(8, 16)]);
        assert_eq!(next(HELD), between(125, 250));
        assert_eq!(next(LOCKED), between(2, 4), "an answer with an expiry begins them anew");
        _ = asking.held_here::<()>(start, MILLI);
        assert_eq!(asking.answered(start, LOCKED), between(2, 4));
    }

    #[test]
    fn at_the_deadline_the_caller_gives_up_and_says_what_it_knows() {
        let start = Instant::now();
        let deadline = start + 30 * MILLI;
        let at_the_end = |before: &[Outcome<()>], last: Outcome<()>| {
            let mut asking = Asking::new(start, deadline);
            for outcome in before {
                let outcome = if matches!(outcome, Outcome::Silent) { Outcome::Silent } else { LOCKED };
                _ = asking.answered(start, outcome);
            }
            asking.answered(deadline, last)
        };
        assert_eq!(at_the_end(&[], LOCKED), Next::GiveUp(Refused::Held));
        assert_eq!(at_the_end(&[], Outcome::Silent), Next::GiveUp(Refused::NoAnswer));
        assert_eq!(at_the_end(&[Outcome::Silent], Outcome::Silent), Next::GiveUp(Refused::NoAnswer));
        assert_eq!(at_the_end(&[LOCKED], Outcome::Silent), Next::GiveUp(Refused::Held));
        assert_eq!(at_the_end(&[], Outcome::Done(())), Next::Done(()));
        let mut asking = Asking::new(start, deadline);
        assert_eq!(asking.answered(deadline - MILLI, HELD), between(1, 1), "no pause lasts beyond it");
        assert_eq!(asking.held_here::<()>(deadline, MILLI), Next::GiveUp(Refused::Held));
    }

    #[test]
    fn the_first_attempt_has_time_for_an_answer_and_no_other_goes_beyond_the_deadline() {
        let start = Instant::now();
        let mut asking = Asking::new(start, start + MILLI);
        assert!(!asking.is_over(start + FIRST_ANSWER));
        assert_eq!(asking.send(start), start + FIRST_ANSWER);
        assert_eq!(asking.known(), Refused::NoAnswer);
        _ = asking.answered(start, LOCKED);
        assert!(!asking.is_over(start) && asking.is_over(start + MILLI));
        assert_eq!(asking.send(start), start + MILLI);
        assert_eq!(asking.known(), Refused::Held);
    }

    #[test]
    fn the_store_is_asked_each_second_though_a_holder_of_this_process_is_known() {
        let (start, mut asking) = asking();
        let waits = |asking: &Asking, millis: u32| asking.waits_for(start + millis * MILLI, Some(())).is_some();
        assert!(waits(&asking, 999) && !waits(&asking, 1000));
        _ = asking.held_here::<()>(start + 900 * MILLI, MILLI);
        assert!(!waits(&asking, 1000));
        _ = asking.answered(start + 1000 * MILLI, HELD);
        assert!(waits(&asking, 1999) && !waits(&asking, 2000));
        assert_eq!(asking.waits_for(start, None::<()>), None);
    }
}
