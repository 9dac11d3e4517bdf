//! The examples about jobs and a leader, each with processes that are killed and stopped. They check themselves.

use support::{TestDb, on_databases, run_example};

on_databases! { [postgres, sqlite]
    async fn apalis_runs_each_fire_time_exactly_once<S>(db: TestDb<S>) {
        run_example(&db, "cron_apalis", &["--url", &db.url]).await;
    }

    async fn tokio_cron_scheduler_runs_each_fire_time_once_or_reports_it<S>(db: TestDb<S>) {
        run_example(&db, "cron_tokio", &["--url", &db.url]).await;
    }

    async fn a_queue_has_one_result_for_each_job_and_puts_aside_what_kills_its_workers<S>(db: TestDb<S>) {
        run_example(&db, "job_queue", &["--url", &db.url]).await;
    }

    async fn a_leader_that_is_stopped_killed_or_deposed_is_replaced<S>(db: TestDb<S>) {
        run_example(&db, "leader", &["--url", &db.url]).await;
    }
}
