//! Servers that do not answer, and connections that die without a word.

use std::{error::Error as _, time::Duration};

use lockkit::testing::{Failure, MemoryStore, Operation};
use lockkit::{Error, Fault, Leases, LossReason, NamedLock};
use sqlx::pool::PoolOptions;
use support::{Proxy, Server, TestDb, on_every_server, spawn};
use tokio::time::{Instant, sleep};

const TTL: Duration = Duration::from_secs(2);

/// Has leases held, acquired, dropped and released when all connections become half-open, then asks for another one.
async fn recovers<S: support::Backend>(db: &TestDb<S>, connections: u32, own: Option<u32>) {
    let proxy = Proxy::start(&db.url);
    let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(connections).connect(proxy.url()).await.unwrap();
    let mut leases = Leases::builder(pool.clone()).ttl(TTL);
    if let Some(own) = own {
        leases = leases.own_connections(own);
    }
    let leases = leases.build().unwrap();
    let mut held = Vec::new();
    for number in 0..4 {
        held.push(leases.lease(format!("k:{number}")).acquire().await.unwrap());
    }
    // The moment at which statements are on their way differs from run to run, so several are.
    let asking = spawn(leases.lease("k:0").wait(TTL * 3).acquire());
    sleep(Duration::from_millis(30)).await;
    proxy.half_open();
    drop(held.pop());
    let releasing = spawn(held.pop().unwrap().release());
    sleep(TTL / 2).await;

    let back = Instant::now();
    let lease = leases.lease("fresh").wait(TTL).acquire().await;
    println!("{}, pool of {connections}, own {own:?}: {:?} to the next lease", S::NAME, back.elapsed());
    lease.expect("the first acquire succeeds within one ttl").release().await.unwrap();
    drop(asking.await);
    drop(releasing.await);
}

on_every_server! {
    async fn a_pool_of_one_recovers_from_half_open_connections<S>(db: TestDb<S>) {
        recovers(&db, 1, None).await;
    }

    async fn a_pool_of_two_recovers_from_half_open_connections<S>(db: TestDb<S>) {
        recovers(&db, 2, None).await;
    }

    async fn connections_of_ones_own_recover_from_being_half_open<S>(db: TestDb<S>) {
        recovers(&db, 1, Some(2)).await;
    }

    async fn a_server_that_does_not_answer_is_no_small_pool<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(1).connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool);
        proxy.stall(true);
        let silent = leases.lease("k").wait(Duration::from_secs(1)).acquire().await.unwrap_err();
        assert!(matches!(silent, Error::Database { fault: Fault::Unavailable, .. }), "{silent:?}");
        assert!(!leases.health().is_ready());
        proxy.stall(false);
        leases.lease("k").wait(Duration::from_secs(30)).acquire().await.unwrap().release().await.unwrap();
        assert!(leases.health().is_ready());
    }

    async fn a_server_that_does_not_answer_is_no_other_holder_of_a_name<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(1).connect(proxy.url()).await.unwrap();
        let mut tx = lockkit::begin(&pool).await.unwrap();
        proxy.stall(true);
        let silent = NamedLock::new("k").wait(Duration::from_secs(1)).lock(&mut tx).await.unwrap_err();
        assert!(matches!(silent, Error::Database { fault: Fault::Unavailable, .. }), "{silent:?}");
    }

    async fn a_transaction_on_a_silent_connection_begins_within_the_bound_of_the_pool_or_not_at_all<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(1).acquire_timeout(Duration::from_secs(1));
        let pool = pool.test_before_acquire(false).connect(proxy.url()).await.unwrap();
        // Asks the server what it is.
        lockkit::begin(&pool).await.unwrap().rollback().await.unwrap();
        // Its pool pings it once more.
        while pool.num_idle() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        proxy.stall(true);
        let silent = lockkit::begin(&pool).await.unwrap_err();
        assert!(matches!(silent, Error::Database { fault: Fault::Unavailable, .. }), "{silent:?}");
    }

    async fn a_lease_is_renewed_beside_a_full_pool_however_often_it_is<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let leases = Leases::builder(pool.clone()).ttl(TTL).renew_every(Duration::from_millis(50)).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let all = pool.acquire().await.unwrap();
        sleep(3 * TTL).await;
        assert!(lease.is_trusted());
        drop(all);
    }

    async fn a_row_that_an_unanswered_claim_may_have_locked_is_no_sign_of_another_holder<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(2).connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool);
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        // A server that waits for its replicas in COMMIT locks the row of a claim like this.
        let lock = async || {
            let mut locked = lockkit::begin(&db.pool).await.unwrap();
            S::execute(&mut locked, "SELECT 1 FROM lockkit_lease WHERE name = 'k' FOR UPDATE").await.unwrap();
            locked
        };
        let refused = async || leases.lease("k").wait(Duration::from_secs(1)).acquire().await.unwrap_err();
        let locked = lock().await;
        assert!(refused().await.is_contended(), "each claim was answered");
        drop(locked);
        proxy.stall(true);
        assert!(matches!(refused().await, Error::Database { fault: Fault::Unavailable, .. }));
        let locked = lock().await;
        proxy.reset();
        proxy.stall(false);
        leases.lease("other").wait(Duration::from_secs(30)).acquire().await.unwrap().release().await.unwrap();
        for err in [refused().await, leases.lease("k").try_acquire().await.unwrap_err()] {
            assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
            let source = err.source().expect("a source").to_string();
            assert!(source.contains("an earlier call of this process, which got no answer"), "{source}");
        }
        drop(locked);
        leases.lease("k").wait(Duration::from_secs(30)).acquire().await.unwrap().release().await.unwrap();
        let locked = lock().await;
        assert!(refused().await.is_contended(), "a claim was granted since");
        drop(locked);
    }
}

