//! Advisory locks of `PostgreSQL` that are shared with other programs, by their numbers.

use lockkit::{Error, SessionLock};
use sqlx::PgPool;
use support::{PlainSql, Postgres, Server, TestDb, on_databases, spawn};
use tokio::time::{sleep, timeout};

use super::{MILLIS, PATIENCE};

/// Locks, and the arguments of the functions with which another program takes them.
fn locks() -> Vec<(SessionLock, String)> {
    let mut locks = vec![
        // Those of Rails and of `with_advisory_lock`, as `docs/stores.md` has them.
        (SessionLock::raw(5_843_596_595_875_314_990), "2053462845 * 2845727942".to_owned()),
        (SessionLock::raw2(1_781_477_269, 0), "1781477269, 0".to_owned()),
    ];
    for number in [0, 1, -1, i64::MIN, i64::MAX, 1 << 32, -(1 << 32)] {
        locks.push((
            SessionLock::raw(number),
            if number < 0 { format!("({number})::bigint") } else { number.to_string() },
        ));
    }
    for (first, second) in [(0, 0), (0, 1), (1, 0), (-1, 1), (1, -1), (i32::MIN, i32::MAX), (i32::MAX, i32::MIN)] {
        locks.push((SessionLock::raw2(first, second), format!("({first})::int, ({second})::int")));
    }
    // -9223372036854775808 is the negative of a number that is no bigint.
    for (_, arguments) in &mut locks {
        *arguments = arguments.replace("(-9223372036854775808)::bigint", "'-9223372036854775808'::bigint");
        *arguments = arguments.replace("(-2147483648)::int", "'-2147483648'::int");
    }
    locks
}

async fn try_acquire(lock: &SessionLock, pool: &PgPool) -> Option<lockkit::Session<sqlx::Postgres>> {
    lock.clone().try_acquire(pool).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_number_excludes_other_programs_and_is_excluded_by_them() {
    let db = TestDb::<Postgres>::new().await;
    let mut other = db.connect().await;
    let pid: i64 = Postgres::fetch_i64(&mut other, "SELECT pg_backend_pid()").await.unwrap().unwrap();
    for (lock, arguments) in locks() {
        let (take, release) =
            (format!("SELECT pg_try_advisory_lock({arguments})"), format!("SELECT pg_advisory_unlock({arguments})"));
        assert_eq!(lock.holder(&db.pool).await.unwrap(), None, "{arguments}");
        let session = try_acquire(&lock, &db.pool).await.unwrap_or_else(|| panic!("{arguments} is free"));
        assert!(session.is_alive().await, "{arguments}");
        assert_eq!(Postgres::fetch_i64(&mut other, &take).await.unwrap(), Some(0), "{arguments}: we have it");
        let holder = lock.holder(&db.pool).await.unwrap().expect("a holder");
        assert_ne!(holder.id, pid);
        session.release().await.unwrap();

        assert_eq!(Postgres::fetch_i64(&mut other, &take).await.unwrap(), Some(1), "{arguments}: it is free");
        assert!(try_acquire(&lock, &db.pool).await.is_none(), "{arguments}: the other has it");
        assert_eq!(lock.holder(&db.pool).await.unwrap().expect("a holder").id, pid);
        assert_eq!(Postgres::fetch_i64(&mut other, &release).await.unwrap(), Some(1), "{arguments}");
    }
    db.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_number_is_a_lock_of_its_own() {
    let db = TestDb::<Postgres>::with_connections(30).await;
    let mut held = Vec::new();
    for (lock, arguments) in locks() {
        held.push(try_acquire(&lock, &db.pool).await.unwrap_or_else(|| panic!("{arguments} is free")));
    }
    for session in held {
        assert!(session.is_alive().await);
        session.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_for_a_number_is_granted_it_when_the_other_program_releases_it() {
    let db = TestDb::<Postgres>::new().await;
    for (lock, arguments) in [(SessionLock::raw(7), "7"), (SessionLock::raw2(7, -7), "7, -7")] {
        let mut other = db.connect().await;
        Postgres::execute(&mut other, &format!("SELECT pg_advisory_lock({arguments})")).await.unwrap();
        let waiting = {
            let (lock, pool) = (lock.clone().wait(PATIENCE), db.pool.clone());
            spawn(async move { lock.acquire(&pool).await.unwrap() })
        };
        let refused = lock.clone().wait(MILLIS(50)).acquire(&db.pool).await.unwrap_err();
        assert!(matches!(&refused, Error::Contended { holder: Some(_), .. }), "{refused:?}");
        assert!(!waiting.is_finished());
        Postgres::execute(&mut other, &format!("SELECT pg_advisory_unlock({arguments})")).await.unwrap();
        let session = timeout(PATIENCE, waiting).await.expect("it comes free").unwrap();

        let blocked = {
            let sql = format!("SELECT pg_advisory_lock({arguments})");
            spawn(async move {
                sqlx::Postgres::execute(&mut other, &sql).await.unwrap();
            })
        };
        sleep(MILLIS(100)).await;
        assert!(!blocked.is_finished(), "we have it");
        session.release().await.unwrap();
        timeout(PATIENCE, blocked).await.expect("the other is let in").unwrap();
    }
    db.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_number_is_shared_with_other_sharers() {
    let db = TestDb::<Postgres>::new().await;
    for (lock, arguments) in [(SessionLock::raw(7), "7"), (SessionLock::raw2(7, -7), "7, -7")] {
        let mut other = db.connect().await;
        let shared = format!("SELECT pg_try_advisory_lock_shared({arguments})");
        assert_eq!(Postgres::fetch_i64(&mut other, &shared).await.unwrap(), Some(1));
        let reader = lock.clone().share().acquire(&db.pool).await.unwrap();
        assert!(try_acquire(&lock, &db.pool).await.is_none());
        reader.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loss_of_a_number_is_noticed_at_the_next_heartbeat() {
    let db = TestDb::<Postgres>::new().await;
    for lock in [SessionLock::raw(-7), SessionLock::raw2(-7, 7)] {
        let session = lock.clone().heartbeat(MILLIS(50)).acquire(&db.pool).await.unwrap();
        let holder = lock.holder(&db.pool).await.unwrap().expect("a holder").id;
        db.fetch_text(&format!("SELECT pg_terminate_backend({holder})")).await;
        timeout(PATIENCE, session.lost()).await.expect("it is lost");
        let next = lock.acquire(&db.pool).await.unwrap();
        assert!(matches!(session.release().await, Err(Error::SessionLost { .. })));
        next.release().await.unwrap();
    }
    db.assert_nothing_left().await;
}

on_databases! { [mariadb, mysql]
    async fn a_number_is_refused_where_locks_have_names<S>(db: TestDb<S>) {
        for lock in [SessionLock::raw(7), SessionLock::raw2(7, 7)] {
            let held = lock.holder(&db.pool).await.map(drop);
            for refused in [lock.acquire(&db.pool).await.map(drop), held] {
                let Err(Error::InvalidOption { option: "raw", reason, .. }) = &refused else { panic!("{refused:?}") };
                assert!(reason.contains("needs PostgreSQL"), "{reason}");
            }
        }
    }
}
