//! Functions under `#[with_lock(session, …)]`.

use lockkit::{Error, SessionLock, Wait, dialect::SessionOps, with_lock};
use sqlx::Pool;
use support::{TestDb, on_every_server, spawn};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{PATIENCE, acquire, is_held, kill_holder};

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
#[with_lock(session, on = &db, key = "leader", wait = Wait::Unbounded)]
async fn lead_until<DB: SessionOps>(
    db: Pool<DB>,
    reached: oneshot::Sender<()>,
    end: oneshot::Receiver<()>,
) -> Result<(), Error> {
    reached.send(()).expect("somebody waits for this");
    end.await.expect("a signal");
    Ok(())
}

on_every_server! {
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
        let leading = spawn(lead_until(db.pool.clone(), reached, end));
        here.await.unwrap();
        kill_holder!(db);
        let lost = timeout(PATIENCE, leading).await.expect("it is stopped").unwrap().unwrap_err();
        assert!(matches!(&lost, Error::SessionLost { key, .. } if *key == "leader"), "{lost:?}");
        db.assert_nothing_left().await;
    }

    async fn an_attribute_says_when_the_lock_was_lost_just_before_the_end<S>(db: TestDb<S>) {
        let (reached, here) = oneshot::channel();
        let (signal, end) = oneshot::channel();
        let leading = spawn(lead_until(db.pool.clone(), reached, end));
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
}
