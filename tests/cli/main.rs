//! The command `lockkit` on every database and store. Cargo builds it with all tests; to run these alone, add
//! `--test usage`, the tests in `cli/tests`, with which it is built.
//!
//! - `life` has the commands under a lease: whatever happens, they end before another one begins.
//! - `signals` are what a person or a supervisor sends.
//! - `stores` has leases that are not in a database.
//! - `look`, `explain`, `doctor` and `web` are what an operator asks.

mod doctor;
mod explain;
mod life;
mod look;
mod signals;
mod stores;
mod web;

use std::{
    env,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::{Duration, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

fn program() -> PathBuf {
    let test = env::current_exe().expect("the path of the test");
    let program = test.ancestors().nth(2).expect("target/debug/deps/cli").join("lockkit");
    assert!(program.exists(), "`cargo test --workspace --test usage` makes {}", program.display());
    program
}

/// `lockkit`, on the database or the store that `on` names.
fn lockkit(on: &[String], arguments: &[&str]) -> Command {
    let (command, rest) = arguments.split_first().expect("a command");
    let mut lockkit = Command::new(program());
    lockkit.arg(command).args(on).args(rest).env_remove("DATABASE_URL").stdin(Stdio::null()).kill_on_drop(true);
    lockkit
}

/// The options that name this database.
fn url(url: &str) -> Vec<String> {
    vec!["--no-dotenv".to_owned(), "--url".to_owned(), url.to_owned()]
}

async fn output(mut command: Command) -> Output {
    timeout(PATIENCE, command.output()).await.expect("it ends").expect("run lockkit")
}

async fn exit_code(child: &mut Child) -> Option<i32> {
    timeout(PATIENCE, child.wait()).await.expect("it ends").expect("wait").code()
}

async fn there_is(path: &Path) {
    let there = async {
        while !path.exists() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, there).await.unwrap_or_else(|_| panic!("no {}", path.display()));
}

fn send(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|it| Pid::from_raw(it.cast_signed())).expect("it has not ended");
    kill_process(pid, signal).expect("send a signal");
}

/// The time, in microseconds since 1970.
fn now() -> i128 {
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970").as_micros();
    now.try_into().expect("it fits")
}
