//! What a lock takes as its connection: a transaction of lockkit's or sqlx's as it is, or the connection inside.

use lockkit::{Error, NamedLock, RowLock, Stock, VersionedRow};
use sqlx::Transaction;
use support::{TestDb, on_every_database};

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "id")]
struct Item {
    id: i64,
    n: i64,
    version: i64,
}

async fn items<S: support::Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t_items (id BIGINT PRIMARY KEY, n BIGINT, version BIGINT)").await;
    db.execute("INSERT INTO t_items VALUES (1, 5, 1), (2, 6, 1)").await;
}

on_every_database! {
    async fn a_transaction_is_taken_as_it_is<S>(db: TestDb<S>) {
        items(&db).await;
        let stock = Stock::new(db.pool.clone(), "handles");
        stock.put(5).await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(RowLock::table("t_items").by("id", 1_i64).lock(&mut tx).await.unwrap(), 1);
        let _: Vec<(i64, i64, i64)> = RowLock::table("t_items").by("id", 1_i64).fetch_all(&mut tx).await.unwrap();
        NamedLock::new("k").lock(&mut tx).await.unwrap();
        stock.take_in(&mut tx, 1).await.unwrap();
        let row = || VersionedRow::table("t_items").by("id", 2_i64);
        let found = row().read::<(i64, i64, i64)>(&mut tx).await.unwrap();
        row().expected(found.version.clone()).bump(&mut tx).await.unwrap();
        let mut item = Item::load(&mut tx, 1).await.unwrap();
        item.n = 4;
        item.save(&mut tx).await.unwrap().commit(tx).await.unwrap();

        let mut tx = db.pool.begin().await.unwrap();
        let one: Option<(i64, i64, i64)> =
            RowLock::table("t_items").by("id", 1_i64).fetch_optional(&mut tx).await.unwrap();
        assert_eq!(one, Some((1, 4, 2)));
        NamedLock::new("k").lock(&mut tx).await.unwrap();
        // As a function takes it.
        let lent: &mut Transaction<'_, _> = &mut tx;
        let row = || RowLock::table("t_items").by("id", 1_i64);
        assert_eq!(row().lock(&mut **lent).await.unwrap(), 1);
        assert_eq!(row().lock(&mut *lent).await.unwrap(), 1);
        assert_eq!(row().lock(lent).await.unwrap(), 1);
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT SUM(version) FROM t_items").await, Some(4));
        db.assert_nothing_left().await;
    }

    async fn a_connection_of_a_pool_is_taken_as_it_is<S>(db: TestDb<S>) {
        items(&db).await;
        let mut conn = db.pool.acquire().await.unwrap();
        let mut item = Item::load(&mut conn, 1).await.unwrap();
        item.save(&mut conn).await.map(drop).unwrap();
        let bumped = VersionedRow::table("t_items").by("id", 1_i64).expected(2).bump(&mut conn).await.unwrap();
        assert_eq!(bumped.committed(), Some(&3.into()));
        let refused = RowLock::table("t_items").by("id", 1_i64).lock(&mut conn).await;
        assert!(matches!(refused, Err(Error::InvalidOption { option: "row lock", .. })), "{refused:?}");
    }
}
