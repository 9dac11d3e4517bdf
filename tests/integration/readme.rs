//! What README.md promises of its snippets, which the target `readme` compiles.

use support::{Process, TestDb, on_databases};

on_databases! {
    [postgres]
    async fn five_processes_at_once_run_the_nightly_job_once_and_one_that_comes_late_does_not<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE reports (night TEXT)").await;
        for processes_at_once in [5, 1] {
            let mut processes = Vec::new();
            for _ in 0..processes_at_once {
                let mut process = Process::start(env!("CARGO_BIN_EXE_test-nightly"), &[&db.url, "2026-01-31"]);
                process.says("ready").await;
                processes.push(process);
            }
            for process in &mut processes {
                process.go().await;
            }
            for process in processes {
                process.succeeds().await;
            }
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM reports").await, Some(1), "the job ran so often");
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_answer WHERE answer IS NOT NULL").await, Some(1));
        }
        db.assert_nothing_left().await;
    }
}
