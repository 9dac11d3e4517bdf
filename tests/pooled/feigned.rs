//! Named locks on a server that only pretends to have them.

use std::time::Duration;

use lockkit::{Error, NamedLock, Wait};
use support::{TestDb, on_databases};

on_databases! {
    [postgres]

    async fn a_server_that_only_pretends_to_lock_is_refused<S>(db: TestDb<S>) {
        let pool = support::pool_of_a_pretender(&db).await;
        for wait in [Wait::Never, Wait::AtMost(Duration::from_secs(1)), Wait::Unbounded] {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            let refused = NamedLock::new("order:7").wait(wait).lock(&mut *tx).await.unwrap_err();
            assert!(matches!(&refused, Error::FeignedLock { key, .. } if *key == "order:7"), "{refused:?}");
            assert!(refused.to_string().contains("PostgreSQL"), "names the server: {refused}");
            tx.rollback().await.unwrap();
        }
        // In a transaction of sqlx's, too.
        let mut tx = pool.begin().await.unwrap();
        let refused = NamedLock::new("order:7").lock(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::FeignedLock { .. }), "{refused:?}");
        drop(tx);

        // A server that locks is not suspected for that.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("order:7").lock(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
    }
}
