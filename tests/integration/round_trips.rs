//! How many round trips each operation costs, counted by a proxy on a warm connection.

use std::time::Duration;

use lockkit::store::{Acquired, Answer, Claim, LeaseStore, Release, Token};
use lockkit::{Leases, NamedLock, RowLock, Stock, Wait};
use sqlx::pool::PoolOptions;
use support::{Proxy, Server, TestDb, assert_answers_cost, on_every_server};

/// The round trips of one use of `$operation`, after `$warm` have warmed the statement caches.
macro_rules! cost {
    ($proxy:ident, $operation:expr) => {{
        let before = $proxy.round_trips();
        let out = $operation;
        (out, $proxy.round_trips() - before)
    }};
}

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t", key = "id")]
struct Item {
    id: i64,
    version: i64,
}

on_every_server! {
    async fn each_operation_costs_what_the_table_in_the_design_notes_says<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 1)").await;
        let proxy = Proxy::start(&db.url);
        let options = || PoolOptions::<<S as Server>::DB>::new().max_connections(1).test_before_acquire(false);
        let pool = options().connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool.clone()).ttl(Duration::from_secs(60)).build().unwrap();
        let direct = Leases::new(db.pool.clone());
        let stock = Stock::new(pool.clone(), "k");
        Stock::new(db.pool.clone(), "k").put(3200).await.unwrap();
        let row = |wait| RowLock::table("t").by("id", 1_i64).wait(wait);

        // A connection that goes back to its pool is pinged there: sqlx's price, not lockkit's, and paid after the
        // operation. Every count below waits for it, and takes it off. After a commit, sqlx's count of transactions is
        // corrected there too on PostgreSQL, in the same message; on the others the session gets its autocommit back,
        // in one before it. They take one more for the commit, too: it must be alone in its message, and so must the
        // look whether the transaction is still there.
        let (after_commit, look) = if S::NAME == "PostgreSQL" { (1, 0) } else { (2, 1) };
        let idle = || tokio::time::sleep(Duration::from_millis(30));
        // The least of some rounds counts, after a first one that fills the caches: a message that arrives in two
        // pieces can be answered in between, which looks like one round trip more.
        let mut table: Vec<(&str, u64, u64)> = Vec::new();
        for round in 0..4 {
            let mut count = |operation: &'static str, cost: u64, most: u64| {
                match table.iter_mut().find(|it| it.0 == operation) {
                    _ if round == 0 => {}
                    Some((_, least, _)) => *least = cost.min(*least),
                    None => table.push((operation, cost, most)),
                }
            };

            idle().await;
            let (lease, cost) = cost!(proxy, {
                let it = leases.lease("k").try_acquire().await.unwrap().unwrap();
                idle().await;
                it
            });
            count("try_acquire, free", cost - 1, 1);
            let (held, cost) = cost!(proxy, {
                let it = leases.lease("k").try_acquire().await.unwrap();
                idle().await;
                it
            });
            assert!(held.is_none());
            count("try_acquire, held", cost - 1, 1);
            let ((), cost) = cost!(proxy, { lease.extend(Duration::from_secs(60)).await.unwrap(); idle().await });
            count("renew", cost - 1, 1);
            let ((), cost) = cost!(proxy, { leases.show("k").await.unwrap(); idle().await });
            count("show", cost - 1, 1);
            let ((), cost) = cost!(proxy, { lease.release().await.unwrap(); idle().await });
            count("release", cost - 1, 1);

            let claims: Vec<_> = (10..50)
                .map(|it| Claim::new(format!("k{it}"), Token::random(), "h", Duration::from_secs(60)))
                .collect();
            let releases: Vec<_> =
                claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
            if round == 0 {
                for claim in &claims {
                    db.pool.lease_acquire(claim).await.unwrap();
                }
                db.pool.lease_release_all(&releases).await.unwrap();
            }
            let (answers, cost) =
                cost!(proxy, { let it = pool.lease_acquire_each(&claims).await.unwrap(); idle().await; it });
            assert!(answers.iter().all(|it| matches!(it, Some(Acquired::Granted(_)))), "{answers:?}");
            count("claims together", cost - 1, 1 + look);
            let (answers, cost) =
                cost!(proxy, { let it = pool.lease_release_all_unpinned(&releases).await.unwrap(); idle().await; it });
            assert!(answers.iter().all(|it| *it == Answer::Done), "{answers:?}");
            count("releases together", cost - 1, 1 + look);

            let lease = leases.lease("k").acquire().await.unwrap();
            // The first one of a pool asks more.
            lockkit::begin(&pool).await.unwrap().rollback().await.unwrap();
            idle().await;
            let (mut tx, cost) = cost!(proxy, lockkit::begin(&pool).await.unwrap());
            count("begin", cost, 1);
            let ((), cost) = cost!(proxy, lease.verify(&mut tx).await.unwrap());
            count("verify", cost, 1);
            let ((), cost) = cost!(proxy, { lease.commit(tx).await.unwrap(); idle().await });
            count("lease commit", cost - after_commit, 2 + look);

            let (mut item, cost) = cost!(proxy, { let it = Item::load(&pool, 1).await.unwrap(); idle().await; it });
            count("load", cost - 1, 1);
            let ((), cost) = cost!(proxy, { item.save(&pool).await.unwrap(); idle().await });
            count("save", cost - 1, 1);
            item.version -= 1;
            let ((), cost) = cost!(proxy, { item.save(&pool).await.unwrap_err(); idle().await });
            count("save, conflict", cost - 1, 2);
            let (_, cost) = cost!(proxy, { let it = stock.take(1).await.unwrap(); idle().await; it });
            count("stock, take", cost - 1, 1);
            let (refused, cost) = cost!(proxy, { let it = stock.take(5000).await; idle().await; it });
            assert!(refused.is_err());
            // Looked for in four random segments, then in all of them; then they are read.
            count("stock, sold out", cost - 1, if S::NAME == "PostgreSQL" { 2 } else { 3 });

            let mut tx = lockkit::begin(&pool).await.unwrap();
            let (_, cost) = cost!(proxy, stock.take_in(&mut *tx, 1).await.unwrap());
            // A savepoint before it.
            count("stock, take in a transaction", cost, if S::NAME == "PostgreSQL" { 2 } else { 1 });
            let (_, cost) = cost!(proxy, row(Wait::Unbounded).lock(&mut *tx).await.unwrap());
            count("row lock, no bound", cost, 1);
            let (_, cost) = cost!(proxy, row(Wait::Never).lock(&mut *tx).await.unwrap());
            count("row lock, not waiting", cost, 1);
            let (_, cost) = cost!(proxy, row(Wait::AtMost(Duration::from_secs(1))).lock(&mut *tx).await.unwrap());
            count("row lock, bounded", cost, 1);
            for (operation, wait) in [
                ("named lock, no bound", Wait::Unbounded),
                ("named lock, not waiting", Wait::Never),
                ("named lock, bounded", Wait::AtMost(Duration::from_secs(1))),
            ] {
                let ((), cost) = cost!(proxy, NamedLock::new("k").wait(wait).lock(&mut *tx).await.unwrap());
                count(operation, cost, 1);
            }
            let new = format!("new {round}");
            let ((), cost) =
                cost!(proxy, NamedLock::new(new).wait(Duration::from_secs(1)).lock(&mut *tx).await.unwrap());
            count("named lock, bounded, new name", cost, 2);
            let ((), cost) = cost!(proxy, { tx.commit().await.unwrap(); idle().await });
            count("commit", cost - after_commit, 1 + look);
            assert_eq!(direct.show("k").await.unwrap(), None);
        }
        for (operation, cost, most) in table {
            assert!(cost <= most, "{operation} took {cost} round trips on {}, not {most}", S::NAME);
            println!("{}: {operation}: {cost}", S::NAME);
        }
    }

    async fn requests_with_a_stored_answer_cost_what_the_table_says<S>(db: TestDb<S>) {
        let run = if S::NAME == "PostgreSQL" { 5 } else { 6 };
        assert_answers_cost::<<S as Server>::DB>(&Proxy::start(&db.url), [run, 1, 15, 1]).await;
    }
}
