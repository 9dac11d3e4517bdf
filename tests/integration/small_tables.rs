//! Row locks on tables so small that an optimizer would rather read all of them.

use lockkit::{Error, RowLock, Wait};
use sqlx::Row;
use support::{Backend, Server, TestDb, on_databases, on_every_server};

const SIZES: [i64; 8] = [3, 4, 5, 8, 13, 20, 40, 200];

/// Makes the table with so many rows, which `values` prints, and lets the optimizer know of them.
async fn table<S: Backend>(db: &TestDb<S>, name: &str, columns: &str, size: i64, values: fn(i64) -> String) {
    db.execute(&format!("CREATE TABLE {name} ({columns})")).await;
    let rows: Vec<_> = (1..=size).map(values).collect();
    db.execute(&format!("INSERT INTO {name} VALUES {}", rows.join(", "))).await;
    if S::NAME != "PostgreSQL" {
        db.fetch_text(&format!("ANALYZE TABLE {name}")).await;
    }
}

on_every_server! {
    async fn several_rows_of_a_small_table_are_locked_and_those_of_others_are_not<S>(db: TestDb<S>) {
        for size in SIZES {
            // One with a column outside of every index, one without, and one with an index beside the key.
            let tables = [
                (
                    format!("t_plain_{size}"),
                    "id BIGINT PRIMARY KEY, n BIGINT, name VARCHAR(20)",
                    (|it| format!("({it}, {it}, 'x')")) as fn(i64) -> String,
                ),
                (format!("t_pairs_{size}"), "id BIGINT, n BIGINT, PRIMARY KEY (id, n)", |it| format!("({it}, {it})")),
                (format!("t_beside_{size}"), "n BIGINT PRIMARY KEY, id BIGINT UNIQUE, name TEXT", |it| {
                    format!("({it}, {it}, 'x')")
                }),
            ];
            for (name, columns, values) in tables {
                table(&db, &name, columns, size, values).await;
                // Checked by one value before, and held.
                let mut theirs = lockkit::begin(&db.pool).await.unwrap();
                assert_eq!(RowLock::table(&name).by("id", size).lock(&mut *theirs).await.unwrap(), 1);

                let mut ours = lockkit::begin(&db.pool).await.unwrap();
                for most in [2, size - 1] {
                    let lock = || RowLock::table(&name).by_any("id", 1..=most).wait(Wait::Never);
                    let locked = lock().lock(&mut *ours).await;
                    let locked = locked.unwrap_or_else(|err| panic!("{most} of {name}: {err:?}"));
                    assert_eq!(locked, u64::try_from(most).unwrap(), "{most} of {name}");
                    let missing = lock().fetch_all::<Found>(&mut *ours).await;
                    let found = missing.unwrap_or_else(|err| panic!("{most} of {name}: {err:?}"));
                    let found: Vec<_> = found.into_iter().map(|it| it.n).collect();
                    assert_eq!(found, (1..=most).collect::<Vec<_>>(), "{most} of {name}");
                }
                let contended = RowLock::table(&name).by_any("id", [1, size]).wait(Wait::Never).lock(&mut *ours).await;
                assert!(contended.as_ref().is_err_and(Error::is_contended), "{name}: {contended:?}");
                ours.rollback().await.unwrap();
                theirs.rollback().await.unwrap();
            }
        }
    }

    async fn a_table_that_has_become_small_is_not_scanned_either<S>(db: TestDb<S>) {
        let name = format!("t_shrunk_{}", S::NAME).to_lowercase();
        table(&db, &name, "id BIGINT PRIMARY KEY, n BIGINT", 500, |it| format!("({it}, {it})")).await;
        let lock = || RowLock::table(&name).by_any("id", [1_i64, 2]).wait(Wait::Never);
        let mut ours = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(lock().lock(&mut *ours).await.unwrap(), 2);
        ours.commit().await.unwrap();

        db.execute(&format!("DELETE FROM {name} WHERE id > 3")).await;
        if S::NAME != "PostgreSQL" {
            db.fetch_text(&format!("ANALYZE TABLE {name}")).await;
        }
        let mut theirs = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table(&name).by("id", 3_i64).lock(&mut *theirs).await.unwrap();
        let mut ours = lockkit::begin(&db.pool_of(1).await).await.unwrap();
        assert_eq!(lock().lock(&mut *ours).await.unwrap(), 2);
    }
}

