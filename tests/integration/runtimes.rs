//! Processes with several runtimes, some of which end.

use std::thread;
use std::time::Duration;

use lockkit::Leases;
use support::{TestDb, on_every_database};
use tokio::runtime;
use tokio::time::sleep;

const TTL: Duration = Duration::from_millis(1500);

on_every_database! {
    async fn leases_outlive_the_runtime_that_first_kept_one<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(TTL).build().unwrap();
        let elsewhere = leases.clone();
        let other = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let first = other.spawn(async move { elsewhere.lease("first").acquire().await }).await.unwrap().unwrap();
        let here = leases.lease("here").acquire().await.unwrap();
        thread::spawn(move || drop(other)).join().unwrap();

        sleep(TTL * 3).await;
        assert!(here.is_trusted(), "it is renewed on the runtime that is left");
        assert!(first.is_trusted(), "and so is that of the runtime that has ended");
        first.release().await.unwrap();
        here.release().await.unwrap();
    }

    async fn a_lease_of_a_runtime_that_ends_is_given_back_on_another<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(300)).build().unwrap();
        let here = leases.lease("here").acquire().await.unwrap();
        let elsewhere = leases.clone();
        let other = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let acquired = other.spawn(async move {
            let lease = elsewhere.lease("k").acquire().await.unwrap();
            tokio::spawn(async move {
                let _lease = lease;
                std::future::pending::<()>().await;
            });
        });
        acquired.await.unwrap();
        thread::spawn(move || drop(other)).join().unwrap();
        leases.lease("k").wait(Duration::from_secs(30)).acquire().await.unwrap().release().await.unwrap();
        here.release().await.unwrap();
    }
}
