//! Commits under a lease whose answers are late, lost, or not waited for.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use lockkit::{Error, Leases, LossReason, RetryPolicy, dialect::LeaseOps, with_lock};
use support::{Proxy, Server, TestDb, on_every_database, on_every_server, spawn};
use tokio::time::{sleep, timeout};

const TTL: Duration = Duration::from_millis(900);

/// A pool whose server's answers can be held back, and leases in it.
async fn behind_a_proxy<S: support::Backend>(db: &TestDb<S>) -> (Proxy, sqlx::Pool<S::DB>, Leases<sqlx::Pool<S::DB>>) {
    db.execute("CREATE TABLE done (n INT)").await;
    let proxy = Proxy::start(&db.url);
    let pool = sqlx::Pool::<S::DB>::connect(proxy.url()).await.unwrap();
    let leases = Leases::builder(pool.clone()).ttl(TTL).build().unwrap();
    (proxy, pool, leases)
}

/// A transaction that has written, and whose commit will not be answered.
async fn ready_to_commit<S: support::Backend>(
    proxy: &Proxy,
    pool: &sqlx::Pool<S::DB>,
) -> lockkit::Result<lockkit::Tx<S::DB>> {
    let mut tx = lockkit::begin(pool).await?;
    S::execute(&mut tx, "INSERT INTO done VALUES (1)").await.unwrap();
    proxy.hold_replies_to("COMMIT");
    Ok(tx)
}

/// Waits until the row is there for others to see: the commit has happened.
async fn until_committed<S: support::Backend>(db: &TestDb<S>) {
    while db.fetch_i64("SELECT COUNT(*) FROM done").await != Some(1) {
        sleep(Duration::from_millis(20)).await;
    }
}

#[with_lock(lease, on = leases, key = const "k", as = lease)]
async fn without_an_answer<DB: LeaseOps>(leases: &Leases<sqlx::Pool<DB>>, proxy: &Proxy) -> Result<(), Error> {
    let tx = lockkit::begin(leases.store()).await?;
    proxy.hold_replies_to("COMMIT");
    lease.commit(tx).await
}

#[with_lock(lease, on = leases, key = const "k", tx = _tx)]
async fn robbed<DB: LeaseOps>(leases: &Leases<sqlx::Pool<DB>>, operator: &Leases<sqlx::Pool<DB>>) -> Result<(), Error> {
    operator.steal("k").await.map(drop)
}

on_every_server! {
    async fn a_stale_holder_cannot_commit_under_the_attribute<S>(db: TestDb<S>) {
        let (leases, operator) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let lost = robbed(&leases, &operator).await.unwrap_err();
        assert!(lost.is_lost(), "{lost:?}");
    }

    async fn a_commit_without_an_answer_under_the_attribute_is_of_unknown_outcome<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool).ttl(TTL).build().unwrap();
        let unknown = without_an_answer(&leases, &proxy).await.unwrap_err();
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        proxy.pass_replies();
    }

    async fn a_lost_lease_refuses_to_commit_though_the_server_does_not_answer<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool.clone()).ttl(TTL).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let tx = lockkit::begin(&pool).await.unwrap();
        proxy.stall(true);
        lease.lost().await;
        let lost = timeout(Duration::from_secs(60), lease.commit(tx)).await.expect("it is answered").unwrap_err();
        assert!(lost.is_lost(), "{lost:?}");
    }

    // The lease expires while the answer to the COMMIT is on its way.
    async fn a_commit_that_was_sent_is_answered_though_its_lease_expires<S>(db: TestDb<S>) {
        let (proxy, pool, leases) = behind_a_proxy(&db).await;
        let working = leases.lease("k").run(async |lease| {
            let tx = ready_to_commit::<S>(&proxy, &pool).await?;
            lease.commit(tx).await
        });
        let held_back = async {
            until_committed(&db).await;
            sleep(TTL * 2).await;
            proxy.pass_replies();
        };
        let (committed, ()) = tokio::join!(working, held_back);
        committed.expect("the answer to the commit decides");
    }

    // The deadline passes while the answer to the COMMIT is on its way.
    async fn a_commit_that_was_sent_is_answered_though_the_deadline_of_its_retry_passes<S>(db: TestDb<S>) {
        let (proxy, pool, _leases) = behind_a_proxy(&db).await;
        let deadline = TTL;
        let working = RetryPolicy::new().deadline(deadline).retry(async |_| {
            let tx = ready_to_commit::<S>(&proxy, &pool).await?;
            tx.commit().await
        });
        let held_back = async {
            until_committed(&db).await;
            sleep(deadline * 2).await;
            proxy.pass_replies();
        };
        let (committed, ()) = tokio::join!(working, held_back);
        committed.expect("the answer to the commit decides");
    }

    // The first has committed, and its answer is on its way.
    async fn of_two_shares_that_commit_the_second_learns_that_its_process_released_the_lease<S>(db: TestDb<S>) {
        let (proxy, pool, _) = behind_a_proxy(&db).await;
        let leases = Leases::builder(pool.clone()).ttl(TTL * 100).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let first = lease.share();
        let second = lockkit::begin(&db.pool).await.unwrap();
        let tx = ready_to_commit::<S>(&proxy, &pool).await.unwrap();
        let first = spawn(async move { first.commit(tx).await });
        until_committed(&db).await;
        let lost = lease.commit(second).await.unwrap_err();
        assert!(matches!(lost, Error::Lost { reason: LossReason::Released, .. }), "{lost:?}");
        proxy.pass_replies();
        first.await.unwrap().expect("the first share has committed");
    }

    async fn a_commit_without_an_answer_is_of_unknown_outcome<S>(db: TestDb<S>) {
        let (proxy, pool, leases) = behind_a_proxy(&db).await;
        let working = leases.lease("k").run(async |lease| {
            let tx = ready_to_commit::<S>(&proxy, &pool).await?;
            lease.commit(tx).await
        });
        let unknown = working.await.unwrap_err();
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        until_committed(&db).await;
        proxy.pass_replies();
    }

    async fn a_commit_of_ones_own_is_answered_though_the_lease_around_it_expires<S>(db: TestDb<S>) {
        let (proxy, pool, leases) = behind_a_proxy(&db).await;
        let mut answered = None;
        let working = leases.lease("k").run(async |_| {
            let tx = ready_to_commit::<S>(&proxy, &pool).await?;
            answered = Some(tx.commit().await);
            Ok::<_, Error>(())
        });
        let held_back = async {
            until_committed(&db).await;
            sleep(TTL * 2).await;
            proxy.pass_replies();
        };
        let (lost, ()) = tokio::join!(working, held_back);
        answered.expect("the body heard the answer").expect("committed");
        assert!(lost.unwrap_err().is_lost(), "the commit did not depend on the lease");
    }
}

