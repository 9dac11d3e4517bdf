//! `run`: a command under a lease. It ends before another process can have the lease.
//!
//! - `held` is the lease, whatever store it is in.
//! - `group` is the process group of the command, `launch` the process that becomes the command, `terminal` what is
//!   shared with a shell.
//! - `sentinel` is a second process: it ends the group when this one is killed or stopped.
//! - `signals` are those that this process gets.

mod group;
mod held;
pub(crate) mod launch;
pub(crate) mod sentinel;
mod signals;
mod terminal;

use std::{
    cell::OnceCell,
    env,
    ffi::OsString,
    process::id,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use lockkit::{LossReason, Released};
use lockkit_inspect::with_causes;
use nix::sys::signal::{Signal, kill};
use tokio::{
    select,
    time::{sleep_until, timeout, timeout_at},
};

use self::{
    group::{Change, Group},
    held::{Acquire, Held},
    sentinel::Sentinel,
    signals::Signals,
    terminal::Terminal,
};
use crate::{
    args::{On, RunArgs},
    block_on,
    exit::{Exit, tell},
    secret::Secrets,
    table::printable,
    target::Target,
};

/// How often the lease is looked at, at least.
const LOOK: Duration = Duration::from_secs(1);

/// How often a group is looked at that is about to end.
const ENDING: Duration = Duration::from_millis(20);

/// For how long, at least, the release of a lease may take.
const RELEASING: Duration = Duration::from_secs(1);

/// For how long a group that is killed may take to go.
const DYING: Duration = Duration::from_secs(10);

/// How long, at most, before the end of trust in the lease its command must be dead.
const EARLY: Duration = Duration::from_secs(2);

pub(crate) fn run(on: &On, mut args: RunArgs, secrets: &mut Secrets) -> Result<Exit> {
    if args.grace > args.ttl / 3 {
        tell("--grace must be at most a third of --ttl, so that there is time to renew the lease");
        return Ok(Exit::Usage);
    }
    let holder = args.holder.get_or_insert_with(this_process).clone();
    let mut target = Target::of(on, secrets)?;
    target.ttl = Some(args.ttl);
    block_on(async {
        // Before the wait: a signal ends it, and the command never starts.
        let mut signals = Signals::new()?;
        let give_back = OnceCell::new();
        let acquire = Acquire { args: &args, database: target.database, give_back: &give_back };
        let acquired = select! {
            biased;
            signal = signals.next() => Err(signal),
            acquired = target.act(acquire) => Ok(acquired),
        };
        let held = match acquired {
            Err(signal) => {
                // The request was dropped, and may have been granted on the way.
                if let Some(give_back) = give_back.get() {
                    _ = timeout(RELEASING, give_back()).await;
                }
                return Ok(ended_by(signal));
            }
            Ok(acquired) => acquired,
        };
        let held = match held {
            Ok(held) => held,
            Err(err) if err.downcast_ref::<lockkit::Error>().is_some_and(lockkit::Error::is_contended) => {
                tell(printable(&secrets.hidden_in(&err.to_string())));
                return Ok(Exit::Code(args.busy_exit));
            }
            Err(err) => return Err(err),
        };
        if args.verbose {
            tell(format_args!("`{}` is held, fence {}", printable(held.key()), held.fence()));
        }
        let mut ttl = args.ttl;
        let trust = held.trusted_until().saturating_duration_since(Instant::now());
        if trust < ttl / 2 {
            // ZooKeeper: the rest of its session timeout is for its servers.
            ttl = trust;
        }
        let watched = Watched { held: held.as_ref(), ttl, grace: args.grace.min(ttl / 3), early: (ttl / 6).min(EARLY) };
        let ended = execute(&watched, &args.command, &holder, &mut signals).await;
        // After that the lease ends by itself.
        let release_by = held.trusted_until().max(Instant::now() + RELEASING);
        let released = timeout_at(release_by.into(), held.release()).await;
        let exit = ended?;
        if args.verbose && matches!(released, Ok(Ok(Released::WhileHeld))) {
            tell("the lease is given back");
        }
        match released {
            Ok(Ok(Released::AlreadyLost)) if exit != Exit::Lost => {
                tell("the lease was lost before the command ended");
                Ok(Exit::Lost)
            }
            Ok(Ok(_)) => Ok(exit),
            Ok(Err(err)) => {
                let err = secrets.hidden_in(&with_causes(&err));
                tell(format_args!("the lease could not be given back and ends with its ttl: {err}"));
                Ok(exit)
            }
            Err(_) => {
                tell("the lease could not be given back and ends with its ttl: no answer came");
                Ok(exit)
            }
        }
    })
}

/// A lease, and how a command ends with it.
struct Watched<'a> {
    held: &'a dyn Held,
    ttl: Duration,
    grace: Duration,
    /// How long before the end of trust it must be dead: a busy machine runs a process and delivers a signal late.
    early: Duration,
}

impl Watched<'_> {
    fn dead_by(&self) -> Instant {
        self.held.trusted_until().checked_sub(self.early).unwrap_or_else(Instant::now)
    }
}

