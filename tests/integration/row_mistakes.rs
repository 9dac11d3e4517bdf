//! Row locks and versions of what cannot be locked or found: views, NULL, a column named twice.

use lockkit::{Error, PlanCheck, RowLock, VersionedRow, Wait};
use support::{TestDb, on_databases, on_every_database};

fn option(refused: &Error) -> &'static str {
    let Error::InvalidOption { option, .. } = refused else { panic!("{refused:?}") };
    option
}

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_keys", key = "id")]
struct Keyed {
    id: Option<i64>,
    version: i64,
}

on_every_database! {
    async fn null_is_no_value_to_find_a_row_by<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_keys (id BIGINT, version BIGINT)").await;
        db.execute("CREATE INDEX by_id ON t_keys (id)").await;
        db.execute("INSERT INTO t_keys VALUES (NULL, 1), (1, 1)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = RowLock::table("t_keys").by("id", None::<i64>).lock(&mut *tx).await.unwrap_err();
        assert_eq!(option(&refused), "by");
        assert!(refused.to_string().contains("`id` with NULL"), "{refused}");
        let refused = RowLock::table("t_keys").by_any("id", [Some(1_i64), None]).lock(&mut *tx).await.unwrap_err();
        assert_eq!(option(&refused), "by_any");
        let refused = VersionedRow::table("t_keys").by("id", None::<i64>).expected(1).bump(&mut *tx).await.unwrap_err();
        assert_eq!(option(&refused), "by");
        let refused = Keyed::load(&mut *tx, None::<i64>).await.unwrap_err();
        assert_eq!(option(&refused), "by");
        let refused = Keyed { id: None, version: 1 }.save(&mut *tx).await.map(drop).unwrap_err();
        assert_eq!(option(&refused), "key");
        // An `Option` that has a value is as good as the value.
        assert_eq!(RowLock::table("t_keys").by("id", Some(1_i64)).lock(&mut *tx).await.unwrap(), 1);
        assert_eq!(RowLock::table("t_keys").by_any("id", [Some(1_i64)]).lock(&mut *tx).await.unwrap(), 1);
        tx.rollback().await.unwrap();
    }

    async fn a_column_that_is_named_twice_is_refused<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_twice (id BIGINT PRIMARY KEY, version BIGINT)").await;
        db.execute("INSERT INTO t_twice VALUES (1, 1), (2, 1)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let lock = || RowLock::table("t_twice").by("id", 1_i64);
        for lock in [lock().by("id", 2_i64), lock().by_any("id", [1_i64, 2])] {
            let refused = lock.lock(&mut *tx).await.unwrap_err();
            assert_eq!(option(&refused), "by");
            assert!(refused.to_string().contains("`by_any(\"id\", …)`"), "{refused}");
        }
        let twice = VersionedRow::table("t_twice").by("id", 1_i64).by("id", 2_i64);
        assert_eq!(option(&twice.expected(1).bump(&mut *tx).await.unwrap_err()), "by");
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [postgres, sqlite]

    async fn a_view_is_refused_as_a_view<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_seen (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t_seen VALUES (1, 1), (2, 2)").await;
        db.execute("CREATE VIEW v_seen AS SELECT * FROM t_seen").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for column in ["id", "n"] {
            let refused = RowLock::table("v_seen").by(column, 1_i64).lock(&mut *tx).await.unwrap_err();
            assert_eq!(option(&refused), "table");
            assert_eq!(
                refused.to_string(),
                "`table` names the view `v_seen`, which cannot be locked; lock the rows of the table that it reads"
            );
        }
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [postgres]

    async fn a_view_is_locked_with_the_check_off<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_seen (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t_seen VALUES (1, 1), (2, 2)").await;
        db.execute("CREATE VIEW v_seen AS SELECT * FROM t_seen").await;
        for check in [PlanCheck::Off, PlanCheck::Warn] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let lock = RowLock::table("v_seen").by("id", 1_i64).check_plan(check);
            assert_eq!(lock.lock(&mut *tx).await.unwrap(), 1);
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            let contended = RowLock::table("t_seen").by("id", 1_i64).wait(Wait::Never).lock(&mut *other).await;
            assert!(contended.is_err_and(|it| it.is_contended()));
            tx.rollback().await.unwrap();
        }
    }
}

on_databases! {
    [mariadb, mysql]

    async fn a_view_that_the_server_computes_first_is_refused_as_a_view<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_summed (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t_summed VALUES (1, 1), (2, 2)").await;
        db.execute("CREATE VIEW v_summed AS SELECT n, SUM(id) AS total FROM t_summed GROUP BY n").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for column in ["n", "total"] {
            let refused = RowLock::table("v_summed").by(column, 1_i64).lock(&mut *tx).await.unwrap_err();
            assert_eq!(option(&refused), "table");
            assert!(refused.to_string().contains("names the view `v_summed`, which cannot be locked"), "{refused}");
        }
        tx.rollback().await.unwrap();
    }
}
