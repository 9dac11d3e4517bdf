//! The orderly end of a process that holds leases.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockkit::testing::{Failure, MemoryStore, Operation};
use lockkit::{Error, Leases, LossReason};
use support::{Proxy, Server, TestDb, on_databases, on_every_database, spawn};
use tokio::time::{sleep, timeout};

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
        let body = spawn(async move {
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

#[tokio::test(start_paused = true)]
async fn closing_gives_everything_back_though_a_connection_broke() {
    let store = MemoryStore::new();
    let leases = Leases::new(store.client());
    let _lease = leases.lease("k").acquire().await.unwrap();
    leases.store().faults().script(Operation::Release, [Failure::Refused]);
    leases.close().await.unwrap();
    assert_eq!(Leases::new(store).list("").await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn closing_twice_waits_twice_for_what_is_released() {
    let store = MemoryStore::new();
    let leases = Leases::new(store.client());
    let _lease = leases.lease("k").acquire().await.unwrap();
    leases.store().faults().script(Operation::Release, [Failure::Slow(Duration::from_secs(1))]);
    let again = leases.clone();
    let first = spawn(async move { again.close().await });
    sleep(Duration::from_millis(1)).await;
    leases.close().await.unwrap();
    assert_eq!(Leases::new(store).list("").await.unwrap(), []);
    first.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn several_leases_that_are_granted_after_closing_are_all_released() {
    let store = MemoryStore::new();
    let leases = Leases::new(store.client());
    leases.store().faults().script(Operation::Acquire, [Failure::Slow(Duration::from_secs(1))]);
    let asking = spawn(leases.all(["a", "b", "c"]).acquire());
    sleep(Duration::from_millis(500)).await;
    leases.close().await.unwrap();
    let refused = asking.await.unwrap().unwrap_err();
    assert!(matches!(refused, Error::Closed { .. }), "{refused:?}");
    assert_eq!(Leases::new(store).list("").await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn closing_ends_the_wait_for_a_lease_whose_key_leaves_no_room_for_tickets() {
    let (store, key) = (MemoryStore::new(), "k".repeat(250));
    let _held = Leases::new(store.client()).lease(&key).acquire().await.unwrap();
    let leases = Leases::new(store);
    let waiting = spawn(leases.lease(&key).wait(Duration::from_secs(60)).acquire());
    sleep(Duration::from_secs(1)).await;
    leases.close().await.unwrap();
    let refused = timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(refused, Error::Closed { .. }), "{refused:?}");
}

on_every_database! {
    async fn closing_does_not_wait_for_claims_that_cannot_have_been_granted<S>(db: TestDb<S>) {
        db.execute("DROP TABLE lockkit_lease").await;
        let leases = Leases::new(db.pool.clone());
        let refused = leases.lease("k").acquire().await.unwrap_err();
        assert!(matches!(refused, Error::NotMigrated { .. }), "{refused:?}");
        leases.close().await.expect("nothing is on its way");
    }
}

on_databases! { [postgres]
    // The commit fails at its end, by a constraint that is checked there, and the body goes on.
    async fn a_commit_that_fails_while_closing_releases_the_lease_and_stops_the_body<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE parent (n INT PRIMARY KEY)").await;
        db.execute("CREATE TABLE child (n INT REFERENCES parent (n) DEFERRABLE INITIALLY DEFERRED)").await;
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        // The leases have connections of their own, and the transaction's is held up.
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(300)).build().unwrap();
        let is_granted = AtomicBool::new(false);
        let running = leases.lease("k").run(async |lease| {
            is_granted.store(true, Ordering::Relaxed);
            let mut tx = lockkit::begin(&pool).await?;
            <S as Server>::execute(&mut tx, "INSERT INTO child VALUES (1)").await.unwrap();
            proxy.hold_replies_to("COMMIT");
            lease.commit(tx).await.unwrap_err();
            std::future::pending::<Result<(), Error>>().await
        });
        let closing = async {
            // Until the commit has taken the lease over.
            while !is_granted.load(Ordering::Relaxed) || leases.health().held > 0 {
                sleep(Duration::from_millis(10)).await;
            }
            let closing = spawn({
                let leases = leases.clone();
                async move { leases.close().await }
            });
            while !leases.health().closed {
                sleep(Duration::from_millis(10)).await;
            }
            proxy.pass_replies();
            closing.await.unwrap().unwrap();
            assert_eq!(Leases::new(db.pool.clone()).list("").await.unwrap(), []);
        };
        let (stopped, ()) = tokio::join!(running, closing);
        let stopped = stopped.unwrap_err();
        assert!(matches!(stopped, Error::Lost { reason: LossReason::Closed, .. }), "{stopped:?}");
    }
}
