//! Row locks: what they lock, how long they wait, and what they refuse.

use std::time::{Duration, Instant};

use lockkit::{Error, NamedLock, PlanCheck, RowLock, Stock, Wait};
use sqlx::{ConnectOptions, Executor, sqlite::SqliteConnectOptions};
use support::{JoinSet, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::time::timeout;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Item {
    #[sqlx(rename = "item_id")]
    id: i64,
    shop: String,
    stock: i64,
}

fn item(id: i64, stock: i64) -> Item {
    Item { id, shop: "s".to_owned(), stock }
}

async fn items<S: support::Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t_items (item_id BIGINT PRIMARY KEY, shop VARCHAR(20) NOT NULL, stock BIGINT NOT NULL)")
        .await;
    db.execute("INSERT INTO t_items VALUES (1, 's', 10), (2, 's', 20), (3, 's', 30)").await;
}

on_every_database! {
    async fn a_locked_row_comes_back_and_can_be_written<S>(db: TestDb<S>) {
        items(&db).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let found: Item = RowLock::table("t_items").by("item_id", 2_i64).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(found, item(2, 20));
        S::execute(&mut tx, "UPDATE t_items SET stock = 19 WHERE item_id = 2").await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT stock FROM t_items WHERE item_id = 2").await, Some(19));
        db.assert_nothing_left().await;
    }

    async fn a_tx_itself_takes_every_lock_of_a_transaction<S>(db: TestDb<S>) {
        items(&db).await;
        let stock = Stock::new(db.pool.clone(), "sku");
        stock.put(5).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let row = || RowLock::table("t_items").by("item_id", 2_i64);
        assert_eq!(row().fetch_one::<Item>(&mut tx).await.unwrap(), item(2, 20));
        assert_eq!(row().wait(Wait::Unbounded).fetch_all::<Item>(&mut tx).await.unwrap(), [item(2, 20)]);
        assert_eq!(row().wait(Wait::Never).lock(&mut tx).await.unwrap(), 1);
        let missing = RowLock::table("t_items").by("item_id", 9_i64).fetch_optional::<Item>(&mut tx).await.unwrap();
        assert_eq!(missing, None);
        NamedLock::new("name").lock(&mut tx).await.unwrap();
        let _taken = stock.take_in(&mut tx, 2).await.unwrap();

        let others = async {
            let mut tx = lockkit::begin(&db.pool).await?;
            let locked = RowLock::table("t_items").by("item_id", 2_i64).wait(Wait::Never).lock(&mut tx).await;
            tx.rollback().await?;
            locked
        };
        // SQLite's other transaction does not even begin.
        assert!(!matches!(timeout(MILLIS(300), others).await, Ok(Ok(_))), "two have the row");
        tx.commit().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 3);
    }

    async fn no_row_is_an_error_for_lock_and_none_for_fetch_optional<S>(db: TestDb<S>) {
        items(&db).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let missing = || RowLock::table("t_items").by("item_id", 99_i64);
        assert!(matches!(missing().lock(&mut *tx).await, Err(Error::NoSuchRow { table, .. }) if table == "t_items"));
        assert!(matches!(missing().fetch_one::<Item>(&mut *tx).await, Err(Error::NoSuchRow { .. })));
        assert_eq!(missing().fetch_optional::<Item>(&mut *tx).await.unwrap(), None);
        assert_eq!(missing().fetch_all::<Item>(&mut *tx).await.unwrap(), []);

        let some = RowLock::table("t_items").by_any("item_id", [1_i64, 99]).lock(&mut *tx).await;
        assert!(matches!(some, Err(Error::NoSuchRow { .. })), "{some:?}");
        tx.rollback().await.unwrap();
    }

    async fn many_rows_are_locked_in_the_order_of_their_key<S>(db: TestDb<S>) {
        items(&db).await;
        let mut tx = db.pool.begin().await.unwrap();
        assert_eq!(RowLock::table("t_items").by_any("item_id", [3_i64, 1, 2, 3]).lock(&mut *tx).await.unwrap(), 3);
        let found: Vec<Item> =
            RowLock::table("t_items").by_any("item_id", [3_i64, 1]).by("shop", "s").fetch_all(&mut *tx).await.unwrap();
        assert_eq!(found, [item(1, 10), item(3, 30)]);
        let found: Vec<Item> =
            RowLock::table("t_items").by_any("item_id", [3_i64, 1, 2]).limit(2).fetch_all(&mut *tx).await.unwrap();
        assert_eq!(found, [item(1, 10), item(2, 20)]);
        tx.rollback().await.unwrap();
    }

    async fn composite_keys_and_text_keys_are_matched_whole<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE seats (hall VARCHAR(20), seat INT, taken INT, PRIMARY KEY (hall, seat))").await;
        db.execute("INSERT INTO seats VALUES ('a', 1, 0), ('a', 2, 0), ('b', 1, 0)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let seat = RowLock::table("seats").by("hall", "a").by("seat", 2_i32).lock(&mut *tx).await.unwrap();
        assert_eq!(seat, 1);
        let name = String::from("b");
        assert_eq!(RowLock::table("seats").by("hall", &name).by("seat", 1_i32).lock(&mut *tx).await.unwrap(), 1);
        tx.commit().await.unwrap();
    }

    async fn opposite_orders_from_two_sides_do_not_deadlock<S>(db: TestDb<S>) {
        items(&db).await;
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                for _ in 0..25 {
                    let wanted = if task % 2 == 0 { [1_i64, 2, 3] } else { [3, 2, 1] };
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    RowLock::table("t_items").by_any("item_id", wanted).lock(&mut *tx).await.unwrap();
                    S::execute(&mut tx, "UPDATE t_items SET stock = stock + 1").await.unwrap();
                    tx.commit().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT SUM(stock) FROM t_items").await, Some(60 + 3 * 8 * 25));
    }

    async fn a_lock_that_would_scan_is_refused_before_anything_is_locked<S>(db: TestDb<S>) {
        // A process remembers which statements an index serves, so each server's table has a name of its own here.
        let table = format!("t_scan_{}", S::NAME);
        db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, shop VARCHAR(20))").to_lowercase()).await;
        let table = table.to_lowercase();
        db.execute(&format!("INSERT INTO {table} VALUES (1, 's'), (2, 's'), (3, 's')")).await;
        let scan = || RowLock::table(&table).by("shop", "s");

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = scan().lock(&mut *tx).await.unwrap_err();
        assert!(matches!(&refused, Error::FullScan { table: of, plan, .. } if *of == *table && !plan.is_empty()));
        // The transaction is as good as before.
        assert_eq!(scan().check_plan(PlanCheck::Off).lock(&mut *tx).await.unwrap(), 3);
        assert_eq!(scan().check_plan(PlanCheck::Warn).lock(&mut *tx).await.unwrap(), 3);
        tx.commit().await.unwrap();

        db.execute(&format!("CREATE INDEX by_shop ON {table} (shop)")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(scan().lock(&mut *tx).await.unwrap(), 3, "an index serves, though the table is tiny");
        tx.commit().await.unwrap();
    }

    async fn a_value_that_no_index_can_look_up_does_not_hide_a_scan<S>(db: TestDb<S>) {
        let table = format!("t_null_{}", S::NAME).to_lowercase();
        db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, shop INT)")).await;
        db.execute(&format!("INSERT INTO {table} VALUES (1, 1), (2, 2)")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let _ = RowLock::table(&table).by("shop", None::<i32>).lock(&mut *tx).await;
        let ordered = RowLock::table(&table).by("shop", 1_i32).order_by("id").limit(1);
        let refused = ordered.lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        let refused = RowLock::table(&table).by("shop", 1_i32).lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        tx.rollback().await.unwrap();
    }

    async fn a_row_lock_outside_a_transaction_is_refused<S>(db: TestDb<S>) {
        items(&db).await;
        let mut conn = db.pool.acquire().await.unwrap();
        let refused = RowLock::table("t_items").by("item_id", 1_i64).lock(&mut *conn).await;
        assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{refused:?}");
    }

    async fn a_busy_row_is_contended_without_a_wait<S>(db: TestDb<S>) {
        items(&db).await;
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("t_items").by("item_id", 1_i64).lock(&mut *holder).await.unwrap();

        for wait in [Wait::Never, Wait::AtMost(MILLIS(250))] {
            let started = Instant::now();
            // On SQLite the lock is taken when the transaction first writes.
            let mut tx = db.pool.begin().await.unwrap();
            let refused = RowLock::table("t_items").by("item_id", 1_i64).wait(wait).lock(&mut *tx).await.unwrap_err();
            assert!(refused.is_contended(), "{wait:?}: {refused:?}");
            assert!(started.elapsed() < Duration::from_secs(4), "{wait:?} is bounded by the server");
            if let Wait::AtMost(bound) = wait {
                assert!(started.elapsed() >= bound);
            }
            tx.rollback().await.unwrap();
        }
        holder.commit().await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_every_server! {
    async fn a_bounded_wait_gets_the_row_when_it_is_freed_in_time<S>(db: TestDb<S>) {
        items(&db).await;
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("t_items").by("item_id", 1_i64).lock(&mut *holder).await.unwrap();
        S::execute(&mut holder, "UPDATE t_items SET stock = 9 WHERE item_id = 1").await.unwrap();
        let pool = db.pool.clone();
        let waiter = spawn(async move {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            let lock = RowLock::table("t_items").by("item_id", 1_i64).wait(Duration::from_secs(20));
            let found: Item = lock.fetch_one(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
            found
        });
        tokio::time::sleep(MILLIS(100)).await;
        holder.commit().await.unwrap();
        assert_eq!(waiter.await.unwrap(), item(1, 9), "what the holder committed is seen");
    }

    async fn a_bound_holds_for_its_statement_alone<S>(db: TestDb<S>) {
        items(&db).await;
        let setting = match S::NAME {
            "PostgreSQL" => "SELECT current_setting('lock_timeout')",
            "MariaDB" => "SELECT CONCAT(@@max_statement_time, '/', @@innodb_lock_wait_timeout)",
            _ => "SELECT CONCAT(@@max_execution_time, '/', @@innodb_lock_wait_timeout)",
        };
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let before = S::fetch_text(&mut tx, setting).await.unwrap();
        let bounded = || RowLock::table("t_items").wait(MILLIS(70));
        bounded().by("item_id", 1_i64).lock(&mut *tx).await.unwrap();
        bounded().by("item_id", 99_i64).fetch_optional::<Item>(&mut *tx).await.unwrap();
        assert_eq!(S::fetch_text(&mut tx, setting).await.unwrap(), before);
        tx.commit().await.unwrap();
    }

    async fn locked_rows_are_skipped_as_a_queue_wants<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_jobs (id BIGINT PRIMARY KEY, state VARCHAR(10) NOT NULL)").await;
        db.execute("CREATE INDEX t_jobs_state ON t_jobs (state, id)").await;
        db.execute("INSERT INTO t_jobs VALUES (1, 'new'), (2, 'new'), (3, 'new')").await;
        let next = || RowLock::table("t_jobs").by("state", "new").order_by("id").skip_locked().limit(1);

        let mut first = lockkit::begin(&db.pool).await.unwrap();
        let mut second = lockkit::begin(&db.pool).await.unwrap();
        let a: (i64, String) = next().fetch_one(&mut *first).await.unwrap();
        let b: (i64, String) = next().wait(MILLIS(500)).fetch_one(&mut *second).await.unwrap();
        assert_eq!((a.0, b.0), (1, 2));
        first.commit().await.unwrap();
        second.commit().await.unwrap();
    }

    async fn sharers_share_and_keep_writers_out<S>(db: TestDb<S>) {
        items(&db).await;
        let lock = || RowLock::table("t_items").by("item_id", 1_i64).wait(Wait::Never);
        let mut one = lockkit::begin(&db.pool).await.unwrap();
        let mut two = lockkit::begin(&db.pool).await.unwrap();
        lock().share().lock(&mut *one).await.unwrap();
        lock().share().lock(&mut *two).await.unwrap();
        let mut writer = lockkit::begin(&db.pool).await.unwrap();
        assert!(lock().lock(&mut *writer).await.unwrap_err().is_contended());
        for tx in [one, two, writer] {
            tx.rollback().await.unwrap();
        }
        let mut writer = lockkit::begin(&db.pool).await.unwrap();
        lock().for_key_change().lock(&mut *writer).await.unwrap();
        writer.commit().await.unwrap();
    }

    async fn a_waiter_that_is_dropped_frees_its_place_in_the_pool<S>(db: TestDb<S>) {
        items(&db).await;
        let pool = db.pool_of(1).await;
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("t_items").by("item_id", 1_i64).lock(&mut *holder).await.unwrap();

        let waiting = async {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            RowLock::table("t_items").by("item_id", 1_i64).lock(&mut *tx).await
        };
        timeout(MILLIS(200), waiting).await.expect_err("the row is locked");
        // Its only connection waits for the lock on the server; the pool makes another.
        let conn = timeout(Duration::from_secs(5), pool.acquire()).await.expect("in time").unwrap();
        drop(conn);
        holder.commit().await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [postgres]
    async fn a_row_whose_index_is_not_unique_any_more_is_waited_for_as_the_others<S>(db: TestDb<S>) {
        items(&db).await;
        let lock = || RowLock::table("t_items").by("item_id", 2_i64).wait(MILLIS(200));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        // Both remember that at most one row has this value.
        assert_eq!(lock().fetch_one::<Item>(&mut tx).await.unwrap(), item(2, 20));
        assert_eq!(lock().lock(&mut tx).await.unwrap(), 1);
        tx.rollback().await.unwrap();
        db.execute("ALTER TABLE t_items DROP CONSTRAINT t_items_pkey").await;
        db.execute("INSERT INTO t_items VALUES (2, 's', 21)").await;
        db.execute("CREATE INDEX ON t_items (item_id)").await;

        let mut one = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut one, "SELECT FROM t_items WHERE stock = 20 FOR UPDATE").await.unwrap();
        let mut two = lockkit::begin(&db.pool).await.unwrap();
        let fetched = lock().fetch_one::<Item>(&mut two).await;
        assert!(fetched.as_ref().is_err_and(Error::is_contended), "{fetched:?}");
        two.rollback().await.unwrap();
        let mut two = lockkit::begin(&db.pool).await.unwrap();
        let locked = lock().lock(&mut two).await;
        assert!(locked.as_ref().is_err_and(Error::is_contended), "{locked:?}");
        two.rollback().await.unwrap();
        one.rollback().await.unwrap();
    }
}

on_databases! {
    [sqlite]
    async fn a_row_of_a_file_that_was_attached_inside_the_transaction_is_locked<S>(db: TestDb<S>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = SqliteConnectOptions::new().filename(file.path()).busy_timeout(Duration::ZERO);
        let mut beside = options.connect().await.unwrap();
        beside.execute("CREATE TABLE t_beside (id INTEGER PRIMARY KEY); INSERT INTO t_beside VALUES \
                        (1)").await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, &format!("ATTACH '{}' AS beside", file.path().display())).await.unwrap();
        assert_eq!(RowLock::table("beside.t_beside").by("id", 1_i64).lock(&mut tx).await.unwrap(), 1);
        assert!(beside.execute("BEGIN IMMEDIATE").await.is_err());
        tx.rollback().await.unwrap();
        let _nothing = beside.execute("BEGIN IMMEDIATE").await.unwrap();
    }
}

on_databases! {
    // REPEATABLE READ, in which the first plain read fixes what later ones see. With `innodb_snapshot_isolation`
    // MariaDB refuses the lock instead.
    [mariadb, mysql]
    async fn in_a_snapshot_the_locked_row_is_current_and_plain_reads_are_not<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_seen (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t_seen VALUES (1, 1)").await;
        let read = "SELECT n FROM t_seen";
        let lock = || RowLock::table("t_seen").by("id", 1_i64);

        let mut theirs = db.pool.begin().await.unwrap();
        assert_eq!(S::fetch_i64(&mut theirs, read).await.unwrap(), Some(1));
        db.execute("UPDATE t_seen SET n = 2").await;
        match lock().fetch_one::<(i64, i64)>(&mut *theirs).await {
            Ok((_, n)) => {
                assert_eq!(n, 2);
                assert_eq!(S::fetch_i64(&mut theirs, read).await.unwrap(), Some(1), "from before the lock");
            }
            Err(err) => assert!(err.is_transient(), "{err:?}"),
        }
        theirs.rollback().await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(S::fetch_i64(&mut tx, read).await.unwrap(), Some(2));
        db.execute("UPDATE t_seen SET n = 3").await;
        lock().lock(&mut tx).await.unwrap();
        assert_eq!(S::fetch_i64(&mut tx, read).await.unwrap(), Some(3));
        tx.rollback().await.unwrap();
    }
}
