//! The queue of a process: the hand-over, and who is called when a holder or a waiter leaves.

use tokio::time::advance;

use super::*;

async fn all_are_served(process: Process) {
    let first = process.acquire().await;
    let others = [true, false, true].map(|releases| process.works(releases));
    process.uses(&first).await;
    drop(first);
    for other in others {
        other.await.unwrap();
    }
    assert_eq!(process.used.times.load(Relaxed), 4);
    process.ends().await;
}

#[test]
fn a_lease_is_handed_over_to_one_waiter_after_the_other() {
    in_many_orders(|| all_are_served(Process::new()));
}

#[test]
fn each_release_wakes_the_next_waiter() {
    in_many_orders(|| all_are_served(Process::with(|leases| leases.hand_over(0))));
}

#[test]
fn a_release_after_a_hand_over_wakes_the_next_waiter() {
    in_many_orders(|| all_are_served(Process::with(|leases| leases.hand_over(1))));
}

#[test]
fn callers_that_arrive_together_are_served_one_after_the_other() {
    in_many_orders(|| async {
        let process = Process::new();
        for caller in [true, false, false].map(|releases| process.works(releases)) {
            caller.await.unwrap();
        }
        process.ends().await;
    });
}

async fn a_waiter_leaves(process: Process) {
    let (first, leaves) = (process.acquire().await, Arc::new(Notify::new()));
    let leaver = until(&leaves, process.lease().acquire());
    let others = [true, false].map(|releases| process.works(releases));
    leaves.notify_one();
    drop(first);
    if let Some(lease) = leaver.await.unwrap() {
        process.uses(&lease.unwrap()).await;
    }
    for other in others {
        other.await.unwrap();
    }
    process.ends().await;
}

#[test]
fn a_waiter_that_leaves_while_it_is_served_keeps_no_other_waiting() {
    in_many_orders(|| a_waiter_leaves(Process::new()));
}

#[test]
fn a_waiter_that_leaves_while_it_is_called_keeps_no_other_waiting() {
    in_many_orders(|| a_waiter_leaves(Process::with(|leases| leases.hand_over(0))));
}

#[test]
fn a_lease_that_is_handed_over_at_the_deadline_is_not_lost() {
    in_many_orders(|| async {
        let process = Process::new();
        let first = process.acquire().await;
        let hurried = spawn(process.lease().wait(SECOND / 100).acquire());
        let patient = process.works(false);
        let time = spawn(async { advance(SECOND / 100) });
        drop(first);
        if let Ok(lease) = hurried.await.unwrap() {
            process.uses(&lease).await;
        }
        patient.await.unwrap();
        time.await.unwrap();
        process.ends().await;
    });
}

#[test]
fn a_request_for_several_keys_is_woken_by_each_of_them() {
    in_many_orders(|| async {
        let process = Process::new();
        let (k, l) = (process.acquire().await, process.leases.lease("l").acquire().await.unwrap());
        let both = spawn(process.leases.all(["k", "l"]).acquire());
        let other = process.works(true);
        let leaving = spawn(async move { drop(l) });
        drop(k);
        drop(both.await.unwrap().unwrap());
        other.await.unwrap();
        leaving.await.unwrap();
        process.ends().await;
    });
}
