//! Session locks, on the servers that have them, with and without a pooler in between.

use std::thread;
use std::time::{Duration, Instant};

use lockkit::{Error, NamedLock, Session, SessionLock, SessionOps, Wait, with_lock};
use sqlx::{Connection, Pool};
use support::{PgBouncer, Proxy, Server, TestDb, on_databases, on_every_server};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

async fn acquire<DB: SessionOps>(pool: &Pool<DB>, key: &str) -> Session<DB> {
    SessionLock::new(key).wait(PATIENCE).acquire(pool).await.unwrap_or_else(|err| panic!("acquire `{key}`: {err:?}"))
}

async fn is_held<DB: SessionOps>(pool: &Pool<DB>, key: &str) -> bool {
    let taken = SessionLock::new(key).try_acquire(pool).await.expect("an answer");
    let Some(session) = taken else { return true };
    session.release().await.expect("release");
    false
}

#[with_lock(session, on = db, key = "role:{role}", wait = PATIENCE, as = leader)]
async fn lead<DB: SessionOps>(db: &Pool<DB>, role: &str, also: &str) -> Result<bool, Error> {
    assert!(leader.is_alive().await);
    let also = SessionLock::new(also).acquire(db).await?;
    also.release().await?;
    Ok(leader.key().as_str() == format!("role:{role}") && is_held(db, leader.key().as_str()).await)
}

#[with_lock(session, on = db, key = "leader", wait = "0s", on_busy = Ok(false))]
async fn lead_unless_busy<DB: SessionOps>(db: &Pool<DB>) -> Result<bool, Error> {
    Ok(is_held(db, "leader").await)
}

/// Leads until the signal comes, and without one for ever.
#[with_lock(session, on = &db, key = "leader", wait = Wait::Forever)]
async fn lead_until<DB: SessionOps>(
    db: Pool<DB>,
    reached: oneshot::Sender<()>,
    end: oneshot::Receiver<()>,
) -> Result<(), Error> {
    reached.send(()).expect("somebody waits for this");
    end.await.expect("a signal");
    Ok(())
}

/// The one session lock of this database, in the words of the server, and the session that holds it.
fn holder_sql(server: &str) -> (&'static str, &'static str) {
    if server == "PostgreSQL" {
        return (
            "SELECT classid::bigint << 32 | objid::bigint FROM pg_locks JOIN pg_stat_activity USING (pid)
             WHERE locktype = 'advisory' AND datname = current_database()",
            "SELECT pid FROM pg_locks JOIN pg_stat_activity USING (pid)
             WHERE locktype = 'advisory' AND datname = current_database()",
        );
    }
    (
        "SELECT object_name FROM performance_schema.metadata_locks
         JOIN performance_schema.threads ON thread_id = owner_thread_id
         WHERE object_type = 'USER LEVEL LOCK' AND processlist_db = DATABASE()",
        "SELECT processlist_id FROM performance_schema.metadata_locks
         JOIN performance_schema.threads ON thread_id = owner_thread_id
         WHERE object_type = 'USER LEVEL LOCK' AND processlist_db = DATABASE()",
    )
}

/// Ends the session that holds the lock, as an administrator or a restart would.
macro_rules! kill_holder {
    ($db:expr) => {{
        let holder = $db.fetch_i64(holder_sql(S::NAME).1).await.expect("a holder");
        match S::NAME {
            "PostgreSQL" => $db.fetch_text(&format!("SELECT pg_terminate_backend({holder})")).await.map(drop),
            _ => Some($db.execute(&format!("KILL {holder}")).await).map(drop),
        }
        .expect("kill the session");
    }};
}

