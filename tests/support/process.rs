//! Processes of the tests' own programs, which say what they do line by line and go on when they are told to.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// Longer than any of these programs is silent.
const PATIENCE: Duration = Duration::from_mins(3);

/// A running program, killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts the program, whose path is `env!("CARGO_BIN_EXE_…")` in the test.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(program: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|err| panic!("start {program}: {err}"));
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { child, input, output }
    }

    /// The next line that it says.
    ///
    /// # Panics
    /// If it says nothing for three minutes, or has ended.
    pub async fn hear(&mut self) -> String {
        let line = timeout(PATIENCE, self.output.next_line()).await.expect("a line in time").expect("read a line");
        line.expect("the process goes on")
    }

    /// Expects that the next line is this one.
    ///
    /// # Panics
    /// As [`Process::hear`], or if it says something else.
    pub async fn says(&mut self, line: &str) {
        assert_eq!(self.hear().await, line);
    }

    /// The fence of the lease that it says to hold.
    ///
    /// # Panics
    /// As [`Process::hear`], or if it says something else.
    pub async fn hear_fence(&mut self) -> u64 {
        let line = self.hear().await;
        line.strip_prefix("holding ").and_then(|it| it.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    }

    /// Tells it to go on.
    ///
    /// # Panics
    /// If it has ended.
    pub async fn go(&mut self) {
        self.input.write_all(b"go\n").await.expect("write to the process");
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: Signal) {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw).expect("it runs");
        kill_process(id, signal).expect("send a signal");
    }

    /// Kills it without any chance to clean up.
    ///
    /// # Panics
    /// If it has ended.
    pub async fn kill(mut self) {
        self.signal(Signal::KILL);
        self.child.wait().await.expect("wait for its end");
    }

    /// Waits for its end. What it wrote to standard error is in the output of the test.
    ///
    /// # Panics
    /// If it failed.
    pub async fn succeeds(mut self) {
        let status = self.child.wait().await.expect("wait for its end");
        assert!(status.success(), "{status}");
    }
}
