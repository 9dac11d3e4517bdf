//! Processes that hold leases, and are stopped and killed.

use std::{
    env,
    process::Stdio,
    time::{Duration, Instant},
};

use lockkit::Leases;
use lockkit_zookeeper::Layout;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

use crate::support::{own_root, shared_server, store_on, within};

const SESSION: Duration = Duration::from_millis(1500);

/// The name of the test below, which also is the program of the processes that it starts.
const NAME: &str = "processes::a_stopped_or_killed_holder_has_an_heir_after_its_session_and_hears_of_it";

/// In the environment of such a process: the server and the root.
const HOLDER: &str = "LOCKKIT_ZOOKEEPER_HOLDER";

#[tokio::test]
async fn a_stopped_or_killed_holder_has_an_heir_after_its_session_and_hears_of_it() {
    if let Ok(at) = env::var(HOLDER) {
        return hold(&at).await;
    }
    let root = own_root();
    let at = format!("{} {root}", shared_server());
    let heirs = Leases::new(store_on(shared_server(), &root, SESSION, Layout::Curator).await);

    let mut holder = Process::start(&at);
    let fence = holder.line_after("held ").await.parse::<u64>().expect("a fence");
    holder.signal(Signal::STOP);
    let stopped = Instant::now();
    let heir = within(heirs.lease("k").wait(SESSION * 10).acquire()).await.expect("the session of the holder ends");
    eprintln!(
        "a holder was stopped, its session timeout is {SESSION:?}: the heir had the lease after {:?}",
        stopped.elapsed()
    );
    assert!(heir.fence().get() > fence);
    assert_eq!(heir.previous().map(|it| it.fence.get()), Some(fence), "it was not released");
    holder.signal(Signal::CONT);
    let going_on = Instant::now();
    assert_eq!(holder.line_after("lost ").await, "false", "it is not trusted any more");
    eprintln!("the stale holder saw the loss {:?} after it went on", going_on.elapsed());
    // It has another session, and waits for the lease as everybody.
    heir.release().await.expect("a release");
    let again = holder.line_after("held ").await.parse::<u64>().expect("a fence");

    let _ = holder.child.start_kill();
    let killed = Instant::now();
    let heir = within(heirs.lease("k").wait(SESSION * 10).acquire()).await.expect("the session of the holder ends");
    eprintln!("a holder was killed: the heir had the lease after {:?}", killed.elapsed());
    assert!(heir.fence().get() > again);
}

/// Holds the lease, says so, waits until it is lost, and begins again.
async fn hold(at: &str) {
    let (server, root) = at.split_once(' ').expect("a server and a root");
    let leases = Leases::new(store_on(server, root, SESSION, Layout::Curator).await);
    loop {
        let lease = leases.lease("k").wait(SESSION * 40).acquire().await.expect("its turn");
        println!("held {}", lease.fence());
        lease.lost().await;
        println!("lost {}", lease.is_trusted());
    }
}

/// A process that runs `hold`. Killed when this is dropped.
struct Process {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(at: &str) -> Self {
        let mut child = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", NAME, "--nocapture"])
            .env(HOLDER, at)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("start this program");
        let output = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { child, output }
    }

    /// What follows these words in the next line that starts with them.
    async fn line_after(&mut self, words: &str) -> String {
        loop {
            let line = within(self.output.next_line()).await.expect("read a line").expect("it runs");
            // The harness writes the name of the test without a line break.
            if let Some((_, rest)) = line.split_once(words) {
                return rest.to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.id().and_then(|it| i32::try_from(it).ok()).and_then(Pid::from_raw).expect("it runs");
        kill_process(id, signal).expect("send a signal");
    }
}
