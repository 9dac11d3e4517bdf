//! A participant: what its script calls.

use std::{future::Future, sync::Arc};

use super::{Shown, board::Board};

/// A participant of a run. Its script awaits a turn before each step, and says what becomes of it in between.
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

    /// Waits for its turn, does the work, and writes it down with its result.
    pub(crate) async fn step<T: Shown>(&self, text: impl Into<String>, work: impl Future<Output = T>) -> T {
        self.board.turn(self.who, text.into()).await;
        let result = work.await;
        self.board.result(self.who, result.shown());
        result
    }

    /// From now on it believes that it alone has the lock. That is a breach if another one believes so too.
    pub(crate) fn enters(&self) {
        self.board.enters(self.who);
    }

    /// It has finished. Called before the step that frees the lock, because others may enter during that step.
    pub(crate) fn leaves(&self) {
        self.board.leaves(self.who, "leaves");
    }

    /// It does nothing more: killed, or stopped by the library.
    pub(crate) fn stops(&self, how: &str) {
        self.board.leaves(self.who, how);
    }

    /// From now on it wants the lock, until it enters or gives up. A step that waits wants it, too.
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

    /// What it got is wrong.
    pub(crate) fn breach(&self, what: impl Into<String>) {
        self.board.breach(self.who, what.into());
    }

    pub(super) fn ended(&self) {
        self.board.ended(self.who);
    }
}
