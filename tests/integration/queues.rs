//! Row locks as a queue of jobs takes them: in an order, so many at a time, past those that others have.

use lockkit::{Error, RowLock, Wait};
use support::{Backend, Server, TestDb, on_databases, on_every_database, on_every_server};

const SIZES: [i64; 4] = [6, 12, 60, 600];

/// Jobs, of which the last one is the most urgent and the first half is ready. The table's name is that of no other
/// database: a process remembers which statements an index serves.
async fn jobs<S: Backend>(db: &TestDb<S>, name: &str, size: i64) -> String {
    let table = format!("{name}_{}_{size}", S::NAME).to_lowercase();
    db.execute(&format!(
        "CREATE TABLE {table} (id BIGINT PRIMARY KEY, urgency BIGINT NOT NULL, shop BIGINT NOT NULL, state \
         VARCHAR(10) NOT NULL)"
    ))
    .await;
    let row = |id| format!("({id}, {}, 1, '{}')", size - id, if id > size / 2 { "done" } else { "ready" });
    let rows: Vec<_> = (1..=size).map(row).collect();
    db.execute(&format!("INSERT INTO {table} VALUES {}", rows.join(", "))).await;
    table
}

/// Lets the optimizer know how many rows there are.
async fn analyze<S: Backend>(db: &TestDb<S>, table: &str) {
    match S::NAME {
        "MariaDB" | "MySQL" => drop(db.fetch_text(&format!("ANALYZE TABLE {table}")).await),
        _ => drop(db.execute(&format!("ANALYZE {table}")).await),
    }
}

type Job = (i64, i64, i64, String);

fn ids(jobs: &[Job]) -> Vec<i64> {
    jobs.iter().map(|it| it.0).collect()
}

on_every_database! {
    async fn the_first_jobs_of_a_table_need_no_column_to_choose_them_by<S>(db: TestDb<S>) {
        for size in SIZES {
            let table = jobs(&db, "t_all", size).await;
            db.execute(&format!("CREATE INDEX by_urgency_{size} ON {table} (urgency)")).await;
            analyze(&db, &table).await;
            let first = || RowLock::table(&table).skip_locked();
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let oldest: Vec<Job> = first().order_by("id").limit(2).fetch_all(&mut *tx).await.unwrap();
            assert_eq!(ids(&oldest), [1, 2]);
            let urgent: Option<Job> = first().order_by("urgency").fetch_optional(&mut *tx).await.unwrap();
            assert_eq!(urgent.unwrap().0, size);
            assert_eq!(first().order_by("urgency").limit(3).lock(&mut *tx).await.unwrap(), 3);
            tx.commit().await.unwrap();
        }
    }

    async fn an_order_that_no_index_has_is_refused_for_a_queue<S>(db: TestDb<S>) {
        let table = jobs(&db, "t_sorted", 12).await;
        db.execute(&format!("CREATE INDEX by_urgency_of_shop ON {table} (shop, urgency)")).await;
        let first = || RowLock::table(&table).skip_locked().limit(1);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for lock in [first().order_by("urgency"), first().order_by("shop").order_by("id"), first().order_by("state")] {
            let refused = lock.lock(&mut *tx).await;
            assert!(matches!(&refused, Err(Error::FullScan { plan, .. }) if !plan.is_empty()), "{refused:?}");
        }
        let served = first().order_by("shop").order_by("urgency").fetch_one::<Job>(&mut *tx).await.unwrap();
        assert_eq!(served.0, 12);
        tx.commit().await.unwrap();
    }

    async fn all_rows_of_a_table_are_not_locked_by_mistake<S>(db: TestDb<S>) {
        let table = jobs(&db, "t_mistake", 6).await;
        let lock = || RowLock::table(&table);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let incomplete = [
            lock(),
            lock().order_by("id"),
            lock().order_by("id").limit(1),
            lock().order_by("id").skip_locked(),
            lock().limit(1).skip_locked(),
        ];
        for lock in incomplete {
            let refused = lock.lock(&mut *tx).await.unwrap_err();
            assert!(matches!(refused, Error::InvalidOption { option: "by", .. }), "{refused:?}");
            assert!(refused.to_string().contains("`order_by`, `limit` and `skip_locked`"), "{refused}");
        }
        tx.rollback().await.unwrap();
    }
}

