//! The terminal, which belongs to the group of the command while that runs: ctrl-c and ctrl-z reach the command alone,
//! and it can read.

use std::{
    fs::{File, OpenOptions},
    io::{IsTerminal, stdin, stdout},
};

use nix::{
    sys::signal::{SigSet, Signal, kill, killpg},
    unistd::{Pid, getpgrp, getpid, tcgetpgrp, tcsetpgrp},
};

use super::group::Group;

/// The terminal that this process was started from.
#[derive(Debug)]
pub(super) struct Terminal {
    /// `None` unless this process was in the foreground there.
    file: Option<File>,
    is_given: bool,
}

impl Terminal {
    /// That of the session, also if input comes from elsewhere: what asks for a password opens it by its name.
    pub(super) fn of_session() -> Self {
        let file = OpenOptions::new().read(true).write(true).open("/dev/tty").ok();
        Self { file: file.filter(|it| tcgetpgrp(it) == Ok(getpgrp())), is_given: false }
    }

    /// Gives the terminal to the command, unless others of a pipe may need it: then the command gets it when it asks.
    pub(super) fn offer(&mut self, group: &Group) {
        if stdin().is_terminal() && stdout().is_terminal() {
            self.give_to(group);
        }
    }

    pub(super) fn take_back(&mut self) {
        if self.is_given {
            self.make_foreground(getpgrp());
        }
    }

    /// A process beside this one, such as the script that started it, has not got the signal of a key that ended the
    /// command.
    pub(super) fn pass_on(&self, signal: Signal) {
        if self.is_given {
            _ = killpg(getpgrp(), signal);
        }
    }

    /// The command was stopped, by ctrl-z, say. So this process stops too, and the shell prompts. When the shell goes
    /// on with it, so does the command, if the lease is still held; else the sentinel has killed it, or does so now.
    pub(super) fn stopped(&mut self, group: &Group, by: Signal, is_held: impl Fn() -> bool) {
        if self.file.is_none() {
            return;
        }
        if matches!(by, Signal::SIGTTIN | Signal::SIGTTOU) && self.is_foreground() {
            self.give_to(group);
            return group.signal(Signal::SIGCONT);
        }
        self.take_back();
        _ = kill(getpid(), Signal::SIGSTOP);
        if self.is_foreground() {
            self.give_to(group);
        }
        group.signal(if is_held() { Signal::SIGCONT } else { Signal::SIGKILL });
    }

    fn is_foreground(&self) -> bool {
        self.file.as_ref().is_some_and(|it| tcgetpgrp(it) == Ok(getpgrp()))
    }

    fn give_to(&mut self, group: &Group) {
        self.is_given = self.file.is_some();
        self.make_foreground(group.id());
    }

    fn make_foreground(&self, group: Pid) {
        let Some(terminal) = &self.file else { return };
        // A process in the background is stopped when it changes the foreground, unless it blocks this signal. The
        // command must not inherit that.
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTTOU);
        _ = blocked.thread_block();
        // A terminal that has been closed needs no owner.
        _ = tcsetpgrp(terminal, group);
        _ = blocked.thread_unblock();
    }
}
