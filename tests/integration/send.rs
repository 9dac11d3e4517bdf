//! Every public future can be spawned: it is `Send`, on every database.

use std::time::Duration;

use lockkit::{Error, Leases, NamedLock, Policy, RowLock, SessionLock, Stock, VersionedRow, VersionedStruct};
use support::{TestDb, on_every_database, on_every_server};

fn is_send<T: Send>(_: T) {}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t", key = "n")]
struct Item {
    n: i64,
    version: i64,
}

on_every_database! {
    async fn every_public_future_is_send<S>(db: TestDb<S>) {
        // Made, never polled; the leases and transactions that some of them need are real.
        let leases = Leases::new(db.pool.clone());
        is_send(lockkit::migrate(&db.pool));
        is_send(leases.migrate());
        is_send(leases.show("k"));
        is_send(leases.list("k"));
        is_send(leases.steal("k"));
        is_send(leases.close());
        is_send(leases.lease("k").acquire());
        is_send(leases.lease("k").try_acquire());
        is_send(leases.lease("k").run(|_| async { Ok::<_, Error>(()) }));

        let lease = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        is_send(lease.lost());
        is_send(lease.extend(Duration::from_secs(1)));
        is_send(lease.verify(&mut tx));
        is_send(RowLock::table("t").by("n", 1_i64).lock(&mut *tx));
        is_send(RowLock::table("t").by("n", 1_i64).fetch_one::<(i64,)>(&mut *tx));
        is_send(RowLock::table("t").by("n", 1_i64).fetch_optional::<(i64,)>(&mut *tx));
        is_send(RowLock::table("t").by("n", 1_i64).fetch_all::<(i64,)>(&mut *tx));
        is_send(NamedLock::new("k").lock(&mut *tx));
        let name = NamedLock::new("k");
        is_send(name.holder(&mut *tx));
        is_send(name.holder(&db.pool));
        is_send(VersionedRow::table("t").by("n", 1_i64).read::<(i64,)>(&mut *tx));
        is_send(VersionedRow::table("t").by("n", 1_i64).bump(&mut *tx));
        is_send(Item::load(&db.pool, 1));
        is_send(Item::load(&mut *tx, 1));
        is_send(Item { n: 1, version: 1 }.save(&db.pool));
        is_send(Item { n: 1, version: 1 }.save(&mut *tx));
        is_send(VersionedStruct::save(&mut Item { n: 1, version: 1 }, &mut *tx));
        is_send(VersionedRow::table("t").by("n", 1_i64).delete(&mut *tx));
        is_send(Item { n: 1, version: 1 }.delete(&db.pool));
        is_send(Item { n: 1, version: 1 }.delete(&mut *tx));
        is_send(VersionedStruct::delete(&Item { n: 1, version: 1 }, &mut *tx));
        let stock = Stock::new(db.pool.clone(), "k");
        is_send(stock.take_in(&mut *tx, 1));
        is_send(lease.commit(tx));
        is_send(stock.put(1));
        is_send(stock.take(1));
        is_send(stock.left());
        is_send(stock.rebalance());

        db.execute("CREATE TABLE t (n BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 1)").await;
        let mut item = Item { n: 1, version: 1 };
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send(saved.save(&mut *tx));
        let saved = item.save(&mut *tx).await.unwrap_err();
        assert!(saved.is_conflict());
        drop(tx);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send(saved.delete(&mut *tx));
        drop(tx);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send(saved.commit(tx));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = VersionedRow::table("t").by("n", 1_i64).expect(1).bump(&mut *tx).await.unwrap();
        is_send(bumped.commit(tx));

        is_send(lockkit::begin(&db.pool));
        is_send(lockkit::begin(&db.pool).await.unwrap().commit());
        is_send(lockkit::begin(&db.pool).await.unwrap().rollback());
        is_send(leases.lease("l").acquire().await.unwrap().release());
        is_send(Policy::new().retry(|_| async { Ok::<_, Error>(()) }));
        is_send(Policy::new().retry_if(|_: &Error| true, |_| async { Ok::<_, Error>(()) }));
    }
}

on_every_server! {
    async fn every_public_future_of_session_locks_is_send<S>(db: TestDb<S>) {
        is_send(SessionLock::new("k").acquire(&db.pool));
        is_send(SessionLock::new("k").try_acquire(&db.pool));
        let lock = SessionLock::new("k");
        is_send(lock.holder(&db.pool));
        let session = SessionLock::new("k").acquire(&db.pool).await.unwrap();
        is_send(session.is_alive());
        is_send(session.lost());
        is_send(session.release());
    }
}
