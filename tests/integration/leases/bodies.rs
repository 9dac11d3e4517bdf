//! Bodies that `run` under a lease.

use lockkit::{Error, Leases};
use support::{Server, TestDb, on_every_database, spawn};
use tokio::time::{sleep, timeout};

use super::MILLIS;

on_every_database! {
    async fn run_releases_after_its_body<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let held = leases.clone();
        let out = leases
            .lease("k")
            .run(|lease| async move {
                assert_eq!(held.show("k").await?.unwrap().fence, lease.fence());
                Ok::<_, Error>(lease.fence())
            })
            .await
            .unwrap();
        assert!(out.get() > 0);
        assert_eq!(leases.show("k").await.unwrap(), None);

        let failed: Result<(), Error> =
            leases.lease("k").run(|_| async { Err(lockkit::Key::new("").unwrap_err()) }).await;
        assert!(failed.is_err());
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    async fn the_body_of_run_may_commit_with_the_lease<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let pool = db.pool.clone();
        leases
            .lease("k")
            .run(|lease| async move {
                let mut tx = lockkit::begin(&pool).await?;
                S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
                lease.commit(tx).await?;
                // What comes after the commit still runs.
                sleep(MILLIS(50)).await;
                Ok::<_, Error>(())
            })
            .await
            .unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    async fn the_body_of_run_is_stopped_when_the_lease_is_lost<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(MILLIS(600)).build().unwrap();
        let (started, running) = tokio::sync::oneshot::channel();
        let body = leases.lease("k").run(|_| async move {
            started.send(()).unwrap();
            std::future::pending::<Result<(), Error>>().await
        });
        let thief = async {
            running.await.unwrap();
            leases.steal("k").await.unwrap().unwrap();
        };
        let (stopped, ()) = tokio::join!(body, thief);
        assert!(matches!(stopped, Err(Error::Lost { .. })), "{stopped:?}");
    }

    async fn a_leader_that_is_deposed_is_replaced_and_leads_again_in_its_turn<S>(db: TestDb<S>) {
        let (first, second) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let (led, mut leaders) = tokio::sync::mpsc::unbounded_channel();
        let lead = |name: &'static str, leases: &Leases<_>| {
            let led = led.clone();
            spawn(leases.lease("k").ttl(MILLIS(1000)).lead(move |lease| {
                led.send((name, lease.fence())).unwrap();
                std::future::pending::<Result<(), Error>>()
            }))
        };
        let mut next = async || timeout(MILLIS(60_000), leaders.recv()).await.unwrap().unwrap();
        let leading = lead("first", &first);
        let (name, mut fence) = next().await;
        assert_eq!(name, "first");
        let standby = lead("second", &second);
        for _ in 0..4 {
            first.steal_if("k", fence).await.unwrap().expect("it led");
            let later = next().await.1;
            assert!(later > fence);
            fence = later;
        }
        // The other one leads when one ends.
        let leads = first.show("k").await.unwrap().unwrap();
        let (gone, left, heir) =
            if leads.is_this_process { (leading, standby, "second") } else { (standby, leading, "first") };
        gone.abort();
        assert_eq!(next().await.0, heir);
        left.abort();
        drop((gone.await, left.await));
        db.assert_nothing_left().await;
    }
}
