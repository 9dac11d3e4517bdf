//! The fence guard: transactions of one key commit in the order of their fences, whatever store the leases are in.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkit::testing::MemoryStore;
use lockkit::{Error, Fence, Leases, begin, forget_fences, guard, with_lock};
use sqlx::pool::PoolOptions;
use sqlx::{AssertSqlSafe, Executor};
use support::{Cluster, JoinSet, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::time::{sleep, timeout};

const DOMAIN: &str = "redis:prod";
const MILLIS: fn(u64) -> Duration = Duration::from_millis;

fn fence(number: u64) -> Fence {
    Fence::from(number)
}

/// The fence that refused this one.
fn seen(refused: Result<(), Error>) -> u64 {
    match refused {
        Err(err @ Error::Fenced { seen, .. }) if err.is_lost() => seen.get(),
        other => panic!("{other:?}"),
    }
}

on_every_database! {
    async fn a_fence_that_a_greater_one_has_followed_is_refused<S>(db: TestDb<S>) {
        for (number, admitted) in [(5, true), (7, true), (5, false), (7, true), (8, true)] {
            let mut tx = begin(&db.pool).await.unwrap();
            let guarded = guard(&mut *tx, DOMAIN, "k", fence(number)).await;
            if admitted {
                guarded.unwrap();
                tx.commit().await.unwrap();
            } else {
                let err = guarded.unwrap_err();
                assert_eq!(err.to_string(), "lease `k` with fence 5 is stale: a transaction with fence 7 has passed \
                                             the guard");
                assert_eq!(seen(Err(err)), 7);
            }
        }
        // Other keys and other domains have fences of their own.
        let mut tx = begin(&db.pool).await.unwrap();
        guard(&mut *tx, DOMAIN, "k'\\", fence(1)).await.unwrap();
        guard(&mut *tx, "etcd", "k", fence(1)).await.unwrap();
        tx.commit().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_transaction_that_was_rolled_back_leaves_no_fence<S>(db: TestDb<S>) {
        let mut tx = begin(&db.pool).await.unwrap();
        guard(&mut *tx, DOMAIN, "k", fence(9)).await.unwrap();
        tx.rollback().await.unwrap();
        let mut tx = begin(&db.pool).await.unwrap();
        guard(&mut *tx, DOMAIN, "k", fence(5)).await.unwrap();
        // Again in the same transaction, and with a later fence of the same process.
        guard(&mut *tx, DOMAIN, "k", fence(5)).await.unwrap();
        guard(&mut *tx, DOMAIN, "k", fence(6)).await.unwrap();
        assert_eq!(seen(guard(&mut *tx, DOMAIN, "k", fence(5)).await), 6);
        tx.rollback().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_fence").await, Some(0));
    }

    async fn a_row_that_lockkit_did_not_write_is_an_error_that_loses_no_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(MemoryStore::new());
        let (high, low) = (leases.lease("high").acquire().await.unwrap(), leases.lease("low").acquire().await.unwrap());
        let domain = "lockkit";
        for (key, number) in [("high", i64::MAX), ("low", -7)] {
            let row = format!("('{domain}', '{key}', {number})");
            db.execute(&format!("INSERT INTO lockkit_fence (domain, name, fence) VALUES {row}")).await;
        }
        let mut tx = begin(&db.pool).await.unwrap();
        let refused = high.guard(&mut *tx).await.unwrap_err();
        let source = std::error::Error::source(&refused).expect("what is there").to_string();
        assert!(source.contains("`high` in `lockkit_fence` has the fence 9223372036854775807"), "{source}");
        assert!(!refused.is_lost() && !refused.is_transient() && high.is_trusted(), "{refused:?}");
        tx.rollback().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT MAX(fence) FROM lockkit_fence").await, Some(i64::MAX));
        // MySQL and MariaDB cannot compare it.
        let mut tx = begin(&db.pool).await.unwrap();
        let guarded = low.guard(&mut *tx).await;
        let can = !["MySQL", "MariaDB", "Galera"].contains(&S::NAME);
        assert!(low.is_trusted() && guarded.is_ok() == can, "{guarded:?}");
        tx.rollback().await.unwrap();
        assert_eq!(forget_fences(&db.pool, domain).await.unwrap(), 2);
        let mut tx = begin(&db.pool).await.unwrap();
        high.guard(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
    }

    async fn a_guard_needs_a_transaction_a_domain_and_a_key<S>(db: TestDb<S>) {
        let mut conn = db.pool.acquire().await.unwrap();
        let mut outer = sqlx::Connection::begin(&mut *conn).await.unwrap();
        let mut inner = sqlx::Connection::begin(&mut *outer).await.unwrap();
        let nested = guard(&mut *inner, DOMAIN, "k", fence(1)).await.unwrap_err();
        assert!(nested.to_string().contains("depth 2"), "{nested}");
        drop(inner);
        drop(outer);
        let outside = guard(&mut *conn, DOMAIN, "k", fence(1)).await.unwrap_err();
        assert!(matches!(&outside, Error::InvalidOption { option: "guard", .. }), "{outside:?}");
        drop(conn);
        let mut tx = begin(&db.pool).await.unwrap();
        for domain in [String::new(), "d".repeat(65), "a\nb".to_owned()] {
            let refused = guard(&mut *tx, domain, "k", fence(1)).await.unwrap_err();
            assert!(matches!(&refused, Error::InvalidOption { option: "fence_domain", .. }), "{refused:?}");
        }
        let refused = guard(&mut *tx, DOMAIN, "k", fence(1 << 62)).await.unwrap_err();
        assert!(matches!(&refused, Error::InvalidOption { option: "guard", .. }), "{refused:?}");
        let refused = guard(&mut *tx, DOMAIN, "", fence(1)).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidKey { .. }), "{refused:?}");
        tx.rollback().await.unwrap();
        let refused = Leases::builder(MemoryStore::new()).fence_domain("").build().unwrap_err();
        assert!(matches!(&refused, Error::InvalidOption { option: "fence_domain", .. }), "{refused:?}");

        db.execute("DROP TABLE lockkit_fence").await;
        let mut tx = begin(&db.pool).await.unwrap();
        let refused = guard(&mut *tx, DOMAIN, "k", fence(1)).await.unwrap_err();
        assert!(matches!(refused, Error::NotMigrated { .. }), "{refused:?}");
        tx.rollback().await.unwrap();
    }

    // The hole of every lock outside the database: a holder that was stopped writes after its lease.
    async fn a_stale_holder_of_a_lease_elsewhere_cannot_commit<S>(db: TestDb<S>) {
        let store = MemoryStore::new();
        let leases = |store: MemoryStore| Leases::builder(store).fence_domain(DOMAIN).build().unwrap();
        let (before, after) = (leases(store.client()), leases(store.client()));
        let stale = before.lease("item:7").acquire().await.unwrap();
        store.expire("item:7").unwrap();
        let heir = after.lease("item:7").acquire().await.unwrap();
        let mut tx = begin(&db.pool).await.unwrap();
        heir.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();

        // Nobody has told it yet.
        assert!(stale.is_trusted());
        let mut tx = begin(&db.pool).await.unwrap();
        let refused = stale.guard(&mut *tx).await;
        tx.rollback().await.unwrap();
        assert_eq!(seen(refused), heir.fence().get());
        assert!(!stale.is_trusted(), "it knows now");
        let mut tx = begin(&db.pool).await.unwrap();
        assert!(matches!(stale.guard(&mut *tx).await, Err(Error::Lost { .. })));
        heir.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }

    async fn several_leases_guard_together<S>(db: TestDb<S>) {
        let store = MemoryStore::new();
        let several = Leases::new(store.client()).all(["b", "a"]).acquire().await.unwrap();
        let mut tx = begin(&db.pool).await.unwrap();
        several.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        store.expire("b").unwrap();
        let heir = Leases::new(store.client()).lease("b").acquire().await.unwrap();
        let mut tx = begin(&db.pool).await.unwrap();
        heir.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = begin(&db.pool).await.unwrap();
        assert_eq!(seen(several.guard(&mut *tx).await), heir.fence().get());
        tx.rollback().await.unwrap();
    }

    async fn a_statement_for_other_clients_fails_for_a_stale_fence<S>(db: TestDb<S>) {
        let store = MemoryStore::new();
        let leases = |store: MemoryStore| Leases::builder(store).fence_domain("it's \\ 1").build().unwrap();
        let key = r"o'reilly \ 'ключ'";
        let stale = leases(store.client()).lease(key).acquire().await.unwrap();
        let old = stale.guard_sql::<<S as Server>::DB>().unwrap();
        store.expire(key).unwrap();
        let heir = leases(store.client()).lease(key).acquire().await.unwrap();
        let new = heir.guard_sql::<<S as Server>::DB>().unwrap();

        for (sql, admitted) in [(&old, true), (&old, true), (&new, true), (&old, false), (&new, true)] {
            let mut tx = begin(&db.pool).await.unwrap();
            let sent = tx.execute(AssertSqlSafe(sql.clone())).await;
            assert_eq!(sent.is_ok(), admitted, "{sql}: {sent:?}");
            match sent {
                Ok(_) => tx.commit().await.unwrap(),
                Err(err) => println!("{}: {err}", S::NAME),
            }
        }
        // The guard and the statement have one row.
        let mut tx = begin(&db.pool).await.unwrap();
        heir.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_fence").await, Some(1));
    }

    async fn an_operator_can_forget_the_fences_of_a_domain<S>(db: TestDb<S>) {
        let mut tx = begin(&db.pool).await.unwrap();
        for (domain, key) in [(DOMAIN, "a"), (DOMAIN, "b"), ("etcd", "a")] {
            guard(&mut *tx, domain, key, fence(100)).await.unwrap();
        }
        tx.commit().await.unwrap();
        assert_eq!(forget_fences(&db.pool, DOMAIN).await.unwrap(), 2);
        let mut tx = begin(&db.pool).await.unwrap();
        guard(&mut *tx, DOMAIN, "a", fence(1)).await.unwrap();
        assert_eq!(seen(guard(&mut *tx, "etcd", "a", fence(1)).await), 100);
        tx.rollback().await.unwrap();
    }

    // A lock that lets everybody in, as if all holders but one were stale.
    async fn with_the_guard_no_update_is_lost_and_fences_commit_in_order<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_counter (id INT PRIMARY KEY, n BIGINT NOT NULL)").await;
        db.execute("CREATE TABLE t_log (n BIGINT PRIMARY KEY, fence BIGINT NOT NULL)").await;
        for guarded in [false, true] {
            db.execute("DELETE FROM t_counter").await;
            db.execute("DELETE FROM t_log").await;
            db.execute("INSERT INTO t_counter VALUES (1, 0)").await;
            let (committed, refused) = read_modify_write(&db, guarded).await;
            let count = db.fetch_i64("SELECT n FROM t_counter").await.unwrap();
            let lost = i64::try_from(committed).unwrap() - count;
            println!("{}, guard {guarded}: {committed} committed, {refused} refused, {lost} lost updates", S::NAME);
            if guarded {
                assert_eq!(lost, 0);
                assert!(committed >= 8 && committed + refused == 200, "{committed} committed, {refused} refused");
                let unordered = "SELECT COUNT(*) FROM t_log AS a JOIN t_log AS b ON a.n < b.n AND a.fence >= b.fence";
                assert_eq!(db.fetch_i64(unordered).await, Some(0), "fences in the order of the commits");
            } else if S::NAME != "SQLite" {
                assert!(lost > 0, "without the guard nothing was lost, so the test shows nothing");
            }
        }
        db.assert_nothing_left().await;
    }
}

