//! The signals that this process gets, which are those of the command.

use std::fs::read_to_string;

use anyhow::Result;
use nix::sys::signal::Signal;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::{Receiver, channel},
};

const SIGNALS: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

#[derive(Debug)]
pub(super) struct Signals(Receiver<Signal>);

impl Signals {
    /// From now on these signals do not end the process. One that is ignored, as by `nohup`, stays ignored, for the
    /// command too.
    pub(super) fn new() -> Result<Self> {
        let (said, heard) = channel(16);
        let ignored = ignored();
        for number in SIGNALS.into_iter().filter(|it| ignored >> (*it as i32 - 1) & 1 == 0) {
            let mut received = signal(SignalKind::from_raw(number as i32))?;
            let said = said.clone();
            tokio::spawn(async move {
                while received.recv().await.is_some() {
                    if said.send(number).await.is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self(heard))
    }

    pub(super) async fn next(&mut self) -> Signal {
        match self.0.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }
}

/// The signals that were ignored when the process began, as bits. Only Linux tells.
fn ignored() -> u64 {
    let status = read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|it| it.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|it| u64::from_str_radix(it, 16).ok()).unwrap_or(0)
}
