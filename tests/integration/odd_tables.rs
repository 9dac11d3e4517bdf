//! Row locks on tables, indexes and values that are not plain: what is refused, and what is not.

use lockkit::{Error, RowLock, Wait};
use support::{Server, TestDb, on_databases, on_every_server};

on_databases! {
    [postgres, sqlite]

    async fn a_partial_index_that_served_one_value_is_not_believed_to_serve_another<S>(db: TestDb<S>) {
        let table = format!("t_values_{}", S::NAME).to_lowercase();
        db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, state VARCHAR(10) NOT NULL)")).await;
        db.execute(&format!("INSERT INTO {table} VALUES (1, 'ready'), (2, 'done')")).await;
        db.execute(&format!("CREATE INDEX ready_ones ON {table} (id) WHERE state = 'ready'")).await;
        let of = |state: &'static str| RowLock::table(&table).by("state", state).order_by("id");
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for _ in 0..2 {
            assert_eq!(of("ready").lock(&mut *tx).await.unwrap(), 1);
            let refused = of("done").lock(&mut *tx).await;
            assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        }
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [mariadb, mysql]

    async fn an_index_that_served_values_of_one_type_is_not_believed_to_serve_another<S>(db: TestDb<S>) {
        let table = format!("t_types_{}", S::NAME).to_lowercase();
        db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, code VARCHAR(10) NOT NULL, KEY by_code \
                             (code))")).await;
        db.execute(&format!("INSERT INTO {table} VALUES (1, '7'), (2, '8'), (3, '9')")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(RowLock::table(&table).by("code", "7").lock(&mut *tx).await.unwrap(), 1);
        let refused = RowLock::table(&table).by("code", 7_i64).lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [postgres]

    async fn an_index_that_cannot_look_up_the_value_does_not_serve<S>(db: TestDb<S>) {
        db.execute(
            "CREATE TABLE t_odd (id BIGINT, padded CHAR(8), name TEXT, doc JSONB, folded TEXT, n INT);
             CREATE INDEX ON t_odd (id);
             CREATE INDEX ON t_odd (padded);
             CREATE INDEX ON t_odd (name COLLATE \"C\");
             CREATE INDEX ON t_odd USING gin (doc);
             CREATE INDEX ON t_odd (lower(folded));
             INSERT INTO t_odd SELECT i, 'x' || i, 'x' || i, '{}', 'x' || i, i FROM generate_series(1, 100) AS i",
        )
        .await;
        db.execute("CREATE TABLE t_parent (id BIGINT PRIMARY KEY); CREATE TABLE t_child () INHERITS (t_parent); \
                    INSERT INTO t_child SELECT generate_series(1, 100)").await;
        let lock = || RowLock::table("t_odd");
        let locks = [
            lock().by("id", 7.0_f64),
            lock().by("padded", "x7"),
            lock().by("name", "x7"),
            lock().by("folded", "x7"),
            lock().by("doc", sqlx::types::Json(7)),
            lock().order_by("name").limit(1).skip_locked(),
            RowLock::table("t_parent").by("id", 7_i64),
            RowLock::table("t_parent").order_by("id").limit(1).skip_locked(),
        ];
        let mut wrong = Vec::new();
        for (n, lock) in locks.into_iter().enumerate() {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let refused = lock.lock(&mut *tx).await;
            if !matches!(refused, Err(Error::FullScan { .. })) { wrong.push((n, refused)); }
            tx.rollback().await.unwrap();
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    async fn an_index_that_looks_up_the_value_serves<S>(db: TestDb<S>) {
        db.execute(
            "CREATE DOMAIN natural_number AS INT CHECK (VALUE >= 0);
             CREATE TYPE mood AS ENUM ('ok', 'bad');
             CREATE TABLE t_good (gone INT, id INT, padded CHAR(8), name VARCHAR(9), n natural_number, price NUMERIC,
                at TIMESTAMPTZ, tags TEXT[], mood mood, twice INT GENERATED ALWAYS AS (id * 2) STORED,
                \"select\" BIGINT, \"Upper\" SMALLINT, hashed TEXT, pattern TEXT, folded TEXT, incl INT);
             ALTER TABLE t_good DROP COLUMN gone;
             CREATE INDEX ON t_good (id DESC); CREATE INDEX ON t_good (padded); CREATE INDEX ON t_good (name);
             CREATE INDEX ON t_good (n); CREATE INDEX ON t_good (price); CREATE INDEX ON t_good (tags);
             CREATE INDEX ON t_good (mood); CREATE INDEX ON t_good (twice); CREATE INDEX ON t_good (\"select\", id);
             CREATE INDEX ON t_good (\"Upper\"); CREATE INDEX ON t_good USING hash (hashed);
             CREATE INDEX ON t_good (pattern text_pattern_ops);
             CREATE INDEX ON t_good USING brin (incl);
             INSERT INTO t_good
                (id, padded, name, n, price, at, tags, mood, \"select\", \"Upper\", hashed, pattern, folded, incl)
                SELECT i, 'x' || i, 'x' || i, i, i, now(), ARRAY['a'], 'ok', i, i, 'x' || i, 'x' || i, 'x' || i, i
                FROM generate_series(1, 10) AS i;
             CREATE TABLE t_parts (id INT, name TEXT) PARTITION BY RANGE (id);
             CREATE TABLE t_parts_1 PARTITION OF t_parts FOR VALUES FROM (1) TO (6);
             CREATE TABLE t_parts_2 PARTITION OF t_parts FOR VALUES FROM (6) TO (60);
             CREATE INDEX ON t_parts (id);
             CREATE INDEX ON t_parts_1 (name); CREATE INDEX ON t_parts_2 (name);
             INSERT INTO t_parts SELECT i, 'x' || i FROM generate_series(1, 10) AS i",
        )
        .await;
        let lock = || RowLock::table("t_good");
        let locks = [
            lock().by("id", 7_i64),
            lock().by("id", 7_i16),
            lock().by("id", 7_i32),
            lock().by_any("id", [7_i64, 8]),
            lock().by("name", "x7"),
            lock().by("n", 7_i32),
            lock().by("n", 7_i64),
            lock().by("price", 7_i64),
            lock().by("tags", vec!["a"]),
            lock().by("twice", 14_i32),
            lock().by("select", 7_i64),
            lock().by("Upper", 7_i16),
            lock().by("hashed", "x7"),
            lock().by("pattern", "x7"),
            lock().by("incl", 7_i32),
            lock().order_by("id").limit(2).skip_locked(),
            lock().order_by("select").order_by("id").limit(2).skip_locked(),
            RowLock::table("t_parts").by("id", 7_i64),
            RowLock::table("t_parts").order_by("id").limit(1).skip_locked(),
            RowLock::table("t_parts").by("name", "x7"),
        ];
        let mut wrong = Vec::new();
        for (n, lock) in locks.into_iter().enumerate() {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let taken = lock.lock(&mut *tx).await;
            if taken.is_err() { wrong.push((n, taken)); }
            tx.rollback().await.unwrap();
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

on_every_server! {
    async fn a_row_that_was_passed_over_is_not_locked<S>(db: TestDb<S>) {
        let table = format!("t_skip_{}", S::NAME).to_lowercase();
        db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, n BIGINT NOT NULL)")).await;
        db.execute(&format!("CREATE INDEX by_n ON {table} (n)")).await;
        db.execute(&format!("INSERT INTO {table} VALUES (1, 10), (2, 9), (3, 8), (4, 7), (5, 6)")).await;
        let next = || RowLock::table(&table).order_by("n").limit(1).skip_locked().wait(Wait::Never);
        let mut t0 = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table(&table).by("id", 5_i64).lock(&mut *t0).await.unwrap();
        let mut t1 = lockkit::begin(&db.pool).await.unwrap();
        let got: Option<(i64, i64)> = next().fetch_optional(&mut *t1).await.unwrap();
        assert_eq!(got.unwrap().0, 4);
        t0.rollback().await.unwrap();
        let mut t2 = lockkit::begin(&db.pool).await.unwrap();
        let free = RowLock::table(&table).by("id", 5_i64).wait(Wait::Never).lock(&mut *t2).await;
        assert!(free.is_ok(), "{free:?}");
        t2.rollback().await.unwrap();
        let mut t2 = lockkit::begin(&db.pool).await.unwrap();
        let got: Option<(i64, i64)> = next().fetch_optional(&mut *t2).await.unwrap();
        // InnoDB keeps its lock of the entry in the index that led to the row.
        assert_eq!(got.unwrap().0, if S::NAME == "PostgreSQL" { 5 } else { 3 });
    }
}