on_every_server! {
    async fn workers_without_a_column_to_choose_by_take_different_jobs_and_lock_no_others<S>(db: TestDb<S>) {
        for (size, order) in SIZES.into_iter().flat_map(|it| [(it, "id"), (it, "urgency")]) {
            let table = jobs(&db, &format!("t_{order}"), size).await;
            db.execute(&format!("CREATE INDEX of_{table} ON {table} (urgency)")).await;
            analyze(&db, &table).await;
            let nth = |n: i64| if order == "id" { n } else { size + 1 - n };
            let next = |n| RowLock::table(&table).order_by(order).limit(n).skip_locked();
            let mut one = lockkit::begin(&db.pool).await.unwrap();
            let mut two = lockkit::begin(&db.pool).await.unwrap();
            let first: Vec<Job> = next(2).fetch_all(&mut *one).await.unwrap();
            assert_eq!(ids(&first), [nth(1), nth(2)], "{table}");
            let second: Vec<Job> = next(2).wait(Wait::Never).fetch_all(&mut *two).await.unwrap();
            assert_eq!(ids(&second), [nth(3), nth(4)], "{table}");

            let mut other = lockkit::begin(&db.pool).await.unwrap();
            for n in 5..=size {
                let free = RowLock::table(&table).by("id", nth(n)).wait(Wait::Never).lock(&mut *other).await;
                assert!(free.is_ok(), "{table}: number {n} is locked: {free:?}");
            }
            for tx in [one, two, other] {
                tx.rollback().await.unwrap();
            }
        }
    }
}

on_databases! {
    [postgres, sqlite]

    async fn a_partial_index_of_the_rows_that_are_meant_serves<S>(db: TestDb<S>) {
        for size in SIZES {
            let table = jobs(&db, "t_partial", size).await;
            db.execute(&format!("CREATE INDEX ready_{size} ON {table} (id) WHERE state = 'ready'")).await;
            analyze(&db, &table).await;
            let next = || RowLock::table(&table).by("state", "ready").order_by("id").skip_locked();
            // Often enough for a server to think of a plan for any value.
            for _ in 0..12 {
                let mut tx = lockkit::begin(&db.pool).await.unwrap();
                let found: Option<Job> = next().fetch_optional(&mut *tx).await.unwrap();
                assert_eq!(found.unwrap().0, 1);
                assert_eq!(next().limit(3).lock(&mut *tx).await.unwrap(), 3);
                tx.commit().await.unwrap();
            }
        }
    }

    async fn a_partial_index_of_other_rows_does_not_serve<S>(db: TestDb<S>) {
        let table = jobs(&db, "t_others", 60).await;
        db.execute(&format!("CREATE INDEX failed ON {table} (id) WHERE state = 'failed'")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = RowLock::table(&table).by("state", "ready").order_by("id").limit(1).lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        let refused = RowLock::table(&table).order_by("urgency").limit(1).skip_locked().lock(&mut *tx).await;
        assert!(matches!(refused, Err(Error::FullScan { .. })), "{refused:?}");
        tx.rollback().await.unwrap();
    }

    async fn a_column_in_a_partial_index_is_looked_up_there<S>(db: TestDb<S>) {
        let table = jobs(&db, "t_keyed", 12).await;
        db.execute(&format!("CREATE INDEX ready_of_shop ON {table} (shop) WHERE state = 'ready'")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let of_shop = RowLock::table(&table).by("shop", 1_i64).by("state", "ready").lock(&mut *tx).await.unwrap();
        assert_eq!(of_shop, 6);
        tx.commit().await.unwrap();
    }
}

on_databases! {
    [postgres]

    async fn a_partial_index_whose_rows_must_be_filtered_is_a_scan<S>(db: TestDb<S>) {
        let table = jobs(&db, "t_filtered", 60).await;
        db.execute(&format!("CREATE INDEX ready ON {table} (id) WHERE state = 'ready'")).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let before = S::fetch_text(&mut tx, "SELECT current_setting('enable_seqscan')").await.unwrap();
        let refused =
            RowLock::table(&table).by("state", "ready").by("shop", 1_i64).order_by("id").limit(1).lock(&mut *tx).await;
        assert!(matches!(&refused, Err(Error::FullScan { plan, .. }) if plan.contains("Filter")), "{refused:?}");
        assert_eq!(S::fetch_text(&mut tx, "SELECT current_setting('enable_seqscan')").await.unwrap(), before);
        tx.rollback().await.unwrap();
    }
}
