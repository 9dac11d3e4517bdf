//! One rule for the wait of every lock: as long as it is told, and 10 s where it is not told.

use std::time::Duration;

use lockkit::testing::MemoryStore;
use lockkit::{Error, Leases, NamedLock, RowLock, SessionLock, Stock, Wait, with_lock};
use support::{Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::time::Instant;

const DEFAULT: Duration = Duration::from_secs(10);

/// How long the caller was told that it waited.
fn waited<T>(answer: Result<T, Error>) -> Duration {
    match answer {
        Err(Error::Contended { waited, .. }) => waited,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was let in"),
    }
}

/// Waits that nobody has bounded, side by side.
macro_rules! assert_all_wait_for_the_default {
    ($($what:literal: $asking:expr),+ $(,)?) => {
        let answers = tokio::join!($(async { waited($asking) }),+);
        let answers: &[Duration] = &<[Duration; _]>::from(answers);
        for (what, waited) in [$($what),+].iter().zip(answers) {
            assert!(*waited >= DEFAULT, "{what} waited for {waited:?} only");
        }
    };
}

#[test]
fn the_default_is_stated_once() {
    assert_eq!(Wait::DEFAULT, Wait::AtMost(DEFAULT));
    assert_eq!(Wait::default(), Wait::DEFAULT);
}

#[tokio::test(start_paused = true)]
async fn every_request_for_a_lease_waits_for_the_default() {
    let leases = Leases::new(MemoryStore::new());
    let held = leases.all(["k", "k/permit/0", "k/writer"]).acquire().await.unwrap();
    let (started, asked) = (Instant::now(), leases.clone());
    let requests = [
        spawn(asked.lease("k").acquire()),
        spawn(asked.lease("k").fair().acquire()),
        spawn(asked.semaphore("k", 1).acquire()),
        spawn(asked.rw("k").read().acquire()),
        spawn(asked.rw("k").write().acquire()),
    ];
    let several = [spawn(asked.all(["j", "k"]).acquire()), spawn(asked.semaphore("k", 1).take(1).acquire())];
    for request in requests {
        assert_eq!(waited(request.await.unwrap()).as_secs(), 10);
    }
    for request in several {
        assert_eq!(waited(request.await.unwrap()).as_secs(), 10);
    }
    assert_eq!(started.elapsed().as_secs(), 10);
    held.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_waited_for_without_end_where_that_is_asked_for() {
    const DAY: Duration = Duration::from_hours(24);
    let builder = |store| Leases::builder(store).ttl(DAY).wait(Wait::Unbounded).sweep_every(None).build().unwrap();
    let store = MemoryStore::new();
    let leases = builder(store.clone());
    let held = leases.all(["a", "b"]).acquire().await.unwrap();
    let waiting =
        [spawn(leases.lease("a").acquire()), spawn(Leases::new(store).lease("b").wait(Wait::Unbounded).acquire())];
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(waiting.iter().all(|it| !it.is_finished()));
    held.release().await.unwrap();
    for it in waiting {
        it.await.unwrap().unwrap().release().await.unwrap();
    }
}

on_every_database! {
    async fn every_lock_in_a_transaction_waits_for_the_default<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(row, on = pool, table = "t", by(id = 1_i64), tx = _tx)]
        async fn row(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        #[with_lock(named, on = pool, key = "k", tx = _tx)]
        async fn named(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY)").await;
        db.execute("INSERT INTO t VALUES (1)").await;
        let stock = Stock::new(db.pool.clone(), "s").segments(1);
        stock.put(1).await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("t").by("id", 1_i64).lock(&mut *tx).await.unwrap();
        NamedLock::new("k").lock(&mut *tx).await.unwrap();
        stock.take_in(&mut *tx, 1).await.unwrap();
        let (pool, others) = (&db.pool, db.pool_of(6).await);
        assert_all_wait_for_the_default! {
            "a row lock": async {
                let mut tx = lockkit::begin(pool).await?;
                RowLock::table("t").by("id", 1_i64).lock(&mut *tx).await
            }.await,
            "a named lock": async {
                let mut tx = lockkit::begin(pool).await?;
                NamedLock::new("k").lock(&mut *tx).await
            }.await,
            "a row lock of the attribute": row(&others).await,
            "a named lock of the attribute": named(&others).await,
        }
        tx.rollback().await.unwrap();
        row(&others).await.unwrap();
        named(&others).await.unwrap();
        stock.take(1).await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_deadline_alone_bounds_the_wait<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(named, on = pool, key = "k", deadline = "300ms", tx = _tx)]
        async fn short(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").lock(&mut *tx).await.unwrap();
        match short(&db.pool).await.unwrap_err() {
            Error::Contended { waited, .. } => assert!(waited < DEFAULT, "{waited:?}"),
            Error::RetriesExhausted { elapsed, .. } => assert!(elapsed < DEFAULT, "{elapsed:?}"),
            other => panic!("{other}"),
        }
        tx.rollback().await.unwrap();
    }
}

on_every_server! {
    async fn a_session_lock_waits_for_the_default<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(session, on = pool, key = "k")]
        async fn session(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        let held = SessionLock::new("k").acquire(&db.pool).await.unwrap();
        assert_all_wait_for_the_default! {
            "a session lock": SessionLock::new("k").acquire(&db.pool).await,
            "a session lock of the attribute": session(&db.pool).await,
        }
        held.release().await.unwrap();
        session(&db.pool).await.unwrap();
    }

    async fn a_deadline_longer_than_the_default_bounds_the_wait<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(named, on = pool, key = "k", deadline = "12s", tx = _tx)]
        async fn long(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").lock(&mut *tx).await.unwrap();
        match long(&db.pool).await.unwrap_err() {
            Error::Contended { waited, .. } => assert!(waited > DEFAULT, "{waited:?}"),
            Error::RetriesExhausted { elapsed, .. } => assert!(elapsed > DEFAULT, "{elapsed:?}"),
            other => panic!("{other}"),
        }
        tx.rollback().await.unwrap();
    }
}

on_databases! {
    [sqlite]
    async fn beginning_waits_for_the_write_lock_for_the_default<S>(db: TestDb<S>) {
        let tx = lockkit::begin(&db.pool).await.unwrap();
        assert!(waited(lockkit::begin(&db.pool).await) >= DEFAULT);
        tx.rollback().await.unwrap();
        // The connection's own bound is as before.
        assert_eq!(db.fetch_i64("PRAGMA busy_timeout").await, Some(5000));
    }
}
