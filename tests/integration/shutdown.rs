//! The orderly end of a process that holds leases.

use std::time::Duration;

use lockkit::testing::{Failure, MemoryStore, Operation};
use lockkit::{Error, Leases, LossReason};
use support::{TestDb, on_every_database};
use tokio::time::sleep;

on_every_database! {
    async fn closing_gives_everything_back<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(300)).build().unwrap();
        let others = Leases::new(db.pool.clone());
        let mut held = Vec::new();
        for number in 0..20 {
            held.push(leases.lease(format!("k:{number:02}")).acquire().await.unwrap());
        }
        let least = leases.lease("least").min_hold(Duration::from_secs(600)).acquire().await.unwrap();
        let running = leases.clone();
        let body = tokio::spawn(async move {
            running.lease("body").run(async |_| std::future::pending::<Result<(), Error>>().await).await
        });
        while leases.health().held < 22 {
            sleep(Duration::from_millis(10)).await;
        }
        // Stolen meanwhile, and one that is dropped at this moment.
        others.steal("k:03").await.unwrap().unwrap();
        drop(held.pop());
        assert!(leases.health().is_ready());

        leases.close().await.unwrap();
        assert_eq!((leases.health().held, leases.health().is_ready()), (0, false));
        let stopped = body.await.unwrap().unwrap_err();
        assert!(matches!(stopped, Error::Lost { reason: LossReason::Closed, .. }), "{stopped:?}");
        assert!(held.iter().all(|it| !it.is_trusted()) && !least.is_trusted());
        let refused = leases.lease("new").acquire().await.unwrap_err();
        assert!(matches!(refused, Error::Closed { .. }), "{refused:?}");
        assert!(matches!(leases.all(["a", "b"]).try_acquire().await, Err(Error::Closed { .. })));

        let left: Vec<_> = others.list("").await.unwrap().into_iter().map(|it| it.key).collect();
        assert_eq!(left, ["least"], "it stays taken for its least time, by nobody");
        leases.close().await.unwrap();
        drop(held);
        db.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_releases_on_their_way() {
    let store = MemoryStore::new();
    let leases = Leases::new(store.client());
    let lease = leases.lease("k").acquire().await.unwrap();
    leases.store().faults().script(Operation::Release, [Failure::Slow(Duration::from_secs(1))]);
    drop(lease);
    leases.close().await.unwrap();
    assert!(Leases::new(store).lease("k").try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn closing_gives_up_when_the_store_does_not_answer() {
    let leases = Leases::new(MemoryStore::new());
    let _lease = leases.lease("k").acquire().await.unwrap();
    leases.store().faults().script(Operation::Release, [Failure::Silent]);
    let started = tokio::time::Instant::now();
    leases.close().await.unwrap_err();
    assert!(started.elapsed() <= Duration::from_secs(6), "{:?}", started.elapsed());
}
