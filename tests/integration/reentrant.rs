//! A task that asks again for a lock that it holds is told so at once, and other tasks wait as usual.

use std::time::Duration;

use lockkit::testing::MemoryStore;
use lockkit::{Error, Lease, LeaseRequest, LeaseStore, Leases, SessionLock, Wait, with_lock};
use support::{Server, TestDb, on_databases, on_every_database, on_every_server, refusal, spawn};
use tokio::{task::JoinHandle, time::timeout};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// An error that comes at once although the wait has no end.
async fn refused<T>(asking: impl Future<Output = Result<T, Error>>) -> Error {
    let answer = timeout(Duration::from_secs(30), asking).await.expect("it waits for itself");
    let Err(refused) = answer else { panic!("it was let in") };
    assert!(matches!(refused, Error::Reentrant { .. }), "{refused}");
    assert!(!refused.is_contended() && !refused.is_transient() && !refused.is_lost(), "{refused}");
    refused
}

/// Runs the second request in the body of the first.
async fn nested<S: LeaseStore>(outer: LeaseRequest<S>, inner: LeaseRequest<S>) -> Result<(), Error> {
    outer.run(|_| async { inner.run(|_| async { Ok(()) }).await }).await
}

#[tokio::test(start_paused = true)]
async fn a_reader_whose_lease_was_stolen_does_not_pass_a_writer() {
    let store = MemoryStore::new();
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let body = async |lease: Lease<_>| {
        store.steal(lease.key().as_str());
        let writer = there.rw("k").write().acquire().await?;
        let again = here.rw("k").read().wait(MILLIS(10)).acquire().await;
        assert!(again.is_err(), "it reads beside {writer:?}");
        Ok::<_, Error>(())
    };
    here.rw("k").read().run(body).await.unwrap();
}

on_every_database! {
    async fn a_body_that_asks_for_its_own_lease_is_told_so_at_once<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).wait(Wait::Unbounded).build().unwrap();
        let (lease, rw) = (|| leases.lease("k"), || leases.rw("k"));

        let told = refused(nested(lease(), lease())).await.to_string();
        assert_eq!(
            told,
            "this task already holds lease `k` and would wait for itself: hand the lease that it has to the code that \
             needs it (`lease.share()`; `as = lease` names it under `#[with_lock]`), and take the lock in one place"
        );
        refused(nested(lease().fair(), lease().wait(Duration::ZERO))).await;
        refused(nested(rw().write(), rw().write())).await;
        refused(nested(rw().write(), rw().read())).await;
        refused(nested(rw().read(), rw().write())).await;
        refused(nested(leases.semaphore("k", 1), leases.semaphore("k", 1))).await;
        refused(lease().run(|_| async { leases.all(["j", "k"]).acquire().await.map(drop) })).await;
        refused(leases.all(["j", "k"]).run(|_| async { nested(lease(), lease()).await })).await;
        refused(leases.all(["j", "k"]).run(|_| async { leases.all(["k", "l"]).run(|_| async { Ok(()) }).await })).await;
        refused(lease().run(|_| async { nested(leases.lease("l"), lease()).await })).await;

        // What is no wait for itself.
        nested(lease(), leases.lease("l")).await.unwrap();
        nested(lease(), rw().write()).await.unwrap();
        nested(rw().read(), rw().read()).await.unwrap();
        nested(leases.semaphore("k", 2), leases.semaphore("k", 2)).await.unwrap();
        let asked = lease().run(|_| async { Ok::<_, Error>(lease().try_acquire().await?.is_none()) });
        assert!(asked.await.unwrap(), "a question that does not wait has its plain answer");
        db.assert_nothing_left().await;
    }

    async fn a_body_that_has_released_its_lease_may_ask_again<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let body = async |lease: Lease<_>| {
            lease.release().await?;
            leases.lease("k").acquire().await?.release().await
        };
        leases.lease("k").run(body).await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_body_is_told_that_its_lease_is_in_its_way_whichever_leases_it_asks<S>(db: TestDb<S>) {
        let one = Leases::new(db.pool.clone());
        let other = Leases::builder(db.pool.clone()).wait(Wait::Unbounded).build().unwrap();
        refused(one.lease("k").run(|_| async { other.lease("k").acquire().await.map(drop) })).await;
        refused(one.lease("k").run(|_| async { other.all(["j", "k"]).acquire().await.map(drop) })).await;

        // The same key in another store is another lease.
        let elsewhere = Leases::new(MemoryStore::new());
        one.lease("k").run(|_| async { elsewhere.lease("k").acquire().await?.release().await }).await.unwrap();
        let taken = elsewhere.lease("k").acquire().await.unwrap();
        let asking = one.lease("k").run(|_| async { elsewhere.lease("k").wait(MILLIS(50)).acquire().await.map(drop) });
        assert!(asking.await.unwrap_err().is_contended());
        taken.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn another_task_of_the_process_waits_and_its_error_names_the_holder<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).holder("me").build().unwrap();
        let (asking, others) = (leases.clone(), Leases::builder(db.pool.clone()).holder("them").build().unwrap());
        let body = async |_| {
            let refused = spawn(refusal(async move || asking.lease("k").wait(MILLIS(60)).acquire().await));
            Ok::<_, Error>(refused.await.unwrap())
        };
        let refused = leases.lease("k").run(body).await.unwrap();
        let Error::Contended { holder: Some(holder), .. } = &refused else { panic!("{refused}") };
        assert!(holder.is_this_process() && holder.as_lease().unwrap().holder == "me");
        let told = refused.to_string();
        assert!(told.starts_with("lock `k` is held by this process (waited "), "{told}");
        assert!(
            told.contains("): held for ") && told.contains(", expires in ") && told.contains(" unless renewed ("),
            "{told}"
        );

        let held = leases.lease("k").acquire().await.unwrap();
        let told = refusal(async || others.lease("k").wait(MILLIS(60)).acquire().await).await.to_string();
        assert!(
            told.starts_with("lock `k` is held by somebody else (waited ") && told.contains("): me, held for "),
            "{told}"
        );
        let told = leases.all(["j", "k"]).wait(MILLIS(60)).acquire().await.unwrap_err().to_string();
        assert!(told.starts_with("lock `k` is held by this process (waited "), "{told}");
        held.release().await.unwrap();
    }

    async fn a_reader_may_read_again_past_a_writer_that_waits<S>(db: TestDb<S>) {
        for there in [Leases::new(db.pool.clone()), Leases::new(db.pool.clone())] {
            let here = there.clone();
            let (writing, others) = (there.clone(), Leases::new(db.pool.clone()));
            let body = async |_| {
                let writer = spawn(async move { writing.rw("k").write().wait(Wait::Unbounded).acquire().await });
                // The writer waits for the body once it has its own lease.
                while others.show("k/writer").await?.is_none() {
                    tokio::task::yield_now().await;
                }
                let second = timeout(Duration::from_secs(30), here.rw("k").read().wait(Wait::Unbounded).acquire());
                second.await.expect("it waits for itself")?.release().await?;
                assert!(!writer.is_finished());
                Ok::<_, Error>(writer)
            };
            let writer = there.rw("k").read().run(body).await.unwrap();
            writer.await.unwrap().unwrap().release().await.unwrap();
        }
        db.assert_nothing_left().await;
    }

    async fn a_function_under_the_attribute_that_calls_itself_is_told_so<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(lease, on = leases, key = const "k", wait = Wait::Unbounded)]
        async fn lease(leases: &Leases<Pool>, deep: bool) -> Result<(), Error> {
            if deep { Ok(()) } else { Box::pin(lease(leases, true)).await }
        }
        #[with_lock(named, on = pool, key = const "k", wait = Wait::Unbounded, tx = _tx)]
        async fn named(pool: &Pool, deep: bool) -> Result<(), Error> {
            if deep { Ok(()) } else { Box::pin(named(pool, true)).await }
        }
        #[with_lock(named, on = pool, key = "k", attempts = 2, tx = _tx)]
        async fn retried(pool: &Pool) -> Result<(), Error> {
            Box::pin(named(pool, true)).await
        }
        refused(lease(&Leases::new(db.pool.clone()), false)).await;
        let told = refused(named(&db.pool, false)).await.to_string();
        assert!(told.ends_with(
            " and would wait for itself: hand the open transaction (`&mut *tx`) to the code that \
             needs the lock, instead of beginning another one"
        ), "{told}");
        refused(retried(&db.pool)).await;
        lease(&Leases::new(db.pool.clone()), true).await.unwrap();
        named(&db.pool, true).await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_task_that_a_body_spawns_waits_for_the_lock_of_the_body<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(named, on = pool, key = "k", tx = _tx)]
        async fn outer(pool: &Pool) -> Result<JoinHandle<Result<(), Error>>, Error> {
            let pool = pool.clone();
            Ok(spawn(async move { inner(&pool).await }))
        }
        #[with_lock(named, on = pool, key = "k", tx = _tx)]
        async fn inner(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        outer(&db.pool).await.unwrap().await.unwrap().unwrap();
        db.assert_nothing_left().await;
    }
}

