//! What README.md promises of its snippets, which the target `readme` compiles.

use std::process::Stdio;

use support::{TestDb, on_databases};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

/// A process that runs the nightly job of README.md when a line is written to it.
async fn a_process_about_to_run_the_job(url: &str, night: &str) -> Child {
    let mut process = Command::new(env!("CARGO_BIN_EXE_test-nightly"))
        .args([url, night])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("start a process");
    let mut said = String::new();
    BufReader::new(process.stdout.as_mut().expect("its output")).read_line(&mut said).await.expect("read from it");
    assert_eq!(said, "ready\n");
    process
}

on_databases! {
    [postgres]
    async fn five_processes_at_once_run_the_nightly_job_once_and_one_that_comes_late_does_not<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE nights (night TEXT PRIMARY KEY)").await;
        db.execute("CREATE TABLE reports (night TEXT)").await;
        for processes_at_once in [5, 1] {
            let mut processes = Vec::new();
            for _ in 0..processes_at_once {
                processes.push(a_process_about_to_run_the_job(&db.url, "2026-01-31").await);
            }
            for process in &mut processes {
                process.stdin.as_mut().expect("its input").write_all(b"go\n").await.expect("write to the process");
            }
            for process in processes {
                let output = process.wait_with_output().await.expect("wait for the process");
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM reports").await, Some(1), "the job ran so often");
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM nights").await, Some(1));
        }
        db.assert_nothing_left().await;
    }
}