on_every_database! {
    async fn the_attribute_guards_its_transaction<S>(db: TestDb<S>) {
        #[with_lock(lease, on = leases, pool = pool, key = "item:{id}", as = lease, tx = tx)]
        async fn take(
            leases: &Leases<MemoryStore>,
            pool: &sqlx::Pool<<S as Server>::DB>,
            id: i64,
            works: bool,
        ) -> Result<u64, Error> {
            <S as Server>::execute(&mut tx, &format!("INSERT INTO t_taken VALUES ({id})")).await.unwrap();
            if works { Ok(lease.fence().get()) } else { Err(Error::conflict()) }
        }

        #[with_lock(lease, on = leases, pool = pool, keys = ["a", "b"], tx = tx)]
        async fn both(leases: &Leases<MemoryStore>, pool: &sqlx::Pool<<S as Server>::DB>) -> Result<(), Error> {
            <S as Server>::execute(&mut tx, "INSERT INTO t_taken VALUES (100)").await.unwrap();
            Ok(())
        }

        db.execute("CREATE TABLE t_taken (id BIGINT NOT NULL)").await;
        let leases = Leases::builder(MemoryStore::new()).fence_domain(DOMAIN).build().unwrap();
        let first = take(&leases, &db.pool, 7, true).await.unwrap();
        assert!(take(&leases, &db.pool, 8, false).await.unwrap_err().is_conflict());
        let second = take(&leases, &db.pool, 7, true).await.unwrap();
        assert!(second > first);
        both(&leases, &db.pool).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT SUM(id) FROM t_taken").await, Some(114));
        assert!(leases.list("").await.unwrap().is_empty(), "released");
        let name = if S::NAME.contains('M') { "X'6974656D3A37'" } else { "'item:7'" };
        let kept = format!("SELECT fence FROM lockkit_fence WHERE name = {name}");
        assert_eq!(db.fetch_i64(&kept).await, i64::try_from(second).ok());

        // A later holder has passed the guard, as this one finds out after the commit of that one.
        let mut tx = begin(&db.pool).await.unwrap();
        guard(&mut *tx, DOMAIN, "item:7", fence(1 << 61)).await.unwrap();
        guard(&mut *tx, DOMAIN, "b", fence(1 << 61)).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(seen(take(&leases, &db.pool, 7, true).await.map(drop)), 1 << 61);
        assert_eq!(seen(both(&leases, &db.pool).await), 1 << 61);
        assert_eq!(db.fetch_i64("SELECT SUM(id) FROM t_taken").await, Some(114), "nothing was written");
        db.assert_nothing_left().await;
    }

    async fn a_body_that_lost_its_lease_commits_nothing<S>(db: TestDb<S>) {
        #[with_lock(lease, on = leases, pool = pool, key = "k", on_lost = continue, tx = tx)]
        async fn write(leases: &Leases<MemoryStore>, pool: &sqlx::Pool<<S as Server>::DB>) -> Result<(), Error> {
            <S as Server>::execute(&mut tx, "INSERT INTO t_taken VALUES (1)").await.unwrap();
            leases.store().steal("k").unwrap();
            sleep(MILLIS(500)).await;
            Ok(())
        }

        db.execute("CREATE TABLE t_taken (id BIGINT NOT NULL)").await;
        let leases = Leases::builder(MemoryStore::new()).ttl(MILLIS(300)).build().unwrap();
        let lost = write(&leases, &db.pool).await.unwrap_err();
        assert!(matches!(lost, Error::Lost { .. }), "{lost:?}");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t_taken").await, Some(0));
        db.assert_nothing_left().await;
    }
}

