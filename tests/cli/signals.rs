//! What a person at a terminal or a supervisor sends.

use std::{fs, fs::read_to_string, process::Stdio, time::Duration};

use rustix::process::Signal;
use support::{Server, TestDb, on_databases};
use tempfile::tempdir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::{PATIENCE, exit_code, lockkit, output, program, send, there_is, url};

/// `lockkit run` on a terminal, with a script that has no single quote.
fn on_a_terminal(url: &str, script: &str) -> Child {
    let run =
        format!("exec {} run nightly --ttl 2s --grace 0.5s --url '{url}' -- sh -c '{script}'", program().display());
    // A shell that runs the tests in the background lets them ignore SIGINT, and a shell cannot trap what it ignores.
    let mut terminal = Command::new("env");
    terminal.args(["--default-signal=INT", "script", "-qec", &run, "/dev/null"]);
    terminal.stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
    terminal.spawn().expect("start script, of bsdutils")
}

async fn press(terminal: &mut Child, key: &[u8]) {
    terminal.stdin.as_mut().expect("it is piped").write_all(key).await.expect("press a key");
}

on_databases! { [postgres]
    async fn a_signal_ends_the_wait_and_the_command_never_starts<S>(db: TestDb<S>) {
        let (folder, on) = (tempdir().expect("a folder"), url(&db.url));
        let held = folder.path().join("held").display().to_string();
        let hold = format!("touch {held}; exec sleep 600");
        let mut holder = lockkit(&on, &["run", "nightly", "--", "sh", "-c", &hold]).spawn().expect("start");
        there_is(held.as_ref()).await;
        let ran = folder.path().join("ran").display().to_string();
        let wait = ["run", "nightly", "--wait", "forever", "--holder", "waiter", "--", "touch", &ran];
        let mut waiting = lockkit(&on, &wait).spawn().expect("start");
        // It has asked when it has taken its ticket.
        while db.fetch_i64("SELECT count(*) FROM lockkit_lease WHERE holder = 'waiter'").await == Some(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        send(&waiting, Signal::TERM);
        assert_eq!(exit_code(&mut waiting).await, Some(128 + 15));
        let busy = output(lockkit(&on, &["run", "nightly", "-n", "-E", "9", "--", "touch", &ran])).await;
        assert_eq!(busy.status.code(), Some(9));
        send(&holder, Signal::TERM);
        assert_eq!(exit_code(&mut holder).await, Some(128 + 15));
        assert!(!fs::exists(&ran).expect("look"), "neither command has run");
    }

    async fn a_signal_while_a_request_is_answered_leaves_no_lease<S>(db: TestDb<S>) {
        let mut blocking = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut blocking, "LOCK TABLE lockkit_lease IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let run = ["run", "nightly", "--", "touch", "/dev/null/never"];
        let mut asking = lockkit(&url(&db.url), &run).spawn().expect("start");
        let asks = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'lockkit_lease'::regclass";
        while S::fetch_i64(&mut blocking, asks).await.unwrap() == Some(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        send(&asking, Signal::TERM);
        tokio::time::sleep(Duration::from_millis(200)).await;
        blocking.commit().await.unwrap();
        assert_eq!(exit_code(&mut asking).await, Some(128 + 15));
        let next = output(lockkit(&url(&db.url), &["run", "nightly", "--nonblock", "--", "true"])).await;
        assert!(next.status.success(), "{next:?}");
    }

    async fn a_signal_reaches_the_command_and_all_that_it_has_started_once<S>(db: TestDb<S>) {
        let folder = tempdir().expect("a folder");
        let path = folder.path().display();
        let script = format!(
            "(trap 'echo child >>{path}/heard; exit' USR1; touch {path}/child; while :; do sleep 0.01; done) & \
             trap 'echo parent >>{path}/heard; wait; exit 4' USR1; touch {path}/parent; while :; do sleep 0.01; done"
        );
        let mut run = lockkit(&url(&db.url), &["run", "nightly", "--", "sh", "-c", &script]).spawn().expect("start");
        there_is(&folder.path().join("child")).await;
        there_is(&folder.path().join("parent")).await;
        send(&run, Signal::USR1);
        assert_eq!(exit_code(&mut run).await, Some(4));
        let heard = read_to_string(folder.path().join("heard")).expect("they heard");
        let mut heard: Vec<&str> = heard.lines().collect();
        heard.sort_unstable();
        assert_eq!(heard, ["child", "parent"]);
    }

    async fn ctrl_c_reaches_the_command_once<S>(db: TestDb<S>) {
        let folder = tempdir().expect("a folder");
        let path = folder.path().display();
        let script =
            format!("trap \"echo INT >>{path}/heard; exit 6\" INT; touch {path}/ready; while :; do sleep 0.01; done");
        let mut terminal = on_a_terminal(&db.url, &script);
        there_is(&folder.path().join("ready")).await;
        press(&mut terminal, b"\x03").await;
        assert_eq!(exit_code(&mut terminal).await, Some(6));
        assert_eq!(read_to_string(folder.path().join("heard")).expect("it heard"), "INT\n");
    }

    async fn a_command_reads_from_its_terminal_and_from_a_pipe<S>(db: TestDb<S>) {
        let folder = tempdir().expect("a folder");
        let path = folder.path().display();
        let mut terminal = on_a_terminal(&db.url, &format!("touch {path}/ready; read -r line; test $line = typed"));
        there_is(&folder.path().join("ready")).await;
        press(&mut terminal, b"typed\n").await;
        assert_eq!(exit_code(&mut terminal).await, Some(0));

        let mut run = lockkit(&url(&db.url), &["run", "nightly", "--", "cat"]);
        let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start");
        run.stdin.take().expect("it is piped").write_all(b"piped\n").await.expect("write");
        let mut lines = BufReader::new(run.stdout.take().expect("it is piped")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("a line").expect("read");
        assert_eq!(line.as_deref(), Some("piped"));
        assert_eq!(exit_code(&mut run).await, Some(0));
    }

    async fn a_command_whose_input_comes_from_elsewhere_asks_the_terminal<S>(db: TestDb<S>) {
        let folder = tempdir().expect("a folder");
        let path = folder.path().display();
        let script = format!("touch {path}/ready; read -r line </dev/tty; test $line = typed");
        let run = format!("{} run nightly --url '{}' -- sh -c '{script}' </dev/null", program().display(), db.url);
        let mut terminal = Command::new("script");
        terminal.args(["-qec", &run, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
        let mut terminal = terminal.spawn().expect("start script, of bsdutils");
        there_is(&folder.path().join("ready")).await;
        press(&mut terminal, b"typed\n").await;
        assert_eq!(exit_code(&mut terminal).await, Some(0));
    }

    async fn a_command_that_ctrl_z_stops_for_too_long_is_killed<S>(db: TestDb<S>) {
        let folder = tempdir().expect("a folder");
        let path = folder.path().display();
        let beat = env!("CARGO_BIN_EXE_test-beat");
        let mut terminal = on_a_terminal(&db.url, &format!("exec {beat} {path}/life"));
        there_is(&folder.path().join("life")).await;
        press(&mut terminal, b"\x1a").await;
        let next = lockkit(&url(&db.url), &["run", "nightly", "--wait", "60s", "--", "touch", &format!("{path}/next")]);
        assert!(output(next).await.status.success());
        let life = fs::metadata(folder.path().join("life")).expect("it lived").modified().expect("a time");
        let next = fs::metadata(folder.path().join("next")).expect("it ran").modified().expect("a time");
        assert!(life < next);
    }
}
