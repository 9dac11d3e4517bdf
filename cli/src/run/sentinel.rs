//! A second process that ends the command when this one cannot: it is killed, or stopped beyond the expiry of the
//! lease. It reads deadlines from a pipe, one for each renewal, and kills the process group at a deadline that has
//! passed and at the end of the pipe.
//!
//! The lines are `group ID`, `until NANOSECONDS` (of the clock that goes on while the machine sleeps) and `done`.

use std::{
    env::current_exe,
    fs::write,
    io::{self, Write, stdin},
    os::fd::AsFd,
    os::unix::process::CommandExt,
    process::{ChildStdin, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill, killpg},
    time::{ClockId, clock_gettime},
    unistd::{Pid, read, setsid},
};
use rustix::process::setpriority_process;

use super::group::Group;
use crate::exit::{Exit, tell};

/// The clock of the deadlines: it goes on while the machine sleeps, where there is such a clock.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

/// As the system lists it, so that a signal for all processes called `lockkit` does not reach it.
const NAME: &str = "lk-sentinel";

/// The longest pause between two looks at the clock, which `poll` does not wait for while the machine sleeps.
const LOOK: Duration = Duration::from_secs(1);

/// What the guarded process knows of its sentinel.
#[derive(Debug)]
pub(crate) struct Sentinel {
    pid: Pid,
    pipe: ChildStdin,
    told: Option<Instant>,
}

impl Sentinel {
    pub(crate) fn start() -> Result<Self> {
        let mut sentinel = Command::new(current_exe()?);
        sentinel.arg0(NAME).arg("__sentinel").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = sentinel.spawn().context("cannot start the sentinel")?;
        let pipe = child.stdin.take().context("the sentinel has no pipe")?;
        // A sentinel that does not read must not hold up the process that it guards.
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Self { pid: Pid::from_raw(child.id().cast_signed()), pipe, told: None })
    }

    pub(crate) fn is(&self, pid: Pid) -> bool {
        self.pid == pid
    }

    /// From now on it guards this group.
    pub(crate) fn guard(&mut self, group: &Group, until: Instant) -> Result<()> {
        self.say(&format!("group {}", group.id()))?;
        self.until(group, until)
    }

    /// Until when the group may run. A sentinel that does not listen is replaced.
    pub(crate) fn until(&mut self, group: &Group, until: Instant) -> Result<()> {
        if self.told == Some(until) {
            return Ok(());
        }
        let nanos = now() + until.saturating_duration_since(Instant::now()).as_nanos();
        if self.say(&format!("until {nanos}")).is_err() {
            // It may be stopped. Its end is noticed, and another one started.
            _ = kill(self.pid, Signal::SIGKILL);
            let old = std::mem::replace(self, Self::start()?);
            drop(old.pipe);
            return self.guard(group, until);
        }
        self.told = Some(until);
        Ok(())
    }

    /// The group has ended.
    pub(crate) fn dismiss(mut self) {
        // One that has gone need not be told.
        _ = self.say("done");
    }

    fn say(&mut self, line: &str) -> io::Result<()> {
        self.pipe.write_all(format!("{line}\n").as_bytes())
    }
}

/// The sentinel itself.
pub(crate) fn watch() -> Result<Exit> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    nix::sys::prctl::set_name(&std::ffi::CString::new(NAME)?)?;
    // Signals of the terminal and of the group do not reach another session.
    _ = setsid();
    // A busy machine runs it first, and one that is out of memory ends it last. Only root may ask for that.
    _ = setpriority_process(None, -20);
    _ = write("/proc/self/oom_score_adj", "-500");
    let mut watch = Watch::default();
    let mut unread = Vec::new();
    loop {
        if watch.is_late() {
            return Ok(watch.end("the lease was not renewed in time"));
        }
        let (pause, stdin) = (watch.left().min(LOOK), stdin());
        let timeout = PollTimeout::try_from(pause + Duration::from_millis(1))?;
        match poll(&mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(err) => return Err(err.into()),
        }
        // Before it hears a later one: a machine that has slept wakes all processes at once.
        if watch.is_late() {
            return Ok(watch.end("the lease was not renewed in time"));
        }
        let mut buffer = [0; 4096];
        match read(stdin.as_fd(), &mut buffer) {
            Ok(0) => return Ok(watch.end("lockkit was killed")),
            Ok(length) => unread.extend_from_slice(&buffer[..length]),
            Err(Errno::EINTR) => continue,
            Err(_) => return Ok(watch.end("the pipe is broken")),
        }
        while let Some(end) = unread.iter().position(|it| *it == b'\n') {
            let line: Vec<u8> = unread.drain(..=end).collect();
            if watch.hear(&String::from_utf8_lossy(&line)) {
                return Ok(Exit::Success);
            }
        }
    }
}

/// What the sentinel has heard.
#[derive(Debug, Default)]
struct Watch {
    group: Option<Pid>,
    until: Option<u128>,
}

impl Watch {
    /// Whether this was the last line.
    fn hear(&mut self, line: &str) -> bool {
        match line.split_once(' ').map_or((line.trim(), ""), |(word, rest)| (word, rest.trim())) {
            ("group", id) => self.group = id.parse().ok().map(Pid::from_raw),
            ("until", nanos) => self.until = nanos.parse().ok(),
            ("done", _) => return true,
            _ => {}
        }
        false
    }

    fn left(&self) -> Duration {
        self.until.map_or(LOOK, |it| Duration::from_nanos(u64::try_from(it.saturating_sub(now())).unwrap_or(u64::MAX)))
    }

    fn is_late(&self) -> bool {
        self.until.is_some_and(|it| it <= now())
    }

    fn end(&self, why: &str) -> Exit {
        let Some(group) = self.group else { return Exit::Success };
        match killpg(group, Signal::SIGKILL) {
            Ok(()) => tell(format_args!("{why}: its command is killed")),
            Err(Errno::EPERM) => tell(format_args!("{why}: its command belongs to another user and cannot be killed")),
            Err(_) => {}
        }
        // One that was about to start another process may need a second one.
        for _ in 0..100 {
            sleep(Duration::from_millis(10));
            if killpg(group, Signal::SIGKILL).is_err() {
                break;
            }
        }
        Exit::Lost
    }
}

/// The time since the machine started, in nanoseconds.
fn now() -> u128 {
    clock_gettime(CLOCK).map_or(0, |it| Duration::from(it).as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentinel_understands_its_lines_and_knows_when_it_is_late() {
        let mut watch = Watch::default();
        assert!(!watch.is_late(), "it has heard nothing");
        assert!(!watch.hear("group 4711\n") && !watch.hear("nonsense\n"));
        assert_eq!(watch.group, Some(Pid::from_raw(4711)));
        assert!(!watch.hear(&format!("until {}\n", now() + 60_000_000_000)));
        assert!(!watch.is_late() && watch.left() > Duration::from_secs(50));
        assert!(!watch.hear(&format!("until {}\n", now())));
        assert!(watch.is_late());
        assert!(watch.hear("done\n"));
    }
}
