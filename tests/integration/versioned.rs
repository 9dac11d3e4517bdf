//! `#[derive(Versioned)]`: structs that are saved only if nobody else saved them first, on every database.

use lockkit::{Error, RetryPolicy, Version};
use sqlx::{Connection, Pool};
use support::{Backend, JoinSet, Server, TestDb, on_every_database};

#[derive(Debug, Clone, PartialEq, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id", version = "version")]
struct Article {
    item_id: i64,
    stock: i64,
    name: String,
    note: Option<String>,
    price: Option<i32>,
    version: i64,
}

const TABLE: &str = "CREATE TABLE t_items (item_id BIGINT NOT NULL PRIMARY KEY, stock BIGINT NOT NULL, name \
                     VARCHAR(99) NOT NULL, note VARCHAR(99), price INT, version BIGINT NOT NULL)";

/// With item 7, of which there are 5, at version 1, and item 8.
async fn items<S: Backend>(db: &TestDb<S>) {
    db.execute(TABLE).await;
    db.execute("INSERT INTO t_items VALUES (7, 5, 'seven', NULL, 100, 1), (8, 6, 'eight', 'x', NULL, 1)").await;
}

/// What is committed, and by whom.
async fn stored<S: Backend>(db: &TestDb<S>) -> (Option<i64>, Option<i64>) {
    (
        db.fetch_i64("SELECT stock FROM t_items WHERE item_id = 7").await,
        db.fetch_i64("SELECT version FROM t_items WHERE item_id = 7").await,
    )
}

fn conflict_of(err: Error) -> (Option<Version>, Option<Version>) {
    let Error::Conflict { table, expected, found, .. } = err else { panic!("{err:?}") };
    assert_eq!(table.unwrap(), "t_items");
    (expected, found)
}

#[expect(clippy::unnecessary_wraps, reason = "as errors carry it")]
const fn number(number: i64) -> Option<Version> {
    Some(Version::Number(number))
}

