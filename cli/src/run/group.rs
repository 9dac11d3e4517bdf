//! The process group of the command: all that it has started, unless it left the group.

use std::{
    env::current_exe,
    ffi::OsString,
    fs::{read_dir, read_to_string},
    os::unix::process::CommandExt,
    process::{Command, id},
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use tokio::signal::unix::{Signal as Received, SignalKind, signal};

use super::ended_by;
use crate::{exit::Exit, table::printable};

#[derive(Debug)]
pub(crate) struct Group {
    leader: Pid,
    changes: Received,
    /// Whether there may be changes that were not looked at.
    may_have_changed: bool,
}

/// What has become of a child.
pub(super) enum Change {
    /// The command has ended.
    Ended(Exit),
    /// The command was stopped by this signal.
    Stopped(Signal),
    /// Another child has ended: the sentinel, or an orphan of the command's.
    Other(Pid),
    /// Another child was stopped.
    OtherStopped(Pid),
}

impl Group {
    /// A group whose first process becomes the command as soon as it may [`go`](Self::go).
    pub(super) fn start(command: &[OsString], environment: Vec<(&'static str, OsString)>) -> Result<Self> {
        let changes = signal(SignalKind::child())?;
        // Orphans of the command become children of this process, which then can tell when they have ended.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        nix::sys::prctl::set_child_subreaper(true)?;
        let mut launcher = Command::new(current_exe()?);
        launcher.args(["__launch", &id().to_string(), "--"]).args(command).envs(environment).process_group(0);
        let launcher = launcher.spawn().context("cannot start a process")?;
        let leader = Pid::from_raw(launcher.id().cast_signed());
        // It stops itself at once.
        while waitpid(leader, Some(WaitPidFlag::WUNTRACED)) == Err(Errno::EINTR) {}
        Ok(Self { leader, changes, may_have_changed: true })
    }

    pub(super) fn go(&mut self) -> Result<()> {
        Ok(killpg(self.leader, Signal::SIGCONT)?)
    }

    pub(super) fn id(&self) -> Pid {
        self.leader
    }

    /// Sends a signal to all of it. One that has ended needs none.
    pub(super) fn signal(&self, signal: Signal) {
        _ = killpg(self.leader, signal);
        // What is stopped gets a signal only when it goes on.
        if signal != Signal::SIGKILL {
            _ = killpg(self.leader, Signal::SIGCONT);
        }
    }

    /// Whether any of it is there that has not ended.
    pub(super) fn is_there(&self) -> bool {
        match killpg(self.leader, None) {
            Err(Errno::ESRCH) => false,
            // Of another user, whose processes may be hidden.
            Err(_) => true,
            // A process that has ended stays in its group until its parent looks, who may have left the group.
            Ok(()) => self.members().is_none_or(|it| !it.is_empty()),
        }
    }

    /// The next child that has ended or stopped.
    pub(super) async fn changed(&mut self) -> Result<Change> {
        loop {
            if !self.may_have_changed {
                self.changes.recv().await;
            }
            // Several children can end at one signal.
            self.may_have_changed = true;
            match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.leader => {
                    return Ok(Change::Ended(Exit::Code(u8::try_from(code & 0xff)?)));
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == self.leader => {
                    return Ok(Change::Ended(ended_by(signal)));
                }
                Ok(WaitStatus::Stopped(pid, by)) if pid == self.leader => return Ok(Change::Stopped(by)),
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _)) => return Ok(Change::Other(pid)),
                Ok(WaitStatus::Stopped(pid, _)) => return Ok(Change::OtherStopped(pid)),
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => self.may_have_changed = false,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(err) => return Err(err.into()),
            }
        }
    }

    /// Its processes, as people know them.
    pub(super) fn names(&self) -> String {
        self.members().filter(|it| !it.is_empty()).map_or_else(|| format!("group {}", self.leader), |it| it.join(", "))
    }

    /// Its processes that have not ended, by name and number. `None` where the system has no list of them.
    fn members(&self) -> Option<Vec<String>> {
        let mut members = Vec::new();
        for process in read_dir("/proc").ok()?.flatten() {
            let stat = read_to_string(process.path().join("stat")).unwrap_or_default();
            // `pid (name) state parent group …`; the name may have parentheses of its own.
            let Some((process, rest)) = stat.rsplit_once(')') else { continue };
            let mut rest = rest.split_whitespace();
            let has_ended = matches!(rest.next(), Some("Z" | "X"));
            if !has_ended && rest.nth(1).and_then(|it| it.parse().ok()) == Some(self.leader.as_raw()) {
                let (pid, name) = process.split_once(" (").unwrap_or(("", process));
                members.push(format!("{} {pid}", printable(name)));
            }
        }
        Some(members)
    }
}
