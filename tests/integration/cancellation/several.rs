//! Requests for several leases or permits and what their holder calls, dropped at every await.

use lockkit::Leases;
use support::{TestDb, on_every_database};

use super::{Bench, Made, MadeAll, PATIENCE, nothing};

on_every_database! {
    async fn requests_for_several_leases_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;
        let request = || leases.all(["k", "l", "m"]).wait(PATIENCE);

        bench
            .drop_everywhere(("LeaseRequest::acquire", "several keys"), async || (request().acquire(), ()), nothing)
            .await;
        bench
            .drop_everywhere(
                ("LeaseRequest::try_acquire", "several keys"),
                async || (request().try_acquire(), ()),
                nothing,
            )
            .await;
        let run = async || {
            let body = async |leases: MadeAll<S>| {
                let mut tx = lockkit::begin(pool).await?;
                leases.verify(&mut tx).await?;
                tx.commit().await
            };
            (Box::pin(request().run(body)), ())
        };
        bench.drop_everywhere(("LeaseRequest::run", "several keys"), run, nothing).await;

        let others = Leases::new(db.pool.clone());
        let blocked = async || (request().acquire(), others.lease("l").acquire().await.unwrap());
        let release = async |other: Made<S>, _: bool| {
            other.release().await.unwrap();
        };
        bench.drop_blocked(("LeaseRequest::acquire", "several keys, one of which is held"), blocked, release).await;
    }

    async fn requests_for_several_permits_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;
        let request = || leases.semaphore("k", 4).take(3).wait(PATIENCE);

        bench
            .drop_everywhere(("LeaseRequest::acquire", "several permits"), async || (request().acquire(), ()), nothing)
            .await;
        bench
            .drop_everywhere(
                ("LeaseRequest::try_acquire", "several permits"),
                async || (request().try_acquire(), ()),
                nothing,
            )
            .await;
        let run = async || {
            let body = async |permits: MadeAll<S>| {
                let mut tx = lockkit::begin(pool).await?;
                permits.verify(&mut tx).await?;
                tx.commit().await
            };
            (Box::pin(request().run(body)), ())
        };
        bench.drop_everywhere(("LeaseRequest::run", "several permits"), run, nothing).await;

        // What it gathers while it waits is released.
        let others = Leases::new(db.pool.clone());
        let held = async || others.semaphore("k", 4).take(2).acquire().await.unwrap();
        let release = async |other: MadeAll<S>, _: bool| {
            other.release().await.unwrap();
        };
        let blocked = async || (request().acquire(), held().await);
        bench
            .drop_blocked(("LeaseRequest::acquire", "several permits, some of which are held"), blocked, release)
            .await;
    }

    async fn what_a_holder_of_several_asks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, .. } = &bench;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;

        let verify = async || {
            let both = bench.both().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { both.verify(&mut tx).await }, ())
        };
        bench.drop_everywhere("MultiLease::verify", verify, nothing).await;
        let commit = async || {
            let both = bench.both().await;
            (both.commit(bench.two_rows_written().await), ())
        };
        bench.drop_everywhere("MultiLease::commit", commit, all_or_none).await;
        bench.drop_everywhere("MultiLease::release", async || (bench.both().await.release(), ()), nothing).await;
        let lost = async || {
            let both = bench.both().await;
            (async move { Ok(both.lost().await) }, ())
        };
        bench.drop_blocked("MultiLease::lost", lost, nothing).await;
    }
}
