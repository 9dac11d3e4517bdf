//! Session locks, dropped at every await.

use std::sync::Arc;

use lockkit::{Error, SessionLock, with_lock};
use sqlx::Pool;
use support::{Server, TestDb, on_every_server};
use tokio::task::yield_now;

use super::{Bench, PATIENCE, nothing};

on_every_server! {
    async fn session_locks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        #[with_lock(session, on = pool, key = "k")]
        async fn function(pool: &Pool<<S as Server>::DB>) -> Result<(), Error> {
            yield_now().await;
            Ok(())
        }

        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let lock = || SessionLock::new("k").wait(PATIENCE);
        let session = async || lock().acquire(pool).await.unwrap();

        let holder = async || (async move { lock().holder(pool).await }, ());
        bench.drop_everywhere("SessionLock::holder", holder, nothing).await;
        bench.drop_everywhere("SessionLock::acquire", async || (lock().acquire(pool), ()), nothing).await;
        bench.drop_everywhere("SessionLock::try_acquire", async || (lock().try_acquire(pool), ()), nothing).await;

        // Somebody else holds it, and releases it after the drop: the server must not grant it to who is gone.
        let blocked = async || (lock().acquire(pool), lock().acquire(&db.pool).await.unwrap());
        let release = async |other: lockkit::Session<_>, _: bool| other.release().await.unwrap();
        bench.drop_blocked(("SessionLock::acquire", "of a held lock"), blocked, release).await;

        let is_alive = async || {
            let session = session().await;
            (async move { Ok(session.is_alive().await) }, ())
        };
        bench.drop_everywhere("Session::is_alive", is_alive, nothing).await;

        // What has been dropped must not spoil what is asked next.
        let asked = async || {
            let session = Arc::new(session().await);
            let asking = Arc::clone(&session);
            (async move { Ok(asking.is_alive().await) }, session)
        };
        let ask_again = async |session: Arc<lockkit::Session<_>>, _: bool| {
            assert!(session.is_alive().await);
        };
        bench.drop_everywhere(("Session::is_alive", "and again"), asked, ask_again).await;

        let lost = async || {
            let session = session().await;
            let lost = async move {
                session.lost().await;
                Ok(())
            };
            (lost, ())
        };
        bench.drop_blocked("Session::lost", lost, nothing).await;
        bench.drop_everywhere("Session::release", async || (session().await.release(), ()), nothing).await;
        bench.drop_everywhere("a function with a session lock", async || (function(pool), ()), nothing).await;
    }
}
