//! The process that becomes the command. It stops itself until the sentinel knows its process group, so that nothing
//! of the command runs without one.

use std::{io::ErrorKind, os::unix::process::CommandExt, process::Command};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, getpid, getppid},
};

use crate::{
    args::LaunchArgs,
    exit::{Exit, tell},
};

pub(crate) fn launch(args: &LaunchArgs) -> Exit {
    if kill(getpid(), Signal::SIGSTOP).is_err() || getppid() != Pid::from_raw(args.parent) {
        // The system continues a process whose parent has died. Nobody holds the lease then.
        return Exit::Failure;
    }
    let Some((program, args)) = args.command.split_first() else { return Exit::Usage };
    let err = Command::new(program).args(args).exec();
    tell(format_args!("cannot run `{}`: {err}", program.display()));
    if err.kind() == ErrorKind::NotFound { Exit::NotFound } else { Exit::CannotRun }
}
