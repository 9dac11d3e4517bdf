//! Transactions that are committed or verified under a lease.

use std::time::Duration;

use lockkit::{Error, Leases, LossReason};
use support::{Proxy, Server, TestDb, on_every_database, on_every_server, spawn};
use tokio::time::sleep;

use super::{MILLIS, expire};

on_every_database! {
    async fn a_commit_needs_the_lease_and_releases_it<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());

        let lease = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        lease.commit(tx).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
        assert_eq!(leases.show("k").await.unwrap(), None);

        // A transaction of sqlx serves as well.
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut tx = db.pool.begin().await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        lease.commit(tx).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(2));
        assert_eq!(leases.show("k").await.unwrap(), None);
        db.assert_nothing_left().await;
    }

    async fn a_stale_holders_commit_is_refused_and_its_write_is_absent<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());

        // Taken over by another holder.
        let stale = leases.lease("k").acquire().await.unwrap();
        expire(&db, "k").await;
        let next = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        assert!(stale.commit(tx).await.unwrap_err().is_lost());
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());

        // Expired, and nobody else there.
        expire(&db, "k").await;
        let mut tx = db.pool.begin().await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        assert!(next.commit(tx).await.unwrap_err().is_lost());
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        db.assert_nothing_left().await;
    }

    async fn verify_needs_a_transaction_and_a_current_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();

        let mut conn = db.pool.acquire().await.unwrap();
        assert!(matches!(lease.verify(&mut conn).await, Err(Error::InvalidOption { option: "verify", .. })));
        drop(conn);

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        tx.commit().await.unwrap();

        leases.steal("k").await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert!(lease.verify(&mut tx).await.unwrap_err().is_lost());
        tx.rollback().await.unwrap();
        assert_eq!(lease.lost().await, LossReason::Stolen);
    }

    async fn a_nested_transaction_cannot_be_committed_with_a_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut outer = db.pool.begin().await.unwrap();
        let inner = sqlx::Connection::begin(&mut *outer).await.unwrap();
        let refused = lease.commit(inner).await;
        assert!(matches!(refused, Err(Error::InvalidOption { option: "commit", .. })), "{refused:?}");
        outer.rollback().await.unwrap();
    }
}

on_every_server! {
    async fn a_pinned_lease_is_not_taken_even_when_its_time_is_over<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        expire_soon(&db).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        sleep(MILLIS(600)).await;

        // Committed is only what the lease was before it was pinned: over by now.
        assert_eq!(leases.show("k").await.unwrap(), None);
        let waiting = std::time::Instant::now();
        assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
        assert!(waiting.elapsed() < Duration::from_secs(5), "a try does not wait for the transaction");
        lease.commit(tx).await.unwrap();
        assert!(leases.lease("k").try_acquire().await.unwrap().is_some());
    }

    async fn the_end_of_a_lease_leaves_it_to_the_other_transaction_that_pins_it<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        // Another process, whose last claims were of released leases.
        let others = Leases::new(db.pool_of(2).await);
        for commits in [true, false] {
            for _ in 0..4 {
                others.lease("k").acquire().await.unwrap().release().await.unwrap();
            }
            let lease = leases.lease("k").acquire().await.unwrap();
            let mut open = lockkit::begin(&db.pool).await.unwrap();
            lease.verify(&mut open).await.unwrap();
            let ending = spawn({
                let pool = db.pool.clone();
                async move {
                    if commits {
                        let tx = lockkit::begin(&pool).await.unwrap();
                        lease.commit(tx).await
                    } else {
                        lease.release().await.map(drop)
                    }
                }
            });
            sleep(MILLIS(200)).await;
            assert!(others.lease("k").try_acquire().await.unwrap().is_none(), "it is pinned, commits: {commits}");
            assert!(commits || !ending.is_finished(), "a release waits for the transaction");
            open.commit().await.unwrap();
            ending.await.unwrap().unwrap();
            others.lease("k").acquire().await.unwrap().release().await.unwrap();
        }
        db.assert_nothing_left().await;
    }

    async fn a_lease_whose_commit_is_on_its_way_is_not_pinned_any_more<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let tx = lockkit::begin(&pool).await.unwrap();
        proxy.hold_replies_to("COMMIT");
        let committing = spawn(lease.share().commit(tx));
        sleep(MILLIS(200)).await;
        // Also not after another commit was refused.
        let mut nested = db.pool.begin().await.unwrap();
        let refused = sqlx::Connection::begin(&mut *nested).await.unwrap();
        assert!(matches!(lease.share().commit(refused).await, Err(Error::InvalidOption { .. })));
        nested.rollback().await.unwrap();
        let mut late = lockkit::begin(&db.pool).await.unwrap();
        assert!(lease.verify(&mut late).await.unwrap_err().is_lost());
        late.rollback().await.unwrap();
        proxy.pass_replies();
        committing.await.unwrap().unwrap();
        db.assert_nothing_left().await;
    }
}

async fn expire_soon<S: support::Backend>(db: &TestDb<S>) {
    db.execute("UPDATE lockkit_lease SET expires_us = acquired_us + 500000").await;
}
