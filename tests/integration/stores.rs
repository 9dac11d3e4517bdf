//! Every store of leases keeps the promises of `LeaseStore`: the pools of all databases, and the one in memory.

use lockkit::testing::{MemoryStore, Oracle, conformance};
use lockkit::{Leases, Released};
use support::{JoinSet, TestDb, on_every_database};

on_every_database! {
    async fn a_pool_keeps_every_promise_of_a_store<S>(db: TestDb<S>) {
        let kept = conformance::run(async || db.pool.clone()).await;
        println!("{} keeps {kept} promises", <S as support::Server>::NAME);
        db.assert_nothing_left().await;
    }

    async fn the_oracle_sees_no_two_holders<S>(db: TestDb<S>) {
        let oracle = Oracle::new();
        let mut working = JoinSet::new();
        for _ in 0..4 {
            // As if each were a process.
            let leases = Leases::builder(oracle.watch(db.pool.clone()))
                .wait(std::time::Duration::from_secs(60))
                .build()
                .unwrap();
            let oracle = oracle.clone();
            working.spawn(async move {
                for _ in 0..10 {
                    let lease = leases.lease("k").acquire().await.unwrap();
                    let held = oracle.hold(&lease);
                    tokio::task::yield_now().await;
                    drop(held);
                    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        working.join_all().await;
        let held = oracle.assert_exclusive();
        assert!(held >= 80, "40, each seen by the store and by its holder, and tickets of those who waited: {held}");
    }
}

#[tokio::test]
async fn the_store_in_memory_keeps_every_promise_in_real_time() {
    conformance::run(async || MemoryStore::new()).await;
}

#[tokio::test]
async fn a_function_under_the_attribute_is_under_its_lock() {
    #[lockkit::with_lock(lease, on = leases, key = "order:{id}")]
    async fn order(leases: &Leases<MemoryStore>, id: u32) -> lockkit::Result<()> {
        lockkit::assert_locked!(format!("order:{id}"));
        Ok(())
    }
    order(&Leases::new(MemoryStore::new()), 7).await.unwrap();
}

on_every_database! {
    async fn a_transaction_under_the_attribute_is_under_its_lock<S>(db: TestDb<S>) {
        use lockkit::{Error, assert_locked, with_lock};
        type Pool = sqlx::Pool<<S as support::Server>::DB>;

        #[with_lock(named, on = pool, key = "user:{id}", tx = _tx)]
        async fn named(pool: &Pool, id: u32) -> Result<(), Error> {
            assert_locked!(format!("user:{id}"));
            Ok(())
        }
        #[with_lock(row, on = pool, table = "t", by(id = 1_i64), attempts = 2, tx = _tx)]
        async fn row(pool: &Pool) -> Result<(), Error> {
            assert_locked!("t");
            Ok(())
        }
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY)").await;
        db.execute("INSERT INTO t VALUES (1)").await;
        named(&db.pool, 7).await.unwrap();
        row(&db.pool).await.unwrap();
    }
}

#[tokio::test]
#[should_panic(expected = "not under the lock of `order:8`: it is under `order:7`")]
async fn a_function_under_another_lock_is_told_which() {
    #[lockkit::with_lock(lease, on = leases, key = "order:{id}")]
    async fn order(leases: &Leases<MemoryStore>, id: u32) -> lockkit::Result<()> {
        lockkit::assert_locked!(format!("order:{}", id + 1));
        Ok(())
    }
    order(&Leases::new(MemoryStore::new()), 7).await.unwrap();
}