#[tokio::test(start_paused = true)]
async fn silence_is_an_outage_and_no_failure_to_renew() {
    let leases = Leases::new(MemoryStore::new());
    let lease = leases.lease("k").acquire().await.unwrap();
    leases.store().faults().script(Operation::Renew, [Failure::Silent; 100]);
    assert_eq!(lease.lost().await, LossReason::Unreachable);
}

#[tokio::test(start_paused = true)]
async fn several_leases_keep_their_wait_though_the_holder_is_not_found() {
    let store = MemoryStore::new();
    let others = Leases::new(store.client());
    let _held = others.lease("b").acquire().await.unwrap();
    let leases = Leases::new(store);
    leases.store().faults().script(Operation::Look, [Failure::Silent]);
    let started = Instant::now();
    let refused = leases.all(["a", "b"]).wait(Duration::from_secs(2)).acquire().await.unwrap_err();
    assert!(refused.is_contended(), "{refused:?}");
    assert!(started.elapsed() < Duration::from_millis(2100), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_an_answer_is_asked_again() {
    let leases = Leases::new(MemoryStore::new());
    leases.store().faults().script(Operation::Acquire, [Failure::Silent]);
    let lease = leases.lease("k").wait(Duration::from_secs(30)).acquire().await.unwrap();
    assert!(lease.is_trusted());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_granted_late_is_renewed_in_time() {
    for round in 0..20 {
        let leases = Leases::builder(MemoryStore::new()).ttl(Duration::from_secs(3)).build().unwrap();
        let late = [Failure::Slow(Duration::from_millis(1400))];
        leases.store().faults().script(Operation::Acquire, late);
        leases.store().faults().script(Operation::Renew, [Failure::Slow(Duration::from_millis(700)); 2]);
        let lease = leases.lease("k").acquire().await.unwrap();
        leases.store().faults().script(Operation::Acquire, late);
        let several = leases.all(["a", "b"]).acquire().await.unwrap();
        sleep(Duration::from_secs(10)).await;
        assert!(lease.is_trusted() && several.is_trusted(), "round {round}");
    }
}