on_every_server! {
    async fn a_second_name_in_another_transaction_of_a_body_is_taken<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(named, on = pool, key = "n:{id}", tx = _tx)]
        async fn named(pool: &Pool, id: u32) -> Result<(), Error> {
            if id == 0 { Ok(()) } else { Box::pin(named(pool, id - 1)).await }
        }
        named(&db.pool, 2).await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_leader_that_asks_to_lead_is_told_so<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(session, on = pool, key = "leader", wait = Wait::Unbounded)]
        async fn lead(pool: &Pool, deep: bool) -> Result<(), Error> {
            if deep {
                return Ok(());
            }
            assert!(SessionLock::new("leader").try_acquire(pool).await?.is_none());
            SessionLock::new("other").acquire(pool).await?.release().await?;
            Box::pin(lead(pool, true)).await
        }
        let told = refused(lead(&db.pool, false)).await.to_string();
        assert_eq!(
            told,
            "this task already holds session lock `leader` and would wait for itself: hand the session that it holds \
             (`&session`; `as = session` names it under `#[with_lock]`) to the code that needs the lock, and take the \
             lock in one place"
        );
        lead(&db.pool, true).await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [sqlite]
    async fn a_second_transaction_of_a_body_is_refused_where_there_is_one_writer<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(row, on = pool, table = "t", by(id = 1_i64), tx = _tx)]
        async fn row(pool: &Pool) -> Result<(), Error> {
            lockkit::begin(pool).await.map(drop)
        }
        #[with_lock(row, on = pool, table = "t", by(id = 1_i64), tx = _tx)]
        async fn beside(pool: &Pool, other: &Pool) -> Result<(), Error> {
            lockkit::begin(other).await?.commit().await
        }
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY)").await;
        db.execute("INSERT INTO t VALUES (1)").await;
        let told = refused(row(&db.pool)).await.to_string();
        assert!(told.starts_with("this task already holds lock `the write lock of the database` and "), "{told}");
        // The pool of another database has a lock of its own.
        let other = TestDb::<S>::new().await;
        beside(&db.pool, &other.pool).await.unwrap();
    }
}
