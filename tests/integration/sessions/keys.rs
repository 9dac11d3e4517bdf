//! Keys of session locks: which of them are the same lock.

use lockkit::{NamedLock, Wait};
use support::{Server, TestDb, on_every_server};

use super::{acquire, holder_sql, is_held};

on_every_server! {
    // `GET_LOCK` ignores case, takes 64 characters at most on MySQL, and its names belong to the whole server.
    async fn keys_that_differ_in_any_byte_are_different_locks<S>(db: TestDb<S>) {
        let long = "x".repeat(255);
        let mut held = Vec::new();
        for key in ["a", "A", "a ", "é", "e\u{301}", "'; --", &long, &long[..254]] {
            held.push(acquire(&db.pool, key).await);
            assert!(is_held(&db.pool, key).await, "{key:?}");
        }
        for session in held {
            session.release().await.unwrap();
        }
    }

    async fn another_database_on_the_same_server_has_locks_of_its_own<S>(db: TestDb<S>) {
        let other = TestDb::<S>::with_connections(2).await;
        let (ours, theirs) = (acquire(&db.pool, "leader").await, acquire(&other.pool, "leader").await);
        assert!(ours.is_alive().await && theirs.is_alive().await);
        ours.release().await.unwrap();
        theirs.release().await.unwrap();
    }

    async fn a_named_lock_of_the_same_name_is_another_lock<S>(db: TestDb<S>) {
        let session = acquire(&db.pool, "k").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").wait(Wait::Never).lock(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        session.release().await.unwrap();
    }

    // Both kinds of server grant a lock again to a session that holds it, and unlock it only after as many releases.
    async fn a_session_that_holds_the_lock_already_is_not_granted_it_again<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let session = acquire(&pool, "leader").await;
        let lock = db.fetch_text(holder_sql(S::NAME).0).await.expect("a lock");
        session.release().await.unwrap();

        // Somebody gives a connection back with the lock on it.
        let (take, release) = match S::NAME {
            "PostgreSQL" => (format!("SELECT pg_advisory_lock({lock})"), format!("SELECT pg_advisory_unlock({lock})")),
            _ => (format!("SELECT GET_LOCK('{lock}', 0)"), format!("SELECT RELEASE_LOCK('{lock}')")),
        };
        S::execute(&mut *pool.acquire().await.unwrap(), &take).await.unwrap();
        assert!(is_held(&pool, "leader").await, "granted to the pool's connection");
        assert!(is_held(&db.pool, "leader").await);

        S::execute(&mut *pool.acquire().await.unwrap(), &release).await.unwrap();
        assert!(!is_held(&pool, "leader").await);
        db.assert_nothing_left().await;
    }
}
