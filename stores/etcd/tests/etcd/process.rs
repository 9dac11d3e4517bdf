//! Processes that are stopped or killed while they hold a lease.

use std::{env, process::Stdio, time::Instant};

use lockkit::Leases;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::server::{PATIENCE, shared, store};

/// A process that holds a lease: the example `hold`.
struct Holder {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    fence: u64,
}

impl Holder {
    async fn of(key: &str, ttl: &str) -> Self {
        let tests = env::current_exe().expect("a path");
        let folder = tests.parent().and_then(|it| it.parent()).expect("a folder");
        let program = folder.join("examples/hold");
        assert!(program.exists(), "build the examples: `cargo test -p lockkit-etcd` does");
        let mut command = Command::new(program);
        command.args([shared(), key, ttl]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("start the holder");
        let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("it holds").expect("read").expect("it runs");
        let fence = line.strip_prefix("holding ").and_then(|it| it.parse().ok()).expect(&line);
        Self { process, lines, fence }
    }

    async fn signal(&self, signal: &str) {
        let id = self.process.id().expect("it runs").to_string();
        Command::new("kill").args([signal, &id]).status().await.expect("send a signal");
    }
}

#[tokio::test]
async fn a_holder_that_is_stopped_loses_its_lease_and_learns_it() {
    let mut holder = Holder::of("stopped", "1.5").await;
    let heirs = Leases::builder(store().await).wait(PATIENCE).build().unwrap();
    holder.signal("-STOP").await;
    let stopped = Instant::now();
    let heir = heirs.lease("stopped").acquire().await.unwrap();
    println!("heir of a stopped process after {:?}", stopped.elapsed());
    assert!(heir.fence().get() > holder.fence + 255);
    let previous = heir.previous().expect("it was not released");
    assert_eq!(previous.fence.get(), holder.fence);
    holder.signal("-CONT").await;
    let line = timeout(PATIENCE, holder.lines.next_line()).await.expect("it learns it").unwrap().unwrap();
    assert!(line.starts_with("lost"), "{line}");
    // What the stale process does when it wakes harms nobody.
    holder.process.wait().await.unwrap();
    assert!(heir.is_trusted());
    assert_eq!(heirs.show("stopped").await.unwrap().unwrap().fence, heir.fence());
    heir.release().await.unwrap();
}

#[tokio::test]
async fn the_lease_of_a_killed_process_is_taken_over() {
    let mut holder = Holder::of("killed", "1.5").await;
    let heirs = Leases::builder(store().await).wait(PATIENCE).build().unwrap();
    holder.process.kill().await.unwrap();
    let killed = Instant::now();
    let heir = heirs.lease("killed").acquire().await.unwrap();
    println!("heir of a killed process after {:?}", killed.elapsed());
    assert_eq!(heir.previous().expect("it was not released").fence.get(), holder.fence);
    heir.release().await.unwrap();
}