/// 200 read-modify-writes by 8 holders at once, each with a fence of its own. Returns how many were committed and
/// refused.
async fn read_modify_write<S: support::Backend>(db: &TestDb<S>, guarded: bool) -> (u64, u64) {
    let fences = Arc::new(AtomicU64::new(1));
    let mut holders = JoinSet::new();
    for _ in 0..8 {
        let (pool, fences) = (db.pool.clone(), fences.clone());
        holders.spawn(async move {
            let (mut committed, mut refused) = (0, 0);
            for _ in 0..25 {
                let own = fences.fetch_add(1, Ordering::SeqCst);
                let mut tx = begin(&pool).await.unwrap();
                if guarded && let Err(err) = guard(&mut *tx, DOMAIN, "hot", fence(own)).await {
                    assert!(err.is_lost(), "{err:?}");
                    refused += 1;
                    tx.rollback().await.unwrap();
                    continue;
                }
                let n = S::fetch_i64(&mut tx, "SELECT n FROM t_counter").await.unwrap().unwrap() + 1;
                sleep(MILLIS(1)).await;
                S::execute(&mut tx, &format!("UPDATE t_counter SET n = {n}")).await.unwrap();
                if guarded {
                    S::execute(&mut tx, &format!("INSERT INTO t_log VALUES ({n}, {own})")).await.unwrap();
                }
                tx.commit().await.unwrap();
                committed += 1;
            }
            (committed, refused)
        });
    }
    holders.join_all().await.into_iter().fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
}

