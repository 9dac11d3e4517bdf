//! Session locks behind a pooler.

use lockkit::{Error, SessionLock};
use sqlx::Connection;
use sqlx::Pool;
use support::{JoinSet, PgBouncer, Server, TestDb, on_databases};

use super::{PATIENCE, acquire, is_held};

on_databases! {
    [postgres]

    async fn behind_a_pooler_in_transaction_mode_it_is_refused_and_nothing_is_locked<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "transaction");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        for _ in 0..10 {
            // Two looks at the session see the same one while nobody else is there, so they prove nothing.
            let mut conn = pool.acquire().await.unwrap();
            let mut look = async || S::fetch_i64(&mut conn, "SELECT pg_backend_pid()").await.unwrap();
            assert_eq!(look().await, look().await);
            drop(conn);

            let refused = SessionLock::new("leader").wait(PATIENCE).acquire(&pool).await.unwrap_err();
            assert!(matches!(&refused, Error::TransactionPooler { key, .. } if *key == "leader"), "{refused:?}");
            let refused = SessionLock::new("leader").try_acquire(&pool).await.unwrap_err();
            assert!(matches!(refused, Error::TransactionPooler { .. }), "{refused:?}");
            println!("{refused}");
        }
        assert!(!is_held(&db.pool, "leader").await);
        db.assert_nothing_left().await;
    }

    async fn it_is_refused_there_while_others_use_the_pooler_too<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "transaction");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        let mut others = JoinSet::new();
        for _ in 0..4 {
            let url = pooler.url().to_owned();
            others.spawn(async move {
                let mut conn = <<S as Server>::DB as sqlx::Database>::Connection::connect(&url).await.unwrap();
                loop {
                    S::execute(&mut conn, "SELECT 1").await.unwrap();
                }
            });
        }
        let mut refused = 0;
        for _ in 0..100 {
            match SessionLock::new("leader").try_acquire(&pool).await {
                Err(Error::TransactionPooler { .. }) => refused += 1,
                other => println!("not refused: {other:?}"),
            }
        }
        others.shutdown().await;
        assert_eq!(refused, 100);
        db.assert_nothing_left().await;
    }

    async fn behind_a_pooler_in_session_mode_it_works<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "session");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        let leader = acquire(&pool, "leader").await;
        assert!(leader.is_alive().await);
        assert!(is_held(&pool, "leader").await && is_held(&db.pool, "leader").await);
        leader.release().await.unwrap();

        drop(acquire(&pool, "leader").await);
        acquire(&db.pool, "leader").await.release().await.unwrap();
        drop(pool);
        drop(pooler);
        db.assert_nothing_left().await;
    }
}
