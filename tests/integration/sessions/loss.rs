//! Sessions that end: by the server, by the connection, by a drop.

use std::thread;

use lockkit::{Error, SessionLock};
use sqlx::Pool;
use support::{Proxy, Server, TestDb, on_every_server};
use tokio::runtime;
use tokio::time::timeout;

use super::{MILLIS, PATIENCE, acquire, kill_holder};

on_every_server! {
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
}