on_every_server! {
    async fn a_session_lock_excludes_other_processes_until_it_is_released<S>(db: TestDb<S>) {
        let others = db.pool_of(2).await;
        let leader = acquire(&db.pool, "leader").await;
        assert_eq!(*leader.key(), "leader");
        assert!(leader.is_alive().await);

        assert!(SessionLock::new("leader").try_acquire(&others).await.unwrap().is_none());
        let refused = SessionLock::new("leader").wait(Wait::Never).acquire(&others).await.unwrap_err();
        assert!(matches!(&refused, Error::Contended { key, .. } if *key == "leader"), "{refused:?}");

        leader.release().await.unwrap();
        assert!(!is_held(&others, "leader").await);
        db.assert_nothing_left().await;
    }

    async fn a_wait_ends_at_its_bound_and_not_before<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        // Less than a second, which MySQL cannot wait for; and more than the server is told to wait at once.
        for bound in [MILLIS(1), MILLIS(300), MILLIS(1400)] {
            let started = Instant::now();
            let refused = SessionLock::new("leader").wait(bound).acquire(&db.pool).await.unwrap_err();
            assert!(matches!(refused, Error::Contended { waited, .. } if waited >= bound), "{refused:?}");
            assert!(started.elapsed() >= bound);
        }
        leader.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn whoever_waits_gets_the_lock_when_it_is_released<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        let pool = db.pool.clone();
        let waiting = tokio::spawn(async move { SessionLock::new("leader").acquire(&pool).await });
        // Longer than the server is told to wait at once.
        sleep(MILLIS(1300)).await;
        assert!(!waiting.is_finished());
        leader.release().await.unwrap();
        let next = timeout(PATIENCE, waiting).await.expect("it gets the lock").unwrap().unwrap();
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn many_waiters_hold_it_one_at_a_time<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (0)").await;
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                let leader = acquire(&pool, "leader").await;
                // Lost updates would show that two were in here at once.
                let mut conn = pool.acquire().await.unwrap();
                let n = S::fetch_i64(&mut conn, "SELECT n FROM t").await.unwrap().unwrap();
                sleep(MILLIS(20)).await;
                S::execute(&mut conn, &format!("UPDATE t SET n = {}", n + 1)).await.unwrap();
                leader.release().await.unwrap();
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(6));
        db.assert_nothing_left().await;
    }

    // `GET_LOCK` ignores case, takes 64 characters at most on MySQL, and its names belong to the whole server.
    async fn keys_that_differ_in_any_byte_are_different_locks<S>(db: TestDb<S>) {
        let long = "x".repeat(255);
        let mut held = Vec::new();
        for key in ["a", "A", "a ", "é", "e\u{301}", "'; --", &long, &long[..254]] {
            held.push(acquire(&db.pool, key).await);
            assert!(is_held(&db.pool, key).await, "{key:?}");
        }
        for session in held {
            session.release().await.unwrap();
        }
    }

    async fn another_database_on_the_same_server_has_locks_of_its_own<S>(db: TestDb<S>) {
        let other = TestDb::<S>::with_connections(2).await;
        let (ours, theirs) = (acquire(&db.pool, "leader").await, acquire(&other.pool, "leader").await);
        assert!(ours.is_alive().await && theirs.is_alive().await);
        ours.release().await.unwrap();
        theirs.release().await.unwrap();
    }

    async fn a_named_lock_of_the_same_name_is_another_lock<S>(db: TestDb<S>) {
        let session = acquire(&db.pool, "k").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").wait(Wait::Never).lock(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        session.release().await.unwrap();
    }

    async fn a_pool_of_one_connection_is_enough<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        for _ in 0..3 {
            acquire(&pool, "leader").await.release().await.unwrap();
            assert!(!is_held(&pool, "leader").await);
        }
        drop(acquire(&pool, "leader").await);
        acquire(&pool, "leader").await.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    // Both kinds of server grant a lock again to a session that holds it, and unlock it only after as many releases.
    async fn a_session_that_holds_the_lock_already_is_not_granted_it_again<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let session = acquire(&pool, "leader").await;
        let lock = db.fetch_text(holder_sql(S::NAME).0).await.expect("a lock");
        session.release().await.unwrap();

        // Somebody gives a connection back with the lock on it.
        let (take, give_back) = match S::NAME {
            "PostgreSQL" => (format!("SELECT pg_advisory_lock({lock})"), format!("SELECT pg_advisory_unlock({lock})")),
            _ => (format!("SELECT GET_LOCK('{lock}', 0)"), format!("SELECT RELEASE_LOCK('{lock}')")),
        };
        S::execute(&mut *pool.acquire().await.unwrap(), &take).await.unwrap();
        assert!(is_held(&pool, "leader").await, "granted to the pool's connection");
        assert!(is_held(&db.pool, "leader").await);

        S::execute(&mut *pool.acquire().await.unwrap(), &give_back).await.unwrap();
        assert!(!is_held(&pool, "leader").await);
        db.assert_nothing_left().await;
    }

    async fn a_session_that_the_server_ended_is_lost_at_the_next_heartbeat<S>(db: TestDb<S>) {
        let leader = SessionLock::new("leader").heartbeat(MILLIS(50)).acquire(&db.pool).await.unwrap();
        kill_holder!(db);

        timeout(PATIENCE, leader.lost()).await.expect("it is lost");
        assert!(!leader.is_alive().await, "and stays lost");
        timeout(PATIENCE, leader.lost()).await.expect("and says so again");
        let next = acquire(&db.pool, "leader").await;
        let lost = leader.release().await.unwrap_err();
        assert!(matches!(&lost, Error::SessionLost { key, source: Some(_), .. } if *key == "leader"), "{lost:?}");
        assert!(lost.is_lost());
        assert!(next.is_alive().await, "the release of the lost one changed nothing");
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_session_that_the_server_ended_is_not_alive_when_asked<S>(db: TestDb<S>) {
        let leader = SessionLock::new("leader").heartbeat(PATIENCE).acquire(&db.pool).await.unwrap();
        kill_holder!(db);
        assert!(!leader.is_alive().await);
        timeout(PATIENCE, leader.lost()).await.expect("asking found it lost");
        // Nobody has to wait for the old holder to notice.
        acquire(&db.pool, "leader").await.release().await.unwrap();
    }

    async fn a_release_says_when_the_session_had_ended<S>(db: TestDb<S>) {
        let leader = SessionLock::new("leader").heartbeat(PATIENCE).acquire(&db.pool).await.unwrap();
        kill_holder!(db);
        let next = acquire(&db.pool, "leader").await;
        let lost = leader.release().await.unwrap_err();
        assert!(matches!(lost, Error::SessionLost { .. }), "{lost:?}");
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_broken_connection_is_a_lost_lock<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leader = SessionLock::new("leader").heartbeat(MILLIS(50)).acquire(&pool).await.unwrap();
        proxy.reset();
        timeout(PATIENCE, leader.lost()).await.expect("it is lost");
        acquire(&db.pool, "leader").await.release().await.unwrap();
    }

    async fn a_server_that_does_not_answer_is_a_lost_lock<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        let leader = SessionLock::new("leader").heartbeat(MILLIS(50)).acquire(&pool).await.unwrap();
        proxy.stall(true);
        timeout(PATIENCE, leader.lost()).await.expect("it is lost");
        assert!(matches!(leader.release().await, Err(Error::SessionLost { source: Some(_), .. })));
        proxy.stall(false);
        // The server hears of the end of the connection only now.
        acquire(&db.pool, "leader").await.release().await.unwrap();
    }

    async fn a_session_that_lives_is_never_lost<S>(db: TestDb<S>) {
        let leader = SessionLock::new("leader").heartbeat(MILLIS(5)).acquire(&db.pool).await.unwrap();
        let asking = async {
            for round in 0..100 {
                // Some stop listening half-way, which must not spoil the connection.
                let _ = timeout(MILLIS(round % 3), leader.is_alive()).await;
            }
            let (one, two, three) = tokio::join!(leader.is_alive(), leader.is_alive(), leader.is_alive());
            assert!(one && two && three);
        };
        tokio::select! {
            () = leader.lost() => panic!("lost"),
            () = asking => {}
        }
        leader.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_dropped_session_frees_its_lock<S>(db: TestDb<S>) {
        drop(acquire(&db.pool, "leader").await);
        let next = acquire(&db.pool, "leader").await;
        // On a thread that knows no runtime, too.
        thread::spawn(move || drop(next)).join().expect("no panic");
        acquire(&db.pool, "leader").await.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_session_whose_runtime_is_gone_has_freed_its_lock<S>(db: TestDb<S>) {
        let url = db.url.clone();
        let orphan = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let pool = Pool::<<S as Server>::DB>::connect(&url).await.expect("connect");
                acquire(&pool, "leader").await
            })
        });
        let orphan = orphan.join().expect("no panic");
        acquire(&db.pool, "leader").await.release().await.unwrap();
        timeout(PATIENCE, orphan.lost()).await.expect("it is lost");
        assert!(!orphan.is_alive().await);
        assert!(orphan.release().await.is_err());
    }

    async fn what_cannot_work_is_refused_before_anything_is_locked<S>(db: TestDb<S>) {
        let refused = SessionLock::new("").acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidKey { .. }), "{refused:?}");
        let refused = SessionLock::new("k").heartbeat(Duration::ZERO).acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "heartbeat", .. }), "{refused:?}");
        let refused = SessionLock::new("k").wait(Duration::MAX).acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "wait", .. }), "{refused:?}");
    }

    async fn an_attribute_holds_it_while_the_body_runs<S>(db: TestDb<S>) {
        assert!(lead(&db.pool, "cook", "waiter").await.unwrap());
        assert!(!is_held(&db.pool, "role:cook").await);
        let failed = lead(&db.pool, "cook", "").await.unwrap_err();
        assert!(matches!(failed, Error::InvalidKey { .. }), "{failed:?}");
        assert!(!is_held(&db.pool, "role:cook").await);

        assert!(lead_unless_busy(&db.pool).await.unwrap());
        let leader = acquire(&db.pool, "leader").await;
        assert!(!lead_unless_busy(&db.pool).await.unwrap());
        leader.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn an_attribute_stops_the_body_when_the_lock_is_lost<S>(db: TestDb<S>) {
        let (reached, here) = oneshot::channel();
        let (_never, end) = oneshot::channel();
        let leading = tokio::spawn(lead_until(db.pool.clone(), reached, end));
        here.await.unwrap();
        kill_holder!(db);
        let lost = timeout(PATIENCE, leading).await.expect("it is stopped").unwrap().unwrap_err();
        assert!(matches!(&lost, Error::SessionLost { key, .. } if *key == "leader"), "{lost:?}");
        db.assert_nothing_left().await;
    }

    async fn an_attribute_says_when_the_lock_was_lost_just_before_the_end<S>(db: TestDb<S>) {
        let (reached, here) = oneshot::channel();
        let (signal, end) = oneshot::channel();
        let leading = tokio::spawn(lead_until(db.pool.clone(), reached, end));
        here.await.unwrap();
        kill_holder!(db);
        let next = acquire(&db.pool, "leader").await;
        // Most often before the heartbeat.
        let _ = signal.send(());
        let lost = leading.await.unwrap().unwrap_err();
        assert!(matches!(lost, Error::SessionLost { .. }), "{lost:?}");
        next.release().await.unwrap();
    }

    async fn a_dropped_function_under_an_attribute_frees_it<S>(db: TestDb<S>) {
        let (reached, here) = oneshot::channel();
        let (_never, end) = oneshot::channel();
        tokio::select! {
            ended = lead_until(db.pool.clone(), reached, end) => panic!("{ended:?}"),
            here = here => here.unwrap(),
        }
        acquire(&db.pool, "leader").await.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_wait_for_a_connection_counts_too<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let taken = pool.acquire().await.unwrap();
        let refused = SessionLock::new("k").wait(MILLIS(100)).acquire(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::PoolStarved { held: 1, size: 1, .. }), "{refused:?}");
        drop(taken);
        assert!(!is_held(&pool, "k").await);
    }
}