#[derive(Debug, sqlx::FromRow)]
struct Found {
    n: i64,
}

on_databases! {
    [mariadb, mysql]
    async fn a_lock_whose_index_was_dropped_is_checked_anew<S>(db: TestDb<S>) {
        let name = format!("t_unindexed_{}", S::NAME).to_lowercase();
        table(&db, &name, "id BIGINT PRIMARY KEY, n BIGINT, spare INT", 5, |it| format!("({it}, {it}, 0)")).await;
        db.execute(&format!("CREATE INDEX by_n ON {name} (n)")).await;
        let (one, many) = (|| RowLock::table(&name).by("n", 1_i64), || RowLock::table(&name).by_any("n", [1_i64, 2]));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(one().lock(&mut *tx).await.unwrap(), 1);
        assert_eq!(many().lock(&mut *tx).await.unwrap(), 2);
        tx.commit().await.unwrap();

        // Under another name, and without a column that a lock may have read.
        db.execute(&format!("ALTER TABLE {name} DROP INDEX by_n, ADD INDEX by_n_again (n), DROP COLUMN spare")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(one().lock(&mut *tx).await.unwrap(), 1);
        assert_eq!(many().lock(&mut *tx).await.unwrap(), 2);
        tx.commit().await.unwrap();

        db.execute(&format!("DROP INDEX by_n_again ON {name}")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for refused in [one().lock(&mut *tx).await, many().lock(&mut *tx).await] {
            assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        }
        tx.rollback().await.unwrap();
    }

    async fn a_view_is_locked_as_its_table_is<S>(db: TestDb<S>) {
        let name = format!("t_viewed_{}", S::NAME).to_lowercase();
        table(&db, &name, "id BIGINT PRIMARY KEY, n BIGINT", 50, |it| format!("({it}, {it})")).await;
        db.execute(&format!("CREATE VIEW {name}_view AS SELECT * FROM {name}")).await;
        let lock = || RowLock::table(&format!("{name}_view"));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(lock().by("id", 1_i64).lock(&mut *tx).await.unwrap(), 1);
        assert_eq!(lock().by_any("id", [1_i64, 2]).lock(&mut *tx).await.unwrap(), 2);
        let refused = lock().by("n", 1_i64).lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [mariadb]
    async fn no_other_table_is_opened_to_check_a_plan<S>(db: TestDb<S>) {
        table(&db, "t_few", "id BIGINT PRIMARY KEY, n BIGINT", 4, |it| format!("({it}, {it})")).await;
        let keys: Vec<_> = (0..60).map(|it| format!("KEY by_n_{it} (n)")).collect();
        db.execute(&format!("CREATE TABLE t_other (n BIGINT, {})", keys.join(", "))).await;
        // A row in information_schema is written for each of them if their table is opened.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let before = rows_written(&mut tx).await;
        assert_eq!(RowLock::table("t_few").by_any("id", [1_i64, 2, 3]).lock(&mut *tx).await.unwrap(), 3);
        let written = rows_written(&mut tx).await - before;
        assert!(written < 60, "{written} rows were written");
        tx.rollback().await.unwrap();
    }
}

async fn rows_written(conn: &mut sqlx::MySqlConnection) -> i64 {
    let row = sqlx::query("SHOW SESSION STATUS LIKE 'Handler_tmp_write'").fetch_one(conn).await.unwrap();
    row.try_get::<String, _>(1).unwrap().parse().unwrap()
}
