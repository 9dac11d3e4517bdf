//! Connections whose statement had no answer when its future was dropped. sqlx's MySQL driver loses its step there: it
//! takes the rest of one answer for the next one, and panics.

use std::time::Duration;

use lockkit::{Error, Fault, Idempotent, Leases, RowLock, Stock, Tx};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgPool};
use support::{Proxy, Server, TestDb, on_databases};
use tokio::time::{sleep, timeout};

use super::{PATIENCE, note_panics, panics};

/// Long enough for a statement to be sent, and for whatever follows a drop.
const MOMENT: Duration = Duration::from_millis(300);

/// What is on its way when it is dropped: a text of the statement. The answer to its PREPARE has several packets.
const STATEMENT: &str = "lockkit_amid";

/// Drops the future with its answer held back, lets the answer through, and returns how many requests followed.
async fn spoken_after_the_drop<T>(proxy: &Proxy, amid: impl Future<Output = T>) -> u64 {
    assert!(timeout(MOMENT, amid).await.is_err(), "its answer is held back");
    let spoken = proxy.round_trips();
    proxy.pass_replies();
    sleep(MOMENT).await;
    proxy.round_trips() - spoken
}

on_databases! { [postgres]
    // As the guide says. Without the setting the server sleeps on, and has the row locked.
    async fn a_server_that_looks_for_its_client_ends_the_statement_of_a_dropped_body<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id BIGINT NOT NULL PRIMARY KEY)").await;
        db.execute("INSERT INTO item VALUES (1)").await;
        let options: PgConnectOptions = db.url.parse().unwrap();
        let pool =
            PgPool::connect_with(options.options([("client_connection_check_interval", "100ms")])).await.unwrap();
        let row = || RowLock::table("item").by("id", 1_i64).wait(Duration::from_secs(30));
        let body = async {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            row().lock(&mut tx).await.unwrap();
            sqlx::query("SELECT pg_sleep(600)").execute(&mut *tx).await
        };
        assert!(timeout(MOMENT * 3, body).await.is_err(), "it sleeps");
        let mut next = lockkit::begin(&db.pool).await.unwrap();
        row().lock(&mut next).await.unwrap();
        next.rollback().await.unwrap();
    }
}

