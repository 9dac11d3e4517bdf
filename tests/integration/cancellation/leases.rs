//! Requests for one lease and what its holder calls, dropped at every await.

use std::time::Duration;

use lockkit::{Error, Leases, Released};
use support::{TestDb, on_every_database, spawn};
use tokio::{
    task::{JoinHandle, yield_now},
    time::sleep,
};

use super::{Bench, Made, PATIENCE, Request, nothing};

/// Long enough to join a queue.
const MOMENT: Duration = Duration::from_millis(5);

on_every_database! {
    async fn requests_for_leases_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;

        let requests: [(&str, &dyn Fn() -> Request<S>); 6] = [
            ("of a lease", &|| leases.lease("k").wait(PATIENCE)),
            ("fair", &|| leases.lease("k").wait(PATIENCE).fair()),
            ("of a permit", &|| leases.semaphore("k", 2).wait(PATIENCE)),
            ("to read", &|| leases.rw("k").read().wait(PATIENCE)),
            ("to write", &|| leases.rw("k").write().wait(PATIENCE)),
            ("of any of two keys", &|| leases.any(["k", "l"]).wait(PATIENCE)),
        ];
        let body = async |lease: Made<S>| {
            let mut tx = lockkit::begin(pool).await?;
            lease.verify(&mut tx).await?;
            yield_now().await;
            tx.commit().await
        };
        for (which, request) in requests {
            bench.drop_everywhere(("LeaseRequest::acquire", which), async || (request().acquire(), ()), nothing).await;
            bench
                .drop_everywhere(("LeaseRequest::try_acquire", which), async || (request().try_acquire(), ()), nothing)
                .await;
            let run = async || (Box::pin(request().run(body)), ());
            bench.drop_everywhere(("LeaseRequest::run", which), run, nothing).await;
        }

        let lead = async || (Box::pin(leases.lease("k").lead(body)), ());
        bench.drop_everywhere("LeaseRequest::lead", lead, nothing).await;

        // Somebody else holds it, and releases it after the drop: it must not be granted to who is gone.
        let others = Leases::new(db.pool.clone());
        let release = async |other: Made<S>, _: bool| {
            other.release().await.unwrap();
        };
        for (which, request) in &requests[..2] {
            let blocked = async || (request().acquire(), others.lease("k").acquire().await.unwrap());
            bench.drop_blocked(("LeaseRequest::acquire", format!("{which} that is held")), blocked, release).await;
        }
        let both = async || {
            let both = [others.lease("k").acquire().await.unwrap(), others.lease("l").acquire().await.unwrap()];
            (requests[5].1().acquire(), both)
        };
        let release_both = async |both: [Made<S>; 2], _: bool| {
            for other in both {
                other.release().await.unwrap();
            }
        };
        bench.drop_blocked(("LeaseRequest::acquire", "of any of two that are held"), both, release_both).await;
        let standby = async || {
            let leader = others.lease("k").acquire().await.unwrap();
            (leases.lease("k").lead(async |_| Ok::<_, Error>(())), leader)
        };
        bench.drop_blocked(("LeaseRequest::lead", "while another process leads"), standby, release).await;
        let reader = async || (requests[4].1().acquire(), others.rw("k").read().acquire().await.unwrap());
        bench.drop_blocked(("LeaseRequest::acquire", "to write while others read"), reader, release).await;
        let writer = async || (requests[3].1().acquire(), others.rw("k").write().acquire().await.unwrap());
        bench.drop_blocked(("LeaseRequest::acquire", "to read while another writes"), writer, release).await;
    }

    async fn what_shares_a_statement_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        const OTHERS: usize = 8;
        let bench = Bench::<S>::new(db).await;
        let leases = &bench.leases;
        let others = || (0..OTHERS).map(|it| leases.lease(format!("other {it}")).wait(PATIENCE).acquire());
        let among_others = async || {
            let others: Vec<_> = others().map(tokio::spawn).collect();
            // They are in flight, more than go alone.
            yield_now().await;
            (leases.lease("k").wait(PATIENCE).acquire(), others)
        };
        let all_granted = async |others: Vec<JoinHandle<Result<Made<S>, Error>>>, _: bool| {
            for other in others {
                assert_eq!(other.await.unwrap().unwrap().release().await.unwrap(), Released::WhileHeld);
            }
        };
        bench.drop_everywhere(("LeaseRequest::acquire", "among others"), among_others, all_granted).await;
        let released_among_others = async || {
            let lease = bench.lease().await;
            let mut held = Vec::new();
            for other in others() {
                held.push(other.await.unwrap());
            }
            let others: Vec<_> = held.into_iter().map(|it| spawn(it.release())).collect();
            yield_now().await;
            (lease.release(), others)
        };
        let all_released = async |others: Vec<JoinHandle<Result<Released, Error>>>, _: bool| {
            for other in others {
                assert_eq!(other.await.unwrap().unwrap(), Released::WhileHeld);
            }
        };
        bench.drop_everywhere(("Lease::release", "among others"), released_among_others, all_released).await;
    }

    async fn both_sides_of_a_hand_over_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let leases = &bench.leases;
        // Somebody of this process who holds the lease, and somebody who waits for it.
        let holder_and_heir = async || {
            let holder = bench.lease().await;
            let request = leases.lease("k").wait(PATIENCE);
            let heir = spawn(async move { request.acquire().await });
            sleep(MOMENT).await;
            (holder, heir)
        };

        let inherit = async || {
            let holder = bench.lease().await;
            let request = leases.lease("k").wait(PATIENCE);
            let releasing = spawn(async move {
                sleep(MOMENT).await;
                holder.release().await
            });
            (async move { request.acquire().await }, releasing)
        };
        let released = async |releasing: JoinHandle<Result<Released, Error>>, _| {
            assert_eq!(releasing.await.unwrap().unwrap(), Released::WhileHeld);
        };
        bench.drop_everywhere(("LeaseRequest::acquire", "of a lease that is handed on"), inherit, released).await;

        let release = async || {
            let (holder, heir) = holder_and_heir().await;
            (async move { holder.release().await }, heir)
        };
        let inherited = async |heir: JoinHandle<Result<Made<S>, Error>>, _| drop(heir.await.unwrap().unwrap());
        bench.drop_everywhere(("Lease::release", "to somebody who waits"), release, inherited).await;

        let commit = async || {
            let (holder, heir) = holder_and_heir().await;
            let tx = bench.two_rows_written().await;
            (async move { holder.commit(tx).await }, heir)
        };
        let committed = async |heir: JoinHandle<Result<Made<S>, Error>>, completed| {
            drop(heir.await.unwrap().unwrap());
            bench.all_or_none(completed).await;
        };
        bench.drop_everywhere(("Lease::commit", "with somebody who waits"), commit, committed).await;
    }

    async fn what_a_holder_asks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, leases, .. } = &bench;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;

        let verify = async || {
            let lease = bench.lease().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { lease.verify(&mut tx).await }, ())
        };
        bench.drop_everywhere("Lease::verify", verify, nothing).await;
        let commit = async || {
            let lease = bench.lease().await;
            (lease.commit(bench.two_rows_written().await), ())
        };
        bench.drop_everywhere("Lease::commit", commit, all_or_none).await;
        let extend = async || {
            let lease = bench.lease().await;
            (async move { lease.extend(PATIENCE).await }, ())
        };
        bench.drop_everywhere("Lease::extend", extend, nothing).await;
        bench.drop_everywhere("Lease::release", async || (bench.lease().await.release(), ()), nothing).await;
        let lost = async || {
            let lease = bench.lease().await;
            (async move { Ok(lease.lost().await) }, ())
        };
        bench.drop_blocked("Lease::lost", lost, nothing).await;

        // What operators ask, of a lease that is held.
        let release = async |lease: Made<S>, _: bool| {
            lease.release().await.unwrap();
        };
        bench.drop_everywhere("Leases::show", async || (leases.show("k"), bench.lease().await), release).await;
        bench.drop_everywhere("Leases::list", async || (leases.list("k"), bench.lease().await), release).await;
        bench.drop_everywhere("Leases::expired", async || (leases.expired("k"), bench.lease().await), release).await;
        let closing = async || {
            let leases = Leases::new(pool.clone());
            let lease = leases.lease("k").wait(PATIENCE).acquire().await.unwrap();
            (async move { leases.close().await }, lease)
        };
        bench.drop_everywhere("Leases::close", closing, async |lease, _: bool| drop(lease)).await;
        bench.drop_everywhere("Leases::steal", async || (leases.steal("k"), bench.lease().await), release).await;
        let steal_if = async || {
            let lease = bench.lease().await;
            (leases.steal_if("k", lease.fence()), lease)
        };
        bench.drop_everywhere("Leases::steal_if", steal_if, release).await;
    }
}
