//! Databases that do not have every character of Unicode.

use std::error::Error as _;

use lockkit::{Error, Fault, Leases, NamedLock, SessionLock, Stock, Wait};
use sqlx::{Connection, PgConnection, PgPool};
use support::{Server, TestDb, on_databases};

on_databases! {
    [postgres]
    async fn a_key_that_a_latin1_database_cannot_store_is_refused_and_says_so<S>(db: TestDb<S>) {
        let name = db.fetch_text("SELECT current_database() || '_latin1'").await.unwrap();
        db.execute(&format!(
            "CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        ))
        .await;
        let mut url = url::Url::parse(&db.url).unwrap();
        url.set_path(&name);
        let pool = PgPool::connect(url.as_str()).await.unwrap();
        lockkit::migrate(&pool).await.unwrap();
        let leases = Leases::new(pool.clone());

        let russian = leases.lease("заказ:42").acquire().await.unwrap_err();
        let stock = Stock::new(pool.clone(), "товар").put(1).await.unwrap_err();
        let all = leases.all(["заказ:1", "order:1"]).acquire().await.unwrap_err();
        let shown = leases.show("заказ:42").await.unwrap_err();
        // Which of several keys it is, the server does not say.
        assert!(matches!(all, Error::Database { fault: Fault::Encoding, .. }), "{all}: {:?}", all.source());
        for refused in [russian, stock, shown] {
            assert!(matches!(refused, Error::InvalidKey { .. }), "{refused}: {:?}", refused.source());
            assert!(refused.to_string().contains("encoding"), "{refused}");
        }

        // What the encoding has, and what is only hashed.
        leases.lease("café:42").acquire().await.unwrap().release().await.unwrap();
        let mut tx = lockkit::begin(&pool).await.unwrap();
        NamedLock::new("заказ:42").wait(Wait::Never).lock(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        SessionLock::new("заказ:42").try_acquire(&pool).await.unwrap().unwrap().release().await.unwrap();

        leases.close().await.unwrap();
        pool.close().await;
        let mut conn = PgConnection::connect(&db.url).await.unwrap();
        S::execute(&mut conn, &format!("DROP DATABASE {name} WITH (FORCE)")).await.unwrap();
    }
}
