//! How a command ends. The numbers are those of `sysexits.h` where it has one, and the shell's.

use std::{
    fmt::Display,
    io::{ErrorKind, Write, stderr, stdout},
    process::{ExitCode, exit},
};

use anyhow::{Context, Error};
use lockkit::Fault;
use lockkit_inspect::with_causes;

use crate::target::{BadUrl, Quarantined, Unreachable};

/// What the exit code says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Success,
    /// Any other error.
    Failure,
    /// Something must be mended.
    MustMend,
    /// The command line is wrong.
    Usage,
    /// The database cannot be reached.
    Unavailable,
    /// Another process holds the lease.
    Busy,
    /// The tables are missing.
    NotMigrated,
    /// The lease is lost, or not held.
    Lost,
    /// The command cannot be run.
    CannotRun,
    /// The command was not found.
    NotFound,
    /// What the command itself has said.
    Code(u8),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::MustMend => 2,
            Self::Usage => 64,
            Self::Unavailable => 69,
            Self::Busy => 75,
            Self::NotMigrated => 78,
            Self::Lost => 79,
            Self::CannotRun => 126,
            Self::NotFound => 127,
            Self::Code(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// Prints lines of data. The reader may have seen enough, as `head` has: then the command ends, and all is well.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Ok(());
    }
    let mut out = stdout().lock();
    match writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush()) {
        Err(err) if err.kind() == ErrorKind::BrokenPipe => exit(Exit::Success.code().into()),
        written => written.context("cannot write to stdout"),
    }
}

/// Tells the user. Unlike `eprintln!`, does not panic if nobody listens any more.
pub(crate) fn tell(text: impl Display) {
    _ = writeln!(stderr(), "lockkit: {text}");
}

/// How a command ends that fails with this error.
pub(crate) fn of(err: &Error) -> Exit {
    if err.is::<BadUrl>() {
        return Exit::Usage;
    }
    if err.is::<Unreachable>() || err.is::<Quarantined>() {
        return Exit::Unavailable;
    }
    match err.downcast_ref::<lockkit::Error>() {
        Some(lockkit::Error::Contended { .. }) => Exit::Busy,
        Some(lockkit::Error::NotMigrated { .. }) => Exit::NotMigrated,
        Some(lockkit::Error::Lost { .. }) => Exit::Lost,
        Some(lockkit::Error::InvalidOption { .. } | lockkit::Error::InvalidKey { .. }) => Exit::Usage,
        Some(
            lockkit::Error::Database { fault: Fault::Unavailable, .. }
            | lockkit::Error::PoolStarved { .. }
            | lockkit::Error::OutcomeUnknown { .. },
        ) => Exit::Unavailable,
        _ => Exit::Failure,
    }
}

/// What the user is told: the error and its causes. A hint of lockkit that says what a program has to call is replaced.
pub(crate) fn message(err: &Error) -> String {
    match err.downcast_ref::<lockkit::Error>() {
        Some(lockkit::Error::NotMigrated { source, .. }) => {
            format!("lockkit's tables are missing or out of date: run `lockkit migrate` ({source})")
        }
        _ => with_causes(err.as_ref()),
    }
}