on_databases! {
    [postgres]

    // A bound that a session keeps would make later statements of the pool's users fail.
    async fn the_bound_of_a_wait_does_not_stay_on_the_connection<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        let pool = db.pool_of(1).await;
        SessionLock::new("leader").wait(MILLIS(50)).acquire(&pool).await.unwrap_err();
        let mut conn = pool.acquire().await.unwrap();
        assert_eq!(S::fetch_text(&mut conn, "SHOW lock_timeout").await.unwrap().as_deref(), Some("0"));
        drop(conn);
        leader.release().await.unwrap();
        acquire(&pool, "leader").await.release().await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        assert_eq!(S::fetch_text(&mut conn, "SHOW lock_timeout").await.unwrap().as_deref(), Some("0"));
    }

    async fn behind_a_pooler_in_transaction_mode_it_is_refused_and_nothing_is_locked<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "transaction");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        for _ in 0..10 {
            // Two looks at the session see the same one while nobody else is there, so they prove nothing.
            let mut conn = pool.acquire().await.unwrap();
            let mut look = async || S::fetch_i64(&mut conn, "SELECT pg_backend_pid()").await.unwrap();
            assert_eq!(look().await, look().await);
            drop(conn);

            let refused = SessionLock::new("leader").wait(PATIENCE).acquire(&pool).await.unwrap_err();
            assert!(matches!(&refused, Error::TransactionPooler { key, .. } if *key == "leader"), "{refused:?}");
            let refused = SessionLock::new("leader").try_acquire(&pool).await.unwrap_err();
            assert!(matches!(refused, Error::TransactionPooler { .. }), "{refused:?}");
            println!("{refused}");
        }
        assert!(!is_held(&db.pool, "leader").await);
        db.assert_nothing_left().await;
    }

    async fn it_is_refused_there_while_others_use_the_pooler_too<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "transaction");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        let mut others = JoinSet::new();
        for _ in 0..4 {
            let url = pooler.url().to_owned();
            others.spawn(async move {
                let mut conn = <<S as Server>::DB as sqlx::Database>::Connection::connect(&url).await.unwrap();
                loop {
                    S::execute(&mut conn, "SELECT 1").await.unwrap();
                }
            });
        }
        let mut refused = 0;
        for _ in 0..100 {
            match SessionLock::new("leader").try_acquire(&pool).await {
                Err(Error::TransactionPooler { .. }) => refused += 1,
                other => println!("not refused: {other:?}"),
            }
        }
        others.shutdown().await;
        assert_eq!(refused, 100);
        db.assert_nothing_left().await;
    }

    async fn behind_a_pooler_in_session_mode_it_works<S>(db: TestDb<S>) {
        let pooler = PgBouncer::start(&db.url, "session");
        let pool = Pool::<<S as Server>::DB>::connect(pooler.url()).await.unwrap();
        let leader = acquire(&pool, "leader").await;
        assert!(leader.is_alive().await);
        assert!(is_held(&pool, "leader").await && is_held(&db.pool, "leader").await);
        leader.release().await.unwrap();

        drop(acquire(&pool, "leader").await);
        acquire(&db.pool, "leader").await.release().await.unwrap();
        drop(pool);
        drop(pooler);
        db.assert_nothing_left().await;
    }
}
