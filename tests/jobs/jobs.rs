//! The examples about jobs and a leader, each with processes that are killed and stopped. They check themselves. Cargo
//! builds them together with all tests; to run this test alone, build them first: `cargo build --workspace --examples`.

use std::env;

use support::{Backend, TestDb, on_databases};
use tokio::process::Command;

/// Runs the example on this database, which checks what its processes have done.
async fn run<S: Backend>(db: &TestDb<S>, name: &str) {
    let test = env::current_exe().expect("the path of the test");
    let folder = test.ancestors().nth(2).expect("target/debug/deps/jobs").join("examples");
    let example = folder.join(name);
    assert!(example.exists(), "`cargo build --workspace --examples` makes {}", example.display());
    let ran = Command::new(example).args(["--url", &db.url]).kill_on_drop(true).output().await.expect("run it");
    let (said, log) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    println!("{name} on {}:\n{log}{said}", S::NAME);
    assert!(ran.status.success(), "{name} on {}: {}", S::NAME, ran.status);
}

on_databases! { [postgres, sqlite]
    async fn apalis_runs_each_fire_time_exactly_once<S>(db: TestDb<S>) {
        run(&db, "cron_apalis").await;
    }

    async fn tokio_cron_scheduler_runs_each_fire_time_once_or_reports_it<S>(db: TestDb<S>) {
        run(&db, "cron_tokio").await;
    }

    async fn a_queue_has_one_result_for_each_job_and_puts_aside_what_kills_its_workers<S>(db: TestDb<S>) {
        run(&db, "job_queue").await;
    }

    async fn a_leader_that_is_stopped_killed_or_deposed_is_replaced<S>(db: TestDb<S>) {
        run(&db, "leader").await;
    }
}
