//! Claims and releases that share a call, and claims that continue without their callers.

use tokio::time::advance;

use super::*;

/// Four go alone. The others are in a batch.
const CALLERS: usize = 6;

#[test]
fn each_caller_of_a_batch_gets_its_own_lease() {
    in_many_orders(|| async {
        let process = Process::new();
        let callers: Vec<_> = (0..CALLERS).map(|it| spawn(process.leases.lease(format!("k{it}")).acquire())).collect();
        for (number, caller) in callers.into_iter().enumerate() {
            let lease = caller.await.unwrap().unwrap();
            assert!(lease.key() == format!("k{number}").as_str() && lease.is_trusted());
        }
        process.ends().await;
    });
}

#[test]
fn a_caller_of_a_batch_that_leaves_takes_no_other_with_it_and_keeps_no_lease() {
    in_many_orders(|| async {
        let (process, leaves) = (Process::new(), Arc::new(Notify::new()));
        let leavers: Vec<_> =
            (0..CALLERS).map(|it| until(&leaves, process.leases.lease(format!("k{it}")).acquire())).collect();
        let stays = spawn(process.lease().acquire());
        leaves.notify_waiters();
        drop(stays.await.unwrap().unwrap());
        for leaver in leavers {
            leaver.await.unwrap().transpose().unwrap();
        }
        process.ends().await;
    });
}

#[test]
fn a_slow_claim_that_moves_to_a_task_is_answered() {
    in_many_orders(|| async {
        let process = Process::new();
        let faults = process.leases.store().faults();
        faults.pause();
        let claiming = spawn(process.lease().acquire());
        others_run().await;
        advance(SECOND / 40);
        others_run().await;
        // It has taken 50 ms now. It moves to a task while its answer arrives.
        advance(SECOND / 40);
        yield_now().await;
        faults.resume();
        process.uses(&claiming.await.unwrap().unwrap()).await;
        process.ends().await;
    });
}