on_every_database! {
    async fn a_commit_that_is_dropped_inside_a_body_releases_the_lease<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(300)).build().unwrap();
        let others = Leases::new(db.pool.clone());
        let heir = leases.lease("k").run(async |lease| {
            let tx = lockkit::begin(&db.pool).await?;
            {
                // Its first statement is on its way when it is dropped.
                let mut committing = pin!(lease.commit(tx));
                drop(committing.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            }
            others.lease("k").wait(Duration::from_secs(30)).acquire().await
        });
        heir.await.expect("it was released").release().await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_every_database! {
    async fn a_transaction_of_another_database_is_refused_and_the_lease_is_kept<S>(db: TestDb<S>) {
        let other = TestDb::<S>::new().await;
        let leases = Leases::new(db.pool.clone());
        // The other database may have a lease of this name, too.
        for key in ["only here", "in both"] {
            let theirs = Leases::new(other.pool.clone()).lease("in both").acquire().await.unwrap();
            let lease = leases.lease(key).acquire().await.unwrap();

            let mut tx = lockkit::begin(&other.pool).await.unwrap();
            let refused = lease.verify(&mut tx).await.unwrap_err();
            assert!(matches!(refused, Error::InvalidOption { option: "verify", .. }), "{key}: {refused:?}");
            assert!(refused.to_string().contains("another database"), "{refused}");
            tx.rollback().await.unwrap();
            assert!(lease.is_trusted(), "{key}");

            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            lease.verify(&mut tx).await.unwrap();
            tx.rollback().await.unwrap();

            let mut tx = other.pool.begin().await.unwrap();
            S::execute(&mut tx, "INSERT INTO lockkit_stock (name, segment, quantity) VALUES ('x', 0, \
                                 1)").await.unwrap();
            let refused = lease.commit(tx).await.unwrap_err();
            assert!(matches!(refused, Error::InvalidOption { option: "commit", .. }), "{key}: {refused:?}");
            assert_eq!(other.fetch_i64("SELECT COUNT(*) FROM lockkit_stock").await, Some(0), "it was not committed");
            // It is released in the background, as after every commit that was refused.
            leases.lease(key).acquire().await.unwrap().release().await.unwrap();
            assert!(theirs.is_trusted());
            theirs.release().await.unwrap();
        }
    }

    async fn leases_of_several_keys_are_verified_together<S>(db: TestDb<S>) {
        let (leases, operator) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        both.verify(&mut tx).await.unwrap();
        tx.rollback().await.unwrap();
        operator.steal("b").await.unwrap().unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = both.verify(&mut tx).await.unwrap_err();
        assert!(refused.is_lost(), "{refused:?}");
        tx.rollback().await.unwrap();
    }

    async fn a_stolen_lease_is_lost_in_a_pool_whose_only_connection_has_the_transaction<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let leases = Leases::builder(pool.clone()).ttl(Duration::from_mins(10)).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        Leases::new(db.pool.clone()).steal("k").await.unwrap().unwrap();
        let mut tx = lockkit::begin(&pool).await.unwrap();
        let refused = lease.verify(&mut tx).await.unwrap_err();
        assert!(refused.is_lost(), "{refused:?}");
        assert!(lease.commit(tx).await.unwrap_err().is_lost());
    }
}