/// Runs the command and ends what is left of it.
async fn execute(watched: &Watched<'_>, command: &[OsString], holder: &str, signals: &mut Signals) -> Result<Exit> {
    let mut sentinel = Sentinel::start()?;
    let mut terminal = Terminal::of_session();
    let mut group = Group::start(command, environment(watched.held, holder))?;
    let mut end = End::default();
    let ended = supervise(watched, signals, &mut group, &mut sentinel, &mut terminal, &mut end).await;
    // Also after an error: the lease is not given up while the command may run.
    let finished = finish(watched, &mut group, &end).await;
    terminal.take_back();
    finished?;
    sentinel.dismiss();
    let exit = ended?;
    for signal in [Signal::SIGINT, Signal::SIGQUIT] {
        if exit == ended_by(signal) {
            terminal.pass_on(signal);
        }
    }
    Ok(if end.kill_at.is_some() { Exit::Lost } else { exit })
}

/// Lets the command run until it ends, or ends it with the lease. What it has started may still run then.
async fn supervise(
    watched: &Watched<'_>,
    signals: &mut Signals,
    group: &mut Group,
    sentinel: &mut Sentinel,
    terminal: &mut Terminal,
    end: &mut End,
) -> Result<Exit> {
    // Without a sentinel the command does not start.
    sentinel.guard(group, watched.dead_by()).inspect_err(|_| group.signal(Signal::SIGKILL))?;
    terminal.offer(group);
    group.go()?;
    let mut lost = watched.held.lost();
    loop {
        let (now, until) = (Instant::now(), watched.dead_by());
        if end.kill_at.is_none() {
            sentinel.until(group, until)?;
            if now + watched.grace >= until {
                end.begin(group, until);
                tell("the lease cannot be renewed: the command is ended before it expires");
            }
        }
        if end.kill_at.is_some_and(|it| now >= it) {
            group.signal(Signal::SIGKILL);
        }
        let look = (watched.ttl / 10).min(LOOK).min(until.saturating_duration_since(now + watched.grace)).max(ENDING);
        let next = if end.kill_at.is_some() { ENDING } else { look };
        select! {
            biased;
            change = group.changed() => match change? {
                Change::Ended(exit) => return Ok(exit),
                Change::Stopped(by) => terminal.stopped(group, by, || Instant::now() < watched.dead_by()),
                Change::Other(pid) if sentinel.is(pid) => {
                    *sentinel = Sentinel::start()?;
                    sentinel.guard(group, end.kill_at.unwrap_or(until))?;
                    tell("the sentinel has ended: another one is started");
                }
                // It would notice nothing. Its end does the rest.
                Change::OtherStopped(pid) if sentinel.is(pid) => _ = kill(pid, Signal::SIGKILL),
                Change::Other(_) | Change::OtherStopped(_) => {}
            },
            signal = signals.next() => group.signal(signal),
            reason = &mut lost, if end.kill_at.is_none() => {
                let grace = if reason == LossReason::Stolen { watched.grace } else { Duration::ZERO };
                end.begin(group, Instant::now() + grace);
                sentinel.until(group, Instant::now() + grace)?;
                tell(format_args!("the lease is lost ({reason}): the command is ended"));
            }
            () = sleep_until((now + next).into()) => {}
        }
    }
}

/// The end of a command whose lease is lost.
#[derive(Debug, Default)]
struct End {
    /// When it is killed.
    kill_at: Option<Instant>,
}

impl End {
    fn begin(&mut self, group: &Group, kill_at: Instant) {
        group.signal(Signal::SIGTERM);
        self.kill_at = Some(kill_at);
    }
}

/// Ends what the command has left running. What cannot be killed keeps the lease for as long as it is renewed.
async fn finish(watched: &Watched<'_>, group: &mut Group, end: &End) -> Result<()> {
    if !group.is_there() {
        return Ok(());
    }
    let left = group.names();
    group.signal(Signal::SIGTERM);
    tell(format_args!("the command has left processes running, which are ended: {left}"));
    let kill_at = end.kill_at.unwrap_or_else(|| watched.dead_by().min(Instant::now() + watched.grace));
    while group.is_there() {
        let now = Instant::now();
        if now >= kill_at {
            group.signal(Signal::SIGKILL);
        }
        if now >= watched.held.trusted_until().max(kill_at + DYING) {
            bail!("processes of the command cannot be killed: {}", group.names());
        }
        select! {
            change = group.changed() => { change?; }
            () = sleep_until((now + ENDING).into()) => {}
        }
    }
    Ok(())
}

/// What the command finds in its environment.
fn environment(held: &dyn Held, holder: &str) -> Vec<(&'static str, OsString)> {
    let mut environment: Vec<(&'static str, OsString)> = vec![
        ("LOCKKIT_KEY", held.key().into()),
        ("LOCKKIT_FENCE", held.fence().to_string().into()),
        ("LOCKKIT_HOLDER", holder.into()),
    ];
    environment.extend(held.previous().map(|it| ("LOCKKIT_PREVIOUS", it.into())));
    environment.extend(held.guard().map(|it| ("LOCKKIT_GUARD", it.into())));
    environment
}

/// The name under which others see this process.
fn this_process() -> String {
    let user = env::var("USER").or_else(|_| env::var("LOGNAME")).map(|it| it + "@").unwrap_or_default();
    let host = nix::unistd::gethostname().map(|it| it.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{user}{host}/{}", id())
}

/// As a shell says it.
fn ended_by(signal: Signal) -> Exit {
    Exit::Code(128 + u8::try_from(signal as i32).unwrap_or(0))
}