on_every_server! {
    async fn a_fence_waits_for_open_transactions_and_then_is_judged<S>(db: TestDb<S>) {
        // (first, second, whether the first commits, whether the second is admitted)
        for (first, second, commits, admitted) in
            [(15, 17, true, true), (27, 25, true, false), (37, 35, false, true), (47, 48, false, true)]
        {
            let mut one = begin(&db.pool).await.unwrap();
            guard(&mut *one, DOMAIN, "k", fence(first)).await.unwrap();
            let pool = db.pool.clone();
            let mut other = spawn(async move {
                let mut two = begin(&pool).await.unwrap();
                let guarded = guard(&mut *two, DOMAIN, "k", fence(second)).await;
                two.rollback().await.unwrap();
                guarded
            });
            assert!(timeout(MILLIS(100), &mut other).await.is_err(), "it waits");
            if commits { one.commit().await.unwrap() } else { one.rollback().await.unwrap() }
            let guarded = other.await.unwrap();
            if admitted { guarded.unwrap() } else { assert_eq!(seen(guarded), first) }
            forget_fences(&db.pool, DOMAIN).await.unwrap();
        }
    }

    async fn a_wait_for_an_open_transaction_is_bounded<S>(db: TestDb<S>) {
        let mut one = begin(&db.pool).await.unwrap();
        guard(&mut *one, DOMAIN, "k", fence(1)).await.unwrap();
        let mut two = begin(&db.pool).await.unwrap();
        let refused = timeout(Duration::from_secs(60), guard(&mut *two, DOMAIN, "k", fence(2))).await.expect("a bound");
        // As long as the wait of a lock by default.
        let ten = Duration::from_secs(10);
        assert!(matches!(refused, Err(Error::Contended { waited, .. }) if waited >= ten), "{refused:?}");
        // On MySQL it still waits.
        drop(two);
        one.commit().await.unwrap();
        // The session's own bound is what it was.
        let bound = if S::NAME == "PostgreSQL" { "SHOW lock_timeout" } else { "SELECT @@innodb_lock_wait_timeout" };
        let mut bounds = HashSet::new();
        for _ in 0..3 {
            let mut tx = begin(&db.pool).await.unwrap();
            bounds.insert(S::fetch_text(&mut tx, bound).await.unwrap());
            guard(&mut *tx, DOMAIN, "k", fence(3)).await.unwrap();
            bounds.insert(S::fetch_text(&mut tx, bound).await.unwrap());
            tx.commit().await.unwrap();
        }
        assert_eq!(bounds.len(), 1, "{bounds:?}");
    }

    // The snapshot of a transaction that waits for the guard is from before its wait on PostgreSQL.
    async fn an_heir_with_a_snapshot_never_goes_on_from_before_its_predecessor<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_counter (id INT PRIMARY KEY, n BIGINT NOT NULL)").await;
        db.execute("INSERT INTO t_counter VALUES (1, 1)").await;
        let mut seen = Vec::new();
        for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
            // The row has the fence of the predecessor already, or not yet.
            for guarded_before in [true, false] {
                forget_fences(&db.pool, DOMAIN).await.unwrap();
                if guarded_before {
                    let mut tx = begin(&db.pool).await.unwrap();
                    guard(&mut *tx, DOMAIN, "k", fence(5)).await.unwrap();
                    tx.commit().await.unwrap();
                }
                db.execute("UPDATE t_counter SET n = 1").await;
                let mut before = begin(&db.pool).await.unwrap();
                guard(&mut *before, DOMAIN, "k", fence(5)).await.unwrap();
                let pool = db.pool.clone();
                let heir = spawn(async move {
                    let mut conn = pool.acquire().await.unwrap();
                    let set = if S::NAME == "PostgreSQL" {
                        "SESSION CHARACTERISTICS AS TRANSACTION"
                    } else {
                        "SESSION TRANSACTION"
                    };
                    S::execute(&mut conn, &format!("SET {set} ISOLATION LEVEL {isolation}")).await.unwrap();
                    let mut tx = sqlx::Connection::begin(&mut *conn).await.unwrap();
                    match guard(&mut *tx, DOMAIN, "k", fence(7)).await {
                        Ok(()) => Ok(S::fetch_i64(&mut tx, "SELECT n FROM t_counter").await.unwrap()),
                        Err(err) => Err(err),
                    }
                });
                sleep(MILLIS(100)).await;
                S::execute(&mut before, "UPDATE t_counter SET n = 2").await.unwrap();
                before.commit().await.unwrap();
                match heir.await.unwrap() {
                    Ok(n) => assert_eq!(n, Some(2), "{isolation}, guarded before: {guarded_before}"),
                    Err(err) => assert!(err.is_transient(), "{err:?}"),
                }
                seen.push(isolation);
            }
        }
        assert_eq!(seen.len(), 4);
    }

    async fn a_guard_costs_one_round_trip<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(1).connect(proxy.url()).await.unwrap();
        let mut costs = Vec::new();
        for number in [1, 1, 2, 2] {
            let mut tx = begin(&pool).await.unwrap();
            let before = proxy.round_trips();
            guard(&mut *tx, DOMAIN, "k", fence(number)).await.unwrap();
            costs.push(proxy.round_trips() - before);
            tx.commit().await.unwrap();
        }
        // The first one prepares the statement on PostgreSQL.
        assert_eq!(costs[1..], [1, 1, 1], "{costs:?}");
    }
}