on_every_database! {
    async fn what_is_saved_is_what_is_loaded<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();
        assert_eq!((item.stock, item.note.as_deref(), item.price, item.version), (5, None, Some(100), 1));
        item.stock = 4;
        item.name = "söven'; --".to_owned();
        item.note = Some(String::new());
        item.price = None;
        item.save(&db.pool).await.unwrap();
        assert_eq!(item.version, 2);
        assert_eq!(Article::load(&db.pool, 7).await.unwrap(), item);
        // On a connection too, and when nothing has changed.
        let mut conn = db.pool.acquire().await.unwrap();
        let _ = item.save(&mut *conn).await.unwrap();
        assert_eq!(item.version, 3);
        assert_eq!(Article::load(&mut *conn, 7).await.unwrap(), item);
        assert_eq!(db.fetch_i64("SELECT SUM(stock * 10 + version) FROM t_items WHERE item_id = 8").await, Some(61));
    }

    async fn a_reader_of_an_older_version_does_not_save<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();
        let mut stale = item.clone();
        item.stock = 4;
        item.save(&db.pool).await.unwrap();
        stale.stock = 100;
        let conflict = stale.save(&db.pool).await.unwrap_err();
        assert!(lockkit::is_retryable(&conflict));
        assert_eq!(conflict_of(conflict), (number(1), number(2)));
        assert_eq!(stale.version, 1);
        assert_eq!(stored(&db).await, (Some(4), Some(2)));

        db.execute("DELETE FROM t_items WHERE item_id = 7").await;
        assert_eq!(conflict_of(item.save(&db.pool).await.unwrap_err()), (number(2), None));
        let missing = Article::load(&db.pool, 7).await.unwrap_err();
        assert!(matches!(&missing, Error::NoSuchRow { table, .. } if *table == "t_items"), "{missing:?}");
        db.assert_nothing_left().await;
    }

    async fn savers_at_the_same_time_lose_no_update<S>(db: TestDb<S>) {
        items(&db).await;
        let mut tasks = JoinSet::new();
        for task in 0..16 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                for _ in 0..50 {
                    let attempt = |_| async {
                        let mut item = Article::load(&pool, 7).await?;
                        item.stock += 1;
                        item.note = Some(format!("task {task}"));
                        item.save(&pool).await?;
                        Ok::<_, Error>(())
                    };
                    RetryPolicy::new().attempts(100_000).retry(attempt).await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(stored(&db).await, (Some(5 + 800), Some(1 + 800)));
    }

    async fn a_struct_has_its_new_version_with_the_commit<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();
        let mut other = Article::load(&db.pool, 8).await.unwrap();

        // Saved twice, and together with another one.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        item.stock = 4;
        let mut saved = item.save(&mut *tx).await.unwrap();
        assert_eq!(saved.version, 1);
        saved.stock = 3;
        let saved = saved.save(&mut *tx).await.unwrap();
        let saved = saved.and(other.save(&mut *tx).await.unwrap());
        saved.commit(tx).await.unwrap();
        assert_eq!((item.version, other.version), (3, 2));
        assert_eq!(Article::load(&db.pool, 7).await.unwrap(), item);
        item.save(&db.pool).await.unwrap();

        // In a transaction of sqlx.
        let mut tx = db.pool.begin().await.unwrap();
        item.save(&mut *tx).await.unwrap().commit(tx).await.unwrap();
        assert_eq!(item.version, 5);

        // A commit that it had no part in leaves it where it was, and nothing is overwritten.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let _ = item.save(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(conflict_of(item.save(&db.pool).await.unwrap_err()), (number(5), number(6)));
    }

    async fn a_version_that_was_rolled_back_was_never_in_memory<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let _ = item.save(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        assert_eq!(item.version, 1);

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        drop(tx);
        drop(saved);
        db.assert_nothing_left().await;
        assert_eq!(item.version, 1);

        // A savepoint, in a transaction that commits.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        let _ = item.save(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        assert_eq!(item.version, 1);
        item.save(&mut *tx).await.unwrap().commit(tx).await.unwrap();
        assert_eq!(item.version, 2);

        // Nobody vouches for what was saved in a savepoint.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        let saved = item.save(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        let refused = saved.commit(tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "commit", .. }), "{refused:?}");
        assert_eq!(item.version, 2);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        let saved = item.save(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        let refused = saved.save(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "expected", .. }), "{refused:?}");
        drop(tx);

        item.save(&db.pool).await.unwrap();
        assert_eq!((item.version, stored(&db).await), (3, (Some(5), Some(3))));
    }

    async fn a_version_whose_commit_failed_was_never_in_memory<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        item.stock = 1;
        let saved = item.save(&mut *tx).await.unwrap();
        // The database ends the transaction behind everybody's back.
        S::execute(&mut tx, "ROLLBACK").await.unwrap();
        let failed = saved.commit(tx).await.unwrap_err();
        assert!(matches!(failed, Error::TransactionEnded { .. }), "{failed:?}");
        assert_eq!((item.version, stored(&db).await), (1, (Some(5), Some(1))));
        item.save(&db.pool).await.unwrap();
        assert_eq!((item.version, stored(&db).await), (2, (Some(1), Some(2))));
    }

    async fn a_number_that_was_rolled_back_and_given_to_others_is_a_conflict<S>(db: TestDb<S>) {
        items(&db).await;
        let mut item = Article::load(&db.pool, 7).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        item.stock = 1;
        // Version 2 here, and rolled back …
        let _ = item.save(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        // … and version 2 of somebody else, with other content.
        let mut theirs = Article::load(&db.pool, 7).await.unwrap();
        theirs.stock = 50;
        theirs.save(&db.pool).await.unwrap();
        assert_eq!(theirs.version, 2);

        assert_eq!(conflict_of(item.save(&db.pool).await.unwrap_err()), (number(1), number(2)));
        assert_eq!(stored(&db).await, (Some(50), Some(2)));
    }

    async fn keys_of_several_columns_and_other_names_work<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_rows (tenant VARCHAR(20) NOT NULL, id INT NOT NULL, kind VARCHAR(9), twice BIGINT, \
                    revision SMALLINT NOT NULL, PRIMARY KEY (tenant, id))").await;
        db.execute("INSERT INTO t_rows VALUES ('a', 1, 'x', 2, 1), ('b', 1, 'y', 2, 1)").await;
        let mut row = Row::<String>::load(&db.pool, "b", 1).await.unwrap();
        assert_eq!((row.number, row.r#type.as_str(), row.twice), (1, "y", 2));
        row.r#type = "z".to_owned();
        // What is skipped is not written.
        row.twice = 100;
        row.save(&db.pool).await.unwrap();
        assert_eq!(row.revision, 2);
        assert_eq!(
            db.fetch_text("SELECT kind FROM t_rows WHERE tenant = 'b' AND twice = 2").await.as_deref(),
            Some("z")
        );
        assert_eq!(db.fetch_text("SELECT kind FROM t_rows WHERE tenant = 'a'").await.as_deref(), Some("x"));

        // A version that the field has no room for is not written.
        db.execute("UPDATE t_rows SET revision = 32767").await;
        let mut row = Row::<String>::load(&db.pool, "b", 1).await.unwrap();
        let full = row.save(&db.pool).await.unwrap_err();
        assert!(matches!(full, Error::InvalidOption { option: "version", .. }), "{full:?}");
        assert_eq!((row.revision, db.fetch_i64("SELECT MAX(revision) FROM t_rows").await), (i16::MAX, Some(32767)));
    }

    async fn a_save_that_waits_for_a_lock_and_is_dropped_gives_its_place_in_the_pool_back<S>(db: TestDb<S>) {
        items(&db).await;
        let pool: Pool<_> = db.pool_of(1).await;
        let mut item = Article::load(&pool, 7).await.unwrap();
        let mut other = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut other, "UPDATE t_items SET stock = 9 WHERE item_id = 7").await.unwrap();
        let waited = tokio::time::timeout(std::time::Duration::from_millis(100), item.save(&pool)).await;
        assert!(waited.is_err());
        drop(waited);
        let free = tokio::time::timeout(std::time::Duration::from_secs(4), pool.acquire()).await;
        drop(free.expect("a place in the pool").unwrap());
        other.rollback().await.unwrap();
        assert_eq!(item.version, 1);
        db.assert_nothing_left().await;
    }
}

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_rows", key("tenant", "id"), version = "revision")]
struct Row<T> {
    tenant: String,
    #[sqlx(rename = "id")]
    number: i32,
    #[sqlx(rename = "kind")]
    r#type: T,
    #[versioned(skip)]
    twice: i64,
    revision: i16,
}
