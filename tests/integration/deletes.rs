//! Rows that are deleted only if nobody changed them since they were read.

use lockkit::{Error, Version, VersionedRow, VersionedStruct};
use sqlx::Connection;
use support::{JoinSet, Server, TestDb, on_every_database};

#[derive(Debug, Clone, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key("shop", "id"))]
struct Item {
    shop: String,
    id: i64,
    n: i64,
    version: i64,
}

async fn items<S: support::Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t_items (shop VARCHAR(9), id BIGINT, n BIGINT, version BIGINT, PRIMARY KEY (shop, id))")
        .await;
    db.execute("INSERT INTO t_items VALUES ('a', 1, 5, 1), ('a', 2, 6, 1), ('b', 1, 7, 1)").await;
}

async fn left<S: support::Backend>(db: &TestDb<S>) -> Option<i64> {
    db.fetch_i64("SELECT SUM(n) FROM t_items").await
}

fn conflict(err: Error) -> (Option<Version>, Option<Version>) {
    let Error::Conflict { table, expected, found, .. } = err else { panic!("{err:?}") };
    assert_eq!(table.unwrap(), "t_items");
    (expected, found)
}

on_every_database! {
    async fn a_row_that_nobody_changed_is_deleted_alone<S>(db: TestDb<S>) {
        items(&db).await;
        let item = Item::load(&db.pool, "a", 1).await.unwrap();
        item.delete(&db.pool).await.unwrap();
        assert_eq!(left(&db).await, Some(13));

        let mut conn = db.connect().await;
        VersionedStruct::delete(&Item::load(&mut conn, "a", 2).await.unwrap(), &mut conn).await.unwrap();
        assert_eq!(left(&db).await, Some(7));
        db.assert_nothing_left().await;
    }

    async fn a_row_that_somebody_changed_or_deleted_is_not_deleted<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Item::load(&db.pool, "a", 1).await.unwrap();
        let stale = item.clone();
        item.save(&db.pool).await.unwrap();
        let refused = stale.delete(&db.pool).await.unwrap_err();
        assert!(refused.is_conflict() && lockkit::is_retryable(&refused));
        assert_eq!(conflict(refused), (Some(Version::Number(1)), Some(Version::Number(2))));
        assert_eq!(left(&db).await, Some(18));

        item.delete(&db.pool).await.unwrap();
        assert_eq!(conflict(item.delete(&db.pool).await.unwrap_err()), (Some(Version::Number(2)), None));
        assert_eq!(conflict(item.save(&db.pool).await.map(drop).unwrap_err()), (Some(Version::Number(2)), None));
    }

    async fn a_delete_that_is_rolled_back_leaves_row_and_struct_as_they_were<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Item::load(&db.pool, "a", 1).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        item.delete(&mut *tx).await.unwrap();
        assert_eq!(conflict(item.delete(&mut *tx).await.unwrap_err()), (Some(Version::Number(1)), None));
        tx.rollback().await.unwrap();
        assert_eq!(left(&db).await, Some(18));
        item.n = 4;
        item.save(&db.pool).await.unwrap();
        assert_eq!((item.version, left(&db).await), (2, Some(17)));

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        item.delete(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        item.delete(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(left(&db).await, Some(13));
        db.assert_nothing_left().await;
    }

    async fn a_struct_that_was_saved_is_deleted_in_the_same_transaction<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Item::load(&db.pool, "a", 1).await.unwrap();
        let mut other = Item::load(&db.pool, "a", 2).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap().and(other.save(&mut *tx).await.unwrap());
        let saved = saved.delete(&mut *tx).await.unwrap();
        saved.commit(tx).await.unwrap();
        assert_eq!((item.version, other.version, left(&db).await), (1, 2, Some(13)));
        assert_eq!(conflict(item.save(&db.pool).await.map(drop).unwrap_err()), (Some(Version::Number(1)), None));

        // Not where the transaction that saved it was rolled back.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        let saved = other.save(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        let refused = saved.delete(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "expected", .. }), "{refused:?}");
        tx.rollback().await.unwrap();
        assert_eq!((other.version, left(&db).await), (2, Some(13)));
    }

    async fn a_versioned_row_is_deleted_by_the_version_that_was_read<S>(db: TestDb<S>) {
        items(&db).await;
        let row = || VersionedRow::table("t_items").by("shop", "a").by("id", 1_i64);
        let mut conn = db.connect().await;
        let refused = row().expected(2).delete(&mut conn).await.unwrap_err();
        assert_eq!(conflict(refused), (Some(Version::Number(2)), Some(Version::Number(1))));
        let refused = row().delete(&mut conn).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "expected", .. }), "{refused:?}");

        // Also by the version of this transaction.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = row().expected(1).bump(&mut *tx).await.unwrap();
        row().expected(bumped).delete(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        row().expected(1).delete(&mut conn).await.unwrap();
        assert_eq!(conflict(row().expected(1).delete(&mut conn).await.unwrap_err()), (Some(Version::Number(1)), None));
        assert_eq!(left(&db).await, Some(13));
    }

    async fn a_row_whose_version_is_a_timestamp_is_deleted_by_it<S>(db: TestDb<S>) {
        let kind = match S::NAME {
            "PostgreSQL" => "timestamptz",
            "SQLite" => "TEXT",
            _ => "DATETIME(6)",
        };
        db.execute(&format!("CREATE TABLE t_times (id BIGINT PRIMARY KEY, changed {kind})")).await;
        db.execute("INSERT INTO t_times VALUES (1, '2026-01-02 03:04:05.678901'), (2, '2026-01-02 \
                    03:04:05.678902')").await;
        let row = |id: i64| VersionedRow::table("t_times").by("id", id).version("changed");
        let mut conn = db.connect().await;
        let version = async |conn: &mut _| row(1).read::<()>(conn).await.unwrap().version;
        let read = version(&mut conn).await;
        let refused = row(2).expected(read.clone()).delete(&mut conn).await.unwrap_err();
        assert!(refused.is_conflict(), "{refused:?}");
        row(1).expected(read).delete(&mut conn).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT SUM(id) FROM t_times").await, Some(2));
    }

    async fn of_many_deletes_and_saves_at_the_same_time_one_wins<S>(db: TestDb<S>) {
        items(&db).await;
        let item = Item::load(&db.pool, "a", 1).await.unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..12 {
            let (pool, mut item) = (db.pool.clone(), item.clone());
            tasks.spawn(async move {
                let done = if task % 2 == 0 { item.delete(&pool).await } else { item.save(&pool).await.map(drop) };
                match done {
                    Ok(()) => 1,
                    Err(err) => {
                        assert!(err.is_conflict(), "{err:?}");
                        0
                    }
                }
            });
        }
        assert_eq!(tasks.join_all().await.into_iter().sum::<i32>(), 1);
    }
}
