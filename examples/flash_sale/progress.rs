//! A line on the standard error that shows how many draws are done. Prints nothing unless that is a terminal.

use std::{
    io::{IsTerminal, Write, stderr},
    time::Instant,
};

/// The line of one strategy, erased when this is dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    name: &'static str,
    draws: u64,
    started: Instant,
    visible: bool,
}

impl Progress {
    pub(crate) fn new(name: &'static str, draws: u32) -> Self {
        Self { name, draws: draws.into(), started: Instant::now(), visible: stderr().is_terminal() }
    }

    /// Replaces the line.
    pub(crate) fn show(&self, done: u64) {
        const WIDTH: u64 = 40;

        let Self { name, draws, started, .. } = self;
        let filled = usize::try_from(done * WIDTH / (*draws).max(1)).unwrap_or_default();
        let (bar, seconds) = ("=".repeat(filled), started.elapsed().as_secs());
        self.write(&format!("{name:8} [{bar:40}] {done}/{draws} draws {seconds}s"));
    }

    fn write(&self, line: &str) {
        if self.visible {
            // Nothing depends on this line, so a failed write is ignored.
            let _ = write!(stderr(), "\r\x1b[2K{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.write("");
    }
}
