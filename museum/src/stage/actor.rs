//! A participant: what its script calls.

use std::{future::Future, sync::Arc};

use super::{Shown, board::Board};

/// A participant of a run. Its script awaits a turn before each step, and reports its state in between.
#[derive(Debug, Clone)]
pub(crate) struct Actor {
    pub(super) who: usize,
    pub(super) name: &'static str,
    pub(super) board: Arc<Board>,
}

impl Actor {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Waits for its turn, does the work, and records it with its result.
    pub(crate) async fn step<T: Shown>(&self, text: impl Into<String>, work: impl Future<Output = T>) -> T {
        self.board.turn(self.who, text.into()).await;
        let result = work.await;
        self.board.result(self.who, result.shown());
        result
    }

    /// It is inside from now on. That is a breach if another participant is inside.
    pub(crate) fn enters(&self) {
        self.board.enters(self.who);
    }

    /// It is no longer inside. Called before the lock is freed, because another participant may enter at once.
    pub(crate) fn leaves(&self) {
        self.board.leaves(self.who, "leaves");
    }

    /// As [`leaves`](Self::leaves), with another word in its column.
    pub(crate) fn stops(&self, how: &str) {
        self.board.leaves(self.who, how);
    }

    /// It wants the lock from now on, until it enters or gives up. So does a participant whose step waits.
    pub(crate) fn wants(&self) {
        self.board.wants(self.who);
    }

    pub(crate) fn gives_up(&self, how: &str) {
        self.board.gives_up(self.who, how);
    }

    /// Writes a word in its column.
    pub(crate) fn mark(&self, mark: &str) {
        self.board.mark(self.who, mark);
    }

    /// The result of its step is wrong.
    pub(crate) fn breach(&self, what: impl Into<String>) {
        self.board.breach(self.who, what.into());
    }

    pub(super) fn ended(&self) {
        self.board.ended(self.who);
    }
}
