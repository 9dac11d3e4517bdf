//! The calls of this process that lock the row of a lease, and of which nothing was heard.
//!
//! They belong to the token: if the lease is handed over, a renewal of its last holder may still be on its way.

use crate::mutex::Mutex;

/// How many calls without an answer are known, the last ones. A later renewal ends them all.
const MOST: usize = 64;

/// The calls of one token that are not over, as far as this process knows.
#[derive(Debug, Default)]
pub(super) struct OpenCalls(Mutex<Sent>);

#[derive(Debug, Default)]
struct Sent {
    last: u64,
    open: Vec<Call>,
}

/// A call, by its place among those of its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Call(u64);

impl OpenCalls {
    /// A call is sent now.
    pub(super) fn send(&self) -> Call {
        let mut sent = self.0.lock();
        sent.last += 1;
        if sent.open.len() == MOST {
            sent.open.remove(0);
        }
        let call = Call(sent.last);
        sent.open.push(call);
        call
    }

    /// The call is over.
    pub(super) fn answered(&self, call: Call) {
        self.0.lock().open.retain(|it| *it != call);
    }

    /// The call is over and had the row locked, so those that were sent before count as over. One that it has overtaken
    /// on the way is forgotten, and may lock the row later. One that pins the row shares the lock, and is told by
    /// [`Pin`](super::state::Pin).
    pub(super) fn had_the_row(&self, call: Call) {
        self.0.lock().open.retain(|it| *it > call);
    }

    /// The lease is released: none has its row locked, and one that comes later finds nothing.
    pub(super) fn end(&self) {
        self.0.lock().open = Vec::new();
    }

    pub(super) fn are_open(&self) -> bool {
        !self.0.lock().open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_open_until_it_is_answered_or_a_later_one_had_the_row() {
        let calls = OpenCalls::default();
        let are_open = || calls.are_open();
        assert!(!are_open());
        let [first, second, third] = [(); 3].map(|()| calls.send());
        calls.answered(second);
        assert!(are_open(), "the first and the third have no answer");
        calls.had_the_row(first);
        assert!(are_open(), "the answers come in another order");
        calls.answered(third);
        assert!(!are_open());
        let [_, last] = [(); 2].map(|()| calls.send());
        calls.had_the_row(last);
        assert!(!are_open(), "the first was overtaken");
    }

    #[test]
    fn of_many_calls_the_last_ones_are_known_and_a_release_ends_them() {
        let calls = OpenCalls::default();
        let sent: Vec<_> = (0..2 * MOST).map(|_| calls.send()).collect();
        assert_eq!(calls.0.lock().open, sent[MOST..]);
        calls.end();
        assert!(!calls.are_open());
        assert!(calls.send() > sent[2 * MOST - 1]);
    }
}
