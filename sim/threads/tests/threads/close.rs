//! Closing the leases of a process while they are acquired, released and lost.

use lockkit_sim_threads::{Error, LossReason, testing::Operation};

use super::*;

#[test]
fn close_waits_for_what_is_in_flight_and_nothing_is_granted_after_it() {
    in_many_orders(|| async {
        let process = Process::new();
        let callers = ["k", "k", "l"].map(|key| {
            let request = process.leases.lease(key);
            spawn(async move {
                match request.acquire().await {
                    Ok(lease) => Some(lease),
                    Err(Error::Closed { .. }) => None,
                    Err(err) => panic!("{err}"),
                }
            })
        });
        process.clone().ends().await;
        let claims = || process.leases.store().faults().calls(Operation::Acquire);
        let before = claims();
        for caller in callers {
            if let Some(lease) = caller.await.unwrap() {
                assert!(!lease.is_trusted(), "the process is closed");
            }
        }
        assert_eq!(claims(), before, "a claim was sent after `close`");
        process.ends().await;
    });
}

#[test]
fn a_release_and_close_free_the_lease_once() {
    in_many_orders(|| async {
        let process = Process::new();
        let (dropped, released) = (process.acquire().await, process.leases.lease("l").acquire().await.unwrap());
        let leaving = spawn(async move { drop(dropped) });
        let releasing = spawn(released.release());
        process.clone().ends().await;
        leaving.await.unwrap();
        releasing.await.unwrap().unwrap();
        process.ends().await;
    });
}

#[test]
fn a_loss_is_noticed_by_all_that_wait_for_it() {
    in_many_orders(|| async {
        let process = Process::new();
        let lease = Arc::new(process.acquire().await);
        let waiting = [(); 2].map(|()| {
            let lease = lease.clone();
            spawn(async move { lease.lost().await })
        });
        assert!(process.leases.steal("k").await.unwrap().is_some());
        for lost in waiting {
            assert_eq!(lost.await.unwrap(), LossReason::Stolen);
        }
        drop(lease);
        process.ends().await;
    });
}

#[test]
fn a_body_ends_when_its_lease_is_stolen_and_the_next_waiter_gets_it() {
    in_many_orders(|| async {
        let process = Process::new();
        let is_running = Arc::new(Notify::new());
        let body = spawn({
            let (request, is_running) = (process.lease(), is_running.clone());
            async move {
                let body = async |_| {
                    is_running.notify_one();
                    std::future::pending::<Result<(), Error>>().await
                };
                request.run(body).await
            }
        });
        is_running.notified().await;
        let next = process.works(true);
        assert!(process.leases.steal("k").await.unwrap().is_some());
        let ended = body.await.unwrap();
        assert!(matches!(ended, Err(Error::Lost { reason: LossReason::Stolen, .. })), "{ended:?}");
        next.await.unwrap();
        process.ends().await;
    });
}
