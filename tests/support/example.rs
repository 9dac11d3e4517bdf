//! The examples that check themselves. Cargo builds them together with all tests; to run such a test alone, build them
//! first: `cargo build --workspace --examples`.

use std::env;

use tokio::process::Command;

use crate::{Backend, TestDb};

/// Runs the example on this database, which `DATABASE_URL` names, and fails if the example does.
pub async fn run_example<S: Backend>(db: &TestDb<S>, name: &str, args: &[&str]) {
    let test = env::current_exe().expect("the path of the test");
    let folder = test.ancestors().nth(2).expect("target/debug/deps/jobs").join("examples");
    let example = folder.join(name);
    assert!(example.exists(), "`cargo build --workspace --examples` makes {}", example.display());
    let mut command = Command::new(example);
    let ran = command.args(args).env("DATABASE_URL", &db.url).kill_on_drop(true).output().await.expect("run it");
    let (said, log) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    println!("{name} on {}:\n{log}{said}", S::NAME);
    assert!(ran.status.success(), "{name} on {}: {}", S::NAME, ran.status);
}
