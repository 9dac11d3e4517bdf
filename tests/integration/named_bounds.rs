//! The bound of a named lock on MySQL and MariaDB, which is the session's for one message, and shared locks within it.

use std::time::Duration;

use lockkit::{NamedLock, Wait};
use support::{Server, TestDb, on_databases, on_every_server};

const SETTING: &str = "SELECT CAST(@@innodb_lock_wait_timeout AS CHAR)";

on_every_server! {
    async fn several_share_a_name_however_long_they_would_wait<S>(db: TestDb<S>) {
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("prices").lock(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        for wait in [Wait::DEFAULT, Wait::Unbounded, Wait::Never, Duration::from_millis(500).into()] {
            let mut one = lockkit::begin(&db.pool).await.unwrap();
            let mut two = lockkit::begin(&db.pool).await.unwrap();
            NamedLock::new("prices").share().wait(wait).lock(&mut *one).await.unwrap();
            let second = NamedLock::new("prices").share().wait(Wait::Never).lock(&mut *two).await;
            assert!(second.is_ok(), "{wait:?}: {second:?}");
            let alone = NamedLock::new("prices").wait(Wait::Never);
            let mut three = lockkit::begin(&db.pool).await.unwrap();
            assert!(alone.lock(&mut *three).await.unwrap_err().is_contended());
            for tx in [one, two, three] {
                tx.rollback().await.unwrap();
            }
        }
    }
}

on_databases! {
    [mariadb, mysql]

    async fn the_bound_of_a_dropped_named_lock_does_not_stay_in_the_session<S>(db: TestDb<S>) {
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("held").lock(&mut *holder).await.unwrap();
        let pool = db.pool_of(1).await;
        let before = S::fetch_text(&mut pool.acquire().await.unwrap(), SETTING).await.unwrap();
        let waiting = || NamedLock::new("held").wait(Duration::from_secs(1));

        // In a transaction that goes on, against the advice. The next statement gets the error of the one that was
        // dropped.
        let mut tx = pool.begin().await.unwrap();
        let dropped = tokio::time::timeout(Duration::from_millis(200), waiting().lock(&mut *tx)).await;
        assert!(dropped.is_err());
        assert!(S::execute(&mut tx, "SELECT 1").await.is_err());
        let refused = waiting().lock(&mut *tx).await.unwrap_err();
        assert!(refused.is_contended(), "{refused:?}");
        assert_eq!(S::fetch_text(&mut tx, SETTING).await.unwrap(), before, "after another lock");
        drop(tx);

        // Dropped together with the transaction, as under a timeout.
        let mut tx = pool.begin().await.unwrap();
        let dropped = tokio::time::timeout(Duration::from_millis(200), waiting().lock(&mut *tx)).await;
        assert!(dropped.is_err());
        drop(tx);
        let after = S::fetch_text(&mut pool.acquire().await.unwrap(), SETTING).await.unwrap();
        assert_eq!(after, before, "after the drop of the transaction");
        holder.rollback().await.unwrap();
    }

    async fn the_bound_of_a_text_that_failed_stays_until_the_next_one_or_until_it_is_restored<S>(db: TestDb<S>) {
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("held").lock(&mut *holder).await.unwrap();
        let text = |name| NamedLock::new(name).wait(Duration::from_secs(1)).sql::<<S as Server>::DB>().unwrap();
        let mut conn = db.pool.acquire().await.unwrap();
        let before = S::fetch_text(&mut conn, SETTING).await.unwrap();
        for restores in ["SET innodb_lock_wait_timeout = DEFAULT, @lockkit_wait = NULL", &text("free")] {
            let mut tx = sqlx::Connection::begin(&mut *conn).await.unwrap();
            S::execute(&mut tx, &text("held")).await.unwrap_err();
            tx.rollback().await.unwrap();
            let stays = S::fetch_text(&mut conn, SETTING).await.unwrap();
            assert_eq!(stays == before, S::NAME == "MariaDB", "{stays:?}");
            S::execute(&mut conn, restores).await.unwrap();
            assert_eq!(S::fetch_text(&mut conn, SETTING).await.unwrap(), before, "{restores}");
        }
        holder.rollback().await.unwrap();
    }
}
