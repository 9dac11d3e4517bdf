//! The connections that leases and takes keep for a moment.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use lockkit::{Leases, Stock};
use sqlx::Row;
use sqlx::pool::PoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use support::{JoinSet, Proxy, Server, TestDb, on_every_server};

on_every_server! {
    async fn leases_one_after_the_other_cost_few_round_trips_beside_their_statements<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(2).connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool);
        let mut least = u64::MAX;
        for _ in 0..4 {
            let before = proxy.round_trips();
            for _ in 0..10 {
                leases.lease("k").acquire().await.unwrap().release().await.unwrap();
            }
            least = least.min(proxy.round_trips() - before);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        // With the ping of an idle connection. Statements that are given theirs by the pool cost three each.
        assert!(least <= 25, "{least} round trips for 20 statements on {}", S::NAME);
    }

    async fn a_kept_connection_that_has_died_costs_a_claim_no_more_than_time<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(3).connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool);
        for _ in 0..20 {
            let one = leases.lease("one").try_acquire().await.unwrap().unwrap();
            proxy.reset();
            tokio::time::sleep(Duration::from_millis(1)).await;
            let other = leases.lease("other").try_acquire().await.unwrap().unwrap();
            other.release().await.unwrap();
            one.release().await.unwrap();
        }
    }

    async fn takes_one_after_the_other_cost_few_round_trips_beside_their_statements<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(2).connect(proxy.url()).await.unwrap();
        let stock = Stock::new(pool, "stock");
        stock.put(100).await.unwrap();
        let mut least = u64::MAX;
        for _ in 0..4 {
            let before = proxy.round_trips();
            for _ in 0..10 {
                stock.take(1).await.unwrap();
            }
            least = least.min(proxy.round_trips() - before);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        assert!(least <= 13, "{least} round trips for 10 takes on {}", S::NAME);
    }

    async fn takes_on_kept_connections_that_have_died_are_told_what_became_of_them<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(3).connect(proxy.url()).await.unwrap();
        let stock = Stock::new(pool, "stock");
        stock.put(1000).await.unwrap();
        let (mut taken, mut unknown) = (0, 0);
        for _ in 0..10 {
            // The first of them goes alone, the second may be alone in its batch, and the others share a statement.
            for is_dead in [false, true] {
                let mut takes = JoinSet::new();
                for _ in 0..8 {
                    let stock = stock.clone();
                    takes.spawn(async move { stock.take(1).await });
                }
                let answers = takes.join_all().await;
                let failed = answers.iter().filter(|it| it.is_err()).count() as u64;
                assert!(failed <= if is_dead { 2 } else { 0 }, "{answers:?}");
                (taken, unknown) = (taken + 8 - failed, unknown + failed);
                proxy.reset();
                if is_dead {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        let gone = 1000 - stock.left().await.unwrap();
        assert!((taken..=taken + unknown).contains(&gone), "{gone} gone, {taken} taken, {unknown} not known");
        db.assert_nothing_left().await;
    }

    async fn a_pool_that_is_full_gets_its_connections_back<S>(db: TestDb<S>) {
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(3);
        let pool = options.acquire_timeout(Duration::from_secs(2)).connect(&db.url).await.unwrap();
        let leases = Leases::new(pool.clone());
        for _ in 0..20 {
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
            let (one, other, third) = tokio::join!(pool.acquire(), pool.acquire(), pool.acquire());
            drop((one.unwrap(), other.unwrap(), third.unwrap()));
        }
    }

    async fn a_transaction_has_the_settings_of_its_own_checkout<S>(db: TestDb<S>) {
        // As with a setting for the tenant of a request: the pool sets it for whoever borrows a connection.
        let tenant = Arc::new(AtomicU32::new(0));
        let set = |tenant: u32| match S::NAME {
            "PostgreSQL" => format!("SELECT set_config('app.tenant', '{tenant}', false)"),
            _ => format!("SET @tenant = {tenant}"),
        };
        let get = if S::NAME == "PostgreSQL" { "SELECT current_setting('app.tenant')" } else { "SELECT @tenant" };
        let (on_connect, on_acquire) = (tenant.clone(), tenant.clone());
        let pool = PoolOptions::<<S as Server>::DB>::new()
            .max_connections(4)
            .after_connect(move |conn, _| {
                let sql = set(on_connect.load(Relaxed));
                Box::pin(async move { S::execute(conn, &sql).await.map(drop) })
            })
            .before_acquire(move |conn, _| {
                let sql = set(on_acquire.load(Relaxed));
                Box::pin(async move { S::execute(conn, &sql).await.map(|_| true) })
            })
            .connect(&db.url);
        let pool = pool.await.unwrap();
        let leases = Leases::new(pool.clone());
        for now in 1..20 {
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
            tenant.store(now, Relaxed);
            let mut tx = lockkit::begin(&pool).await.unwrap();
            assert_eq!(S::fetch_i64(&mut tx, get).await.unwrap(), Some(i64::from(now)));
            tx.rollback().await.unwrap();
        }
    }

    async fn a_claim_that_nobody_polls_returns_its_connection<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(1);
        let pool = options.acquire_timeout(Duration::from_secs(2)).connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool.clone()).own_connections(0).build().unwrap();
        leases.lease("another").acquire().await.unwrap().release().await.unwrap();
        let mut acquiring = pin!(leases.lease("not polled").acquire());
        proxy.hold_replies_to("not polled");
        tokio::select! {
            biased;
            _ = &mut acquiring => panic!("the reply is held back"),
            () = proxy.replies_are_held() => proxy.pass_replies(),
        }
        pool.acquire().await.unwrap();
        acquiring.await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_connection_of_sqlite_returns_with_its_own_busy_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let own = Duration::from_millis(1234);
    let options = SqliteConnectOptions::new().filename(folder.path().join("db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(2).connect_with(options.busy_timeout(own)).await.unwrap();
    lockkit::migrate(&pool).await.unwrap();
    let leases = Leases::new(pool.clone());
    for _ in 0..20 {
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        let (mut one, mut other) = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
        for conn in [&mut *one, &mut *other] {
            let waits: i64 = sqlx::query("PRAGMA busy_timeout").fetch_one(conn).await.unwrap().get(0);
            assert_eq!(waits, 1234);
        }
    }
}