on_databases! { [galera, group]
    // A cluster checks what a transaction has changed, and not what it has locked.
    async fn on_two_nodes_fences_commit_in_order_and_no_update_is_lost<S>(db: TestDb<S>) {
        lockkit::migrate(&db.pool).await.unwrap();
        db.execute("CREATE TABLE t_counter (id INT PRIMARY KEY, n BIGINT NOT NULL)").await;
        db.execute("CREATE TABLE t_log (n BIGINT PRIMARY KEY, fence BIGINT NOT NULL)").await;
        db.execute("INSERT INTO t_counter VALUES (1, 0)").await;
        let mut nodes = Vec::new();
        for url in S::nodes(&db.url) {
            S::caught_up(&url).await.unwrap();
            nodes.push(sqlx::MySqlPool::connect(&url).await.unwrap());
        }
        let transaction = async |node: &sqlx::MySqlPool, number| {
            let mut tx = begin(node).await?;
            guard(&mut *tx, DOMAIN, "k", fence(number)).await?;
            let write = async {
                let (n,): (i64,) = sqlx::query_as("SELECT n FROM t_counter").fetch_one(&mut *tx).await?;
                sqlx::query("UPDATE t_counter SET n = ?").bind(n + 1).execute(&mut *tx).await?;
                let log = sqlx::query("INSERT INTO t_log VALUES (?, ?)").bind(n + 1);
                log.bind(fence(number).as_i64()).execute(&mut *tx).await
            };
            write.await.map_err(|err| Error::database("writing", None, lockkit::Fault::Deadlock, err))?;
            tx.commit().await
        };
        let (mut committed, mut refused) = (0, 0);
        let mut count = |answer: Result<(), Error>| match answer {
            Ok(()) => committed += 1,
            Err(err) if err.is_transient() || err.is_lost() => refused += 1,
            Err(err) => panic!("{err:?}"),
        };
        for round in 0..60 {
            let (before, heir) = (2 * round + 1, 2 * round + 2);
            // The row has the fence of the predecessor when the heir comes.
            count(transaction(&nodes[0], before).await);
            let (one, other) = tokio::join!(transaction(&nodes[0], before), transaction(&nodes[1], heir));
            count(one);
            count(other);
        }
        println!("{committed} committed, {refused} refused");
        assert!(committed >= 60, "{committed}");
        let mut conn = S::caught_up(&S::nodes(&db.url)[1]).await.unwrap();
        let (n,): (i64,) = sqlx::query_as("SELECT n FROM t_counter").fetch_one(&mut conn).await.unwrap();
        assert_eq!(n, committed, "an update was lost");
        let log: Vec<(i64,)> = sqlx::query_as("SELECT fence FROM t_log ORDER BY n").fetch_all(&mut conn).await.unwrap();
        assert!(log.is_sorted(), "{log:?}");
    }
}