on_databases! { [mariadb, mysql]
    async fn a_transaction_that_was_dropped_amid_a_statement_closes_its_connection_and_says_nothing_on_it<S>(
        db: TestDb<S>
    ) {
        note_panics();
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        // A statement of the caller.
        proxy.hold_replies_to(STATEMENT);
        let amid = async {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            sqlx::query("SELECT 1 AS lockkit_amid, 2 AS b FROM DUAL WHERE 1 = ?").bind(1).fetch_all(&mut *tx).await
        };
        assert_eq!(spoken_after_the_drop(&proxy, amid).await, 0, "on the way of a statement");

        // A lock of lockkit's, through the transaction: the caller rolls back by itself.
        db.execute("CREATE TABLE lockkit_amid (id BIGINT NOT NULL PRIMARY KEY)").await;
        db.execute("INSERT INTO lockkit_amid VALUES (1)").await;
        let mut tx = lockkit::begin(&pool).await.unwrap();
        proxy.hold_replies_to(STATEMENT);
        let locking = RowLock::table("lockkit_amid").by("id", 1_i64);
        assert!(timeout(MOMENT, locking.lock(&mut tx)).await.is_err(), "its answer is held back");
        let amid = async {
            tx.rollback().await.unwrap();
            sleep(MOMENT * 2).await;
        };
        assert_eq!(spoken_after_the_drop(&proxy, amid).await, 0);

        assert_eq!(panics(), Vec::<String>::new());
        db.assert_nothing_left().await;
    }

    async fn a_body_that_dropped_a_statement_gets_a_result_and_commits_all_or_nothing<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (n INT)").await;
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool.clone());
        let one_at_a_time = tokio::sync::Mutex::new(());
        // Writes, and drops a statement amid its PREPARE or its EXECUTE.
        let leave = async |tx: &mut Tx<_>, amid: &str| {
            let _alone = one_at_a_time.lock().await;
            sqlx::query("INSERT INTO written VALUES (1)").execute(&mut **tx).await.unwrap();
            let sql = "SELECT 1 AS a, 2 AS b, 3 AS c, 4 AS d FROM DUAL WHERE ? <> '' AND ? <> '' AND ? <> ''";
            let query = |text: &'static str| sqlx::query(sql).bind(text).bind("x").bind("y");
            match amid {
                "a short PREPARE" => proxy.hold_replies_to("SELECT 1 AS lockkit_amid"),
                "PREPARE" => proxy.hold_replies_to("SELECT 1 AS a, 2 AS b"),
                _ => {
                    query("prepares it").fetch_all(&mut **tx).await.unwrap();
                    proxy.hold_replies_to(STATEMENT);
                }
            }
            let short = "SELECT 1 AS lockkit_amid, 2 AS b FROM DUAL WHERE 1 = ?";
            let sent = async {
                if amid == "a short PREPARE" {
                    sqlx::query(short).bind(1).fetch_all(&mut **tx).await
                } else {
                    query(STATEMENT).fetch_all(&mut **tx).await
                }
            };
            assert!(timeout(MOMENT, sent).await.is_err(), "its answer is held back");
            proxy.pass_replies();
        };
        let written = async || db.fetch_i64("SELECT COUNT(*) FROM written").await.unwrap();
        for amid in ["a short PREPARE", "PREPARE", "EXECUTE"] {
            // What the body has failed with is what its caller gets.
            let run = Idempotent::key("run").run(&pool, async |tx| {
                leave(tx, amid).await;
                Err::<(), _>(Error::conflict())
            });
            let outside = Idempotent::key("outside").outside(&leases, async |work| {
                leave(work.tx().await?, amid).await;
                Err::<(), _>(Error::conflict())
            });
            let failed = timeout(PATIENCE, async { tokio::join!(run, outside) }).await.expect("an end");
            assert!(failed.0.unwrap_err().is_conflict() && failed.1.unwrap_err().is_conflict(), "{amid}");
            assert_eq!(written().await, 0);

            // What is committed is all of it.
            let run = Idempotent::key(format!("run {amid}")).run(&pool, async |tx| {
                leave(tx, amid).await;
                Ok::<_, Error>(())
            });
            let outside = Idempotent::key(format!("outside {amid}")).outside(&leases, async |work| {
                leave(work.tx().await?, amid).await;
                Ok::<_, Error>(())
            });
            let by_hand = async |commits: bool| {
                let mut tx = lockkit::begin(&pool).await?;
                leave(&mut tx, amid).await;
                if commits { tx.commit().await } else { tx.rollback().await }
            };
            let ended = async { tokio::join!(run, outside, by_hand(true), by_hand(false)) };
            let (run, outside, committed, rolled_back) = timeout(PATIENCE, Box::pin(ended)).await.expect("an end");
            let committed = [run.map(drop), outside.map(drop), committed];
            println!("{}, {amid}: {committed:?}, {rolled_back:?}", S::NAME);
            let has_answer = |it: &Result<(), Error>| {
                let is_unanswered = matches!(it, Err(Error::Database { fault: Fault::Unavailable, .. }));
                assert!(it.is_ok() || is_unanswered, "{it:?}");
                it.is_ok()
            };
            let _answered = has_answer(&rolled_back);
            let commits = committed.iter().filter(|it| has_answer(it)).count();
            assert_eq!(written().await, i64::try_from(commits).unwrap());
            db.execute("DELETE FROM written").await;
            // No connection in the pool has lost its step.
            let mut conns = Vec::new();
            for _ in 0..5 {
                let mut conn = pool.acquire().await.unwrap();
                assert_eq!(S::fetch_i64(&mut conn, "SELECT 7").await.unwrap(), Some(7));
                conns.push(conn);
            }
        }
        db.assert_nothing_left().await;
    }

    async fn what_only_reads_closes_its_connection_too_when_it_is_dropped_amid_a_statement<S>(db: TestDb<S>) {
        note_panics();
        Stock::new(db.pool.clone(), "k").put(7).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        lockkit::begin(&pool).await.unwrap().rollback().await.unwrap();
        sleep(MOMENT).await;
        let stock = Stock::new(pool.clone(), "k");
        proxy.hold_replies_to("lockkit_stock");
        assert_eq!(spoken_after_the_drop(&proxy, stock.left()).await, 0);
        assert_eq!(panics(), Vec::<String>::new());
    }

    // A pool of one shows it: a connection that was closed would have another id.
    async fn a_transaction_whose_lock_was_refused_keeps_its_connection_when_it_is_dropped<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id BIGINT NOT NULL PRIMARY KEY)").await;
        db.execute("INSERT INTO item VALUES (1)").await;
        let row = || RowLock::table("item").by("id", 1_i64).wait(lockkit::Wait::Never);
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        row().lock(&mut holder).await.unwrap();

        let pool = db.pool_of(1).await;
        let id = async || {
            let mut conn = pool.acquire().await.unwrap();
            conn.ping().await.unwrap();
            S::fetch_i64(&mut conn, "SELECT CONNECTION_ID()").await.unwrap()
        };
        let before = id().await;
        let mut tx = lockkit::begin(&pool).await.unwrap();
        assert!(row().lock(&mut tx).await.unwrap_err().is_contended());
        drop(tx);
        assert_eq!(id().await, before);
        holder.rollback().await.unwrap();

        let mut tx = lockkit::begin(&pool).await.unwrap();
        let refused = Stock::new(pool.clone(), "k").take_in(&mut tx, 1).await;
        assert!(matches!(refused, Err(Error::SoldOut { .. })), "{refused:?}");
        drop(tx);
        assert_eq!(id().await, before);
    }
}
