//! Several keys at once, several holders of one key, and the order of those who wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use lockkit::{Error, LeaseStore, Leases, Released};
use support::{JoinSet, Server, TestDb, on_every_database, refusal, spawn};
use tokio::time::sleep;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

on_every_database! {
    async fn all_of_the_keys_are_taken_or_none<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let both = leases.all(["b", "a", "b"]).acquire().await.unwrap();
        assert_eq!(both.leases().iter().map(|it| it.key().as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(both.is_trusted() && both.get("a").unwrap().fence() > 0.into());

        assert!(leases.all(["c", "b"]).try_acquire().await.unwrap().is_none());
        assert_eq!(leases.show("c").await.unwrap(), None, "none is kept");
        let refused = refusal(async || leases.all(["c", "b"]).wait(MILLIS(50)).acquire().await).await;
        let Error::Contended { key, holder: Some(holder), .. } = refused else { panic!("{refused:?}") };
        assert_eq!((key.as_str(), holder.as_lease().unwrap().fence), ("b", both.get("b").unwrap().fence()));

        assert_eq!(both.release().await.unwrap(), Released::WhileHeld);
        let both = leases.all(["c", "b"]).acquire().await.unwrap();
        leases.steal("c").await.unwrap().unwrap();
        assert_eq!(both.release().await.unwrap(), Released::AlreadyLost);
        assert_eq!(leases.list("").await.unwrap(), []);
        let nothing: [&str; 0] = [];
        assert!(matches!(leases.all(nothing).acquire().await, Err(Error::InvalidOption { option: "all", .. })));
    }

    async fn the_first_free_lease_of_several_is_taken<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let jobs = ["job:2", "job:1", "job:3", "job:2"];
        let mut held = vec![there.lease("job:1").acquire().await.unwrap()];
        for expected in ["job:2", "job:3"] {
            let lease = here.any(jobs).acquire().await.unwrap();
            assert_eq!(lease.key(), expected);
            held.push(lease);
        }
        assert!(there.any(jobs).try_acquire().await.unwrap().is_none());
        let refused = refusal(async || there.any(jobs).wait(MILLIS(50)).acquire().await).await;
        let Error::Contended { key, holder: Some(holder), .. } = refused else { panic!("{refused:?}") };
        let named = held.iter().find(|it| *it.key() == key).unwrap();
        assert_eq!(holder.as_lease().unwrap().fence, named.fence());

        // One that another process releases. The lease is an ordinary one.
        let waiting = spawn(here.any(jobs).wait(Duration::from_secs(60)).acquire());
        sleep(MILLIS(100)).await;
        held.remove(0).release().await.unwrap();
        let lease = waiting.await.unwrap().unwrap();
        assert_eq!(lease.key(), "job:1");
        assert!(there.lease("job:1").try_acquire().await.unwrap().is_none());
        lease.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap();
        let body = async |lease: lockkit::Lease<_>| Ok::<_, Error>(lease.key().clone());
        assert_eq!(there.any(jobs).run(body).await.unwrap(), "job:1");
        drop(held);
        db.assert_nothing_left().await;
    }

    async fn processes_that_share_jobs_without_a_table_never_run_one_twice_at_a_time<S>(db: TestDb<S>) {
        let running: Arc<[AtomicI64; 6]> = Arc::default();
        let mut tasks = JoinSet::new();
        for _ in 0..4 {
            let (running, leases) = (running.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                for _ in 0..8 {
                    let jobs = (0..running.len()).map(|it| format!("job:{it}"));
                    let lease = leases.any(jobs).wait(Duration::from_secs(60)).acquire().await.unwrap();
                    let job: usize = lease.key().trim_start_matches("job:").parse().unwrap();
                    assert_eq!(running[job].fetch_add(1, Ordering::SeqCst), 0, "another process runs job {job}");
                    sleep(MILLIS(5)).await;
                    running[job].fetch_sub(1, Ordering::SeqCst);
                    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        tasks.join_all().await;
        db.assert_nothing_left().await;
    }

    async fn a_commit_depends_on_all_of_the_leases<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        both.verify(&mut tx).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        both.commit(tx).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
        assert_eq!(leases.list("").await.unwrap(), []);

        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        leases.steal("b").await.unwrap().unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        let Err(Error::Lost { key, .. }) = both.commit(tx).await else { panic!("it was lost") };
        assert_eq!(key, "b");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
        db.assert_nothing_left().await;
    }

    // Multi-locks in raw order deadlock, or refuse each other for ever.
    async fn opposite_orders_never_deadlock<S>(db: TestDb<S>) {
        let inside: Arc<[AtomicI64; 4]> = Arc::default();
        let mut tasks = JoinSet::new();
        for task in 0..6_usize {
            let (inside, leases) = (inside.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                for round in 0..8 {
                    // Any three of the four, in an order of its own.
                    let mut keys = [0, 1, 2, 3];
                    keys.rotate_left((task * 7 + round) % 4);
                    if task % 2 == 0 {
                        keys.reverse();
                    }
                    let keys = &keys[..3];
                    let held = leases.all(keys.iter().map(|it| format!("k:{it}"))).wait(Duration::from_secs(60));
                    let held = held.acquire().await.unwrap();
                    for key in keys {
                        assert_eq!(inside[*key].fetch_add(1, Ordering::SeqCst), 0, "somebody else has it");
                    }
                    tokio::task::yield_now().await;
                    for key in keys {
                        inside[*key].fetch_sub(1, Ordering::SeqCst);
                    }
                    assert_eq!(held.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        tasks.join_all().await;
        db.assert_nothing_left().await;
    }

    async fn a_semaphore_lets_so_many_in_and_no_more<S>(db: TestDb<S>) {
        let (inside, most): (Arc<AtomicI64>, Arc<AtomicI64>) = Default::default();
        let mut tasks = JoinSet::new();
        for _ in 0..12 {
            let (inside, most, leases) = (inside.clone(), most.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                for _ in 0..4 {
                    let permit = leases.semaphore("report", 3).wait(Duration::from_secs(60)).acquire().await.unwrap();
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} are inside");
                    most.fetch_max(now, Ordering::SeqCst);
                    sleep(MILLIS(5)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    assert_eq!(permit.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        tasks.join_all().await;
        assert!(most.load(Ordering::SeqCst) > 1, "several were inside at once");

        let leases = Leases::new(db.pool.clone());
        let all = [leases.semaphore("report", 1).acquire().await.unwrap()];
        let refused = refusal(async || leases.semaphore("report", 1).wait(MILLIS(20)).acquire().await).await;
        let Error::Contended { key, holder: Some(holder), .. } = refused else { panic!("{refused:?}") };
        assert_eq!((key.as_str(), holder.as_lease().unwrap().fence), ("report", all[0].fence()));
        assert!(matches!(
            leases.semaphore("report", 0).acquire().await,
            Err(Error::InvalidOption { option: "semaphore", .. })
        ));
    }

    async fn readers_share_and_a_writer_is_alone<S>(db: TestDb<S>) {
        // Readers count one each, a writer counts a thousand.
        let inside = Arc::new(AtomicI64::new(0));
        let mut tasks = JoinSet::new();
        for task in 0..10 {
            let (inside, leases) = (inside.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                for _ in 0..4 {
                    let rw = leases.rw("catalog");
                    let (request, weight) = if task < 2 { (rw.write(), 1000) } else { (rw.read(), 1) };
                    let held = request.wait(Duration::from_secs(60)).acquire().await.unwrap();
                    let before = inside.fetch_add(weight, Ordering::SeqCst);
                    assert!(if weight == 1 { before < 1000 } else { before == 0 }, "{before} beside {weight}");
                    sleep(MILLIS(3)).await;
                    inside.fetch_sub(weight, Ordering::SeqCst);
                    assert_eq!(held.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        tasks.join_all().await;
        // Places in the queue are released in the background.
        db.assert_nothing_left().await;
    }

    async fn a_writer_that_waits_keeps_new_readers_out<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let reader = here.rw("k").read().acquire().await.unwrap();
        let writing = spawn(there.rw("k").write().wait(Duration::from_secs(30)).acquire());
        while here.show("k/writer").await.unwrap().is_none() {
            sleep(MILLIS(5)).await;
        }
        assert!(here.rw("k").read().try_acquire().await.unwrap().is_none(), "the writer is first");
        assert!(!writing.is_finished());
        reader.release().await.unwrap();
        writing.await.unwrap().unwrap().release().await.unwrap();

        // A writer that stops waiting lets them in again.
        let reader = here.rw("k").read().acquire().await.unwrap();
        assert!(there.rw("k").write().wait(MILLIS(50)).acquire().await.unwrap_err().is_contended());
        let second = here.rw("k").read().wait(Duration::from_secs(10)).acquire().await.unwrap();
        drop((reader, second));
    }

    async fn fair_requests_are_served_in_the_order_of_their_arrival<S>(db: TestDb<S>) {
        let holder = Leases::new(db.pool.clone());
        let lease = holder.lease("k").acquire().await.unwrap();
        let served: Arc<std::sync::Mutex<Vec<usize>>> = Arc::default();
        let mut tasks = JoinSet::new();
        for number in 0..4 {
            // A process each.
            let (leases, served) = (Leases::new(db.pool.clone()), served.clone());
            tasks.spawn(async move {
                let lease = leases.lease("k").fair().wait(Duration::from_secs(60)).acquire().await.unwrap();
                served.lock().unwrap().push(number);
                lease.release().await.unwrap();
            });
            while holder.list("k/queue/").await.unwrap().len() <= number {
                sleep(MILLIS(2)).await;
            }
        }
        lease.release().await.unwrap();
        tasks.join_all().await;
        assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3]);
        // A place in the queue is given up with the wait.
        let lease = holder.lease("k").fair().acquire().await.unwrap();
        assert!(holder.lease("k").fair().try_acquire().await.unwrap().is_none());
        let other = Leases::new(db.pool.clone());
        assert!(other.lease("k").fair().wait(MILLIS(20)).acquire().await.unwrap_err().is_contended());
        lease.release().await.unwrap();
        while !holder.list("k/queue/").await.unwrap().is_empty() {
            sleep(MILLIS(5)).await;
        }
    }

    async fn several_are_refused_by_a_store_that_another_process_writes_to<S>(db: TestDb<S>) {
        use lockkit::store::{AcquiredAll, Claim, Token};

        let claim = |key: &str| Claim::new(key, Token::random(), "h", Duration::from_secs(30));
        let claims = ["a", "b", "c"].map(claim);
        let acquired = db.pool.lease_acquire_all(&claims).await.unwrap();
        assert!(matches!(acquired, AcquiredAll::Granted(grants) if grants.len() == 3));
        // The same tokens are granted again, others are not.
        assert!(matches!(db.pool.lease_acquire_all(&claims).await.unwrap(), AcquiredAll::Granted(_)));
        let others = ["a", "d"].map(claim);
        let refused = db.pool.lease_acquire_all(&others).await.unwrap();
        assert!(matches!(&refused, AcquiredAll::Held { key, .. } if key == "a"), "{refused:?}");
        assert!(db.pool.lease_look(&"d".into()).await.unwrap().is_none());
        let acquired = db.pool.lease_acquire_all(&[]).await.unwrap();
        assert!(matches!(acquired, AcquiredAll::Granted(grants) if grants.is_empty()));
    }
}
