//! Values of different types for one column, on one connection.

use lockkit::{Error, PlanCheck, RowLock, Version, Versioned, VersionedRow};
use support::{Backend, TestDb, on_databases, on_every_database};

/// The number whose bits are those of `7.0`.
const LIKE_SEVEN: i64 = 0x401C_0000_0000_0000;

#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Row {
    id: i64,
    n: i64,
}

/// A struct of a type as wide as its integer.
macro_rules! of_width {
    ($name:ident, $integer:ty) => {
        #[derive(Debug, lockkit::Versioned)]
        #[versioned(table = "t", key = "id")]
        struct $name {
            id: $integer,
            n: $integer,
            version: i64,
        }
    };
}

of_width!(Short, i16);
of_width!(Middle, i32);
of_width!(Wide, i64);

async fn rows<S: Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT, version BIGINT NOT NULL)").await;
    db.execute(&format!("INSERT INTO t VALUES (1, 10, 1), (7, 70, 1), ({LIKE_SEVEN}, 80, 1)")).await;
}

on_every_database! {
    async fn a_row_is_locked_by_integers_of_any_width_in_any_order<S>(db: TestDb<S>) {
        rows(&db).await;
        let lock = || RowLock::table("t");
        for first in 0..3 {
            let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
            for width in (first..3).chain(0..first) {
                let by = || match width {
                    0 => (lock().by("id", 7_i16), lock().by_any("id", [1_i16, 7])),
                    1 => (lock().by("id", 7_i32), lock().by_any("id", [1_i32, 7])),
                    _ => (lock().by("id", 7_i64), lock().by_any("id", [1_i64, 7])),
                };
                assert_eq!(by().0.lock(&mut *tx).await.unwrap(), 1);
                assert_eq!(by().0.wait(std::time::Duration::from_secs(9)).lock(&mut *tx).await.unwrap(), 1);
                assert_eq!(by().0.fetch_one::<Row>(&mut *tx).await.unwrap(), Row { id: 7, n: 70 });
                assert_eq!(by().1.lock(&mut *tx).await.unwrap(), 2);
                let found: Vec<Row> = by().1.fetch_all(&mut *tx).await.unwrap();
                assert_eq!(found, [Row { id: 1, n: 10 }, Row { id: 7, n: 70 }]);
            }
            tx.commit().await.unwrap();
        }
    }

    async fn two_types_of_one_width_are_not_taken_for_each_other<S>(db: TestDb<S>) {
        rows(&db).await;
        for real_first in [true, false] {
            let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
            for real in [real_first, !real_first] {
                let lock = RowLock::table("t");
                // PostgreSQL compares every row with a real number, which the plan check refuses.
                let lock = if real { lock.by("id", 7.0_f64).check_plan(PlanCheck::Off) } else { lock.by("id", 7_i64) };
                assert_eq!(lock.fetch_one::<Row>(&mut *tx).await.unwrap(), Row { id: 7, n: 70 }, "real: {real}");
                let row = VersionedRow::table("t");
                let row = if real { row.by("id", 7.0_f64) } else { row.by("id", 7_i64) };
                assert_eq!(row.read::<Row>(&mut *tx).await.unwrap().row, Row { id: 7, n: 70 }, "real: {real}");
            }
            tx.commit().await.unwrap();
        }
    }

    async fn a_version_is_read_and_moved_by_integers_of_any_width_in_any_order<S>(db: TestDb<S>) {
        rows(&db).await;
        let mut version = 1;
        for first in 0..3 {
            let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
            for width in (first..3).chain(0..first) {
                let row = || match width {
                    0 => VersionedRow::table("t").by("id", 7_i16),
                    1 => VersionedRow::table("t").by("id", 7_i32),
                    _ => VersionedRow::table("t").by("id", 7_i64),
                };
                let found: Versioned<Row> = row().read(&mut *tx).await.unwrap();
                assert_eq!((found.n, found.version), (70, Version::Number(version)));
                let conflict = row().expected(version + 1).bump(&mut *tx).await.unwrap_err();
                assert!(conflict.is_conflict(), "{conflict:?}");
                row().expected(version).bump(&mut *tx).await.unwrap();
                version += 1;
            }
            tx.commit().await.unwrap();
        }
    }

    async fn structs_with_fields_of_any_width_are_saved_in_any_order<S>(db: TestDb<S>) {
        rows(&db).await;
        let mut version = 1;
        for first in 0..3 {
            let mut conn = db.pool_of(1).await.acquire().await.unwrap();
            for width in (first..3).chain(0..first) {
                let n = 100 + width;
                match width {
                    0 => drop(Short { id: 7, n: 100, version }.save(&mut *conn).await.unwrap()),
                    1 => drop(Middle { id: 7, n: 101, version }.save(&mut *conn).await.unwrap()),
                    _ => drop(Wide { id: 7, n: 102, version }.save(&mut *conn).await.unwrap()),
                }
                version += 1;
                let found = RowLock::table("t").by("id", 7_i64);
                let mut tx = lockkit::begin(&db.pool).await.unwrap();
                assert_eq!(found.fetch_one::<Row>(&mut *tx).await.unwrap(), Row { id: 7, n });
                tx.rollback().await.unwrap();
            }
        }
        assert_eq!(db.fetch_i64("SELECT version FROM t WHERE id = 7").await, Some(version));
    }

    async fn a_value_that_may_be_missing_is_like_one_that_may_not<S>(db: TestDb<S>) {
        rows(&db).await;
        let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
        let lock = || RowLock::table("t");
        for _ in 0..2 {
            for none in [lock().by("id", None::<i32>), lock().by("id", None::<i64>)] {
                assert!(matches!(none.lock(&mut *tx).await, Err(Error::InvalidOption { option: "by", .. })));
            }
            for some in [lock().by("id", Some(7_i64)), lock().by("id", 7_i32), lock().by("id", Some(7_i16))] {
                assert_eq!(some.lock(&mut *tx).await.unwrap(), 1);
            }
        }
        tx.commit().await.unwrap();
    }
}

#[derive(Debug, Clone, Copy, sqlx::Type)]
#[sqlx(type_name = "mood", rename_all = "lowercase")]
enum Mood {
    Glad,
}

#[derive(Debug, Clone, Copy, sqlx::Type)]
#[sqlx(type_name = "\"a */ b\"", rename_all = "lowercase")]
enum Odd {
    Glad,
}

on_databases! {
    [postgres]
    async fn types_of_ones_own_are_told_apart_by_their_names<S>(db: TestDb<S>) {
        db.execute("CREATE TYPE mood AS ENUM ('glad', 'sad')").await;
        db.execute("CREATE TYPE \"a */ b\" AS ENUM ('glad')").await;
        db.execute("CREATE TABLE t_moods (mood mood PRIMARY KEY, odd \"a */ b\" UNIQUE)").await;
        db.execute("INSERT INTO t_moods VALUES ('sad', NULL), ('glad', 'glad')").await;
        let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
        for _ in 0..2 {
            assert_eq!(RowLock::table("t_moods").by("mood", Mood::Glad).lock(&mut *tx).await.unwrap(), 1);
            assert_eq!(RowLock::table("t_moods").by("odd", Odd::Glad).lock(&mut *tx).await.unwrap(), 1);
        }
        tx.commit().await.unwrap();
    }
}
