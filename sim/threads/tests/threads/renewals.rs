//! Renewals that meet hand-overs, releases and new leases.

use std::time::Instant;

use lockkit_sim_threads::Released;
use tokio::time::advance;

use super::*;

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Waits until the lease was renewed at the present time.
async fn is_renewed(lease: &Lease<MemoryStore>, ttl: Duration) {
    // One percent is the margin for clocks.
    while lease.trusted_until() < now() + ttl * 99 / 100 {
        // Unlike that of Tokio, this one stands back.
        shuttle::future::yield_now().await;
    }
}

/// Shorter than the time after which a waiter takes a ticket, and polls.
const MOMENT: Duration = Duration::from_millis(20);

#[test]
fn a_lease_is_renewed_for_the_holder_to_which_it_was_handed_over() {
    in_many_orders(|| async {
        let process = Process::with(|leases| leases.renew_every(MOMENT));
        let first = process.acquire().await;
        let next = spawn(process.lease().acquire());
        let time = spawn(async { advance(MOMENT) });
        drop(first);
        let lease = next.await.unwrap().unwrap();
        time.await.unwrap();
        // It may have been granted since.
        advance(MOMENT);
        is_renewed(&lease, 30 * SECOND).await;
        drop(lease);
        process.ends().await;
    });
}

#[test]
fn a_release_that_meets_a_renewal_ends_it() {
    in_many_orders(|| async {
        let process = Process::with(|leases| leases.renew_every(MOMENT));
        let lease = process.acquire().await;
        let time = spawn(async { advance(MOMENT) });
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        time.await.unwrap();
        let again = process.acquire().await;
        process.uses(&again).await;
        drop(again);
        process.ends().await;
    });
}

#[test]
fn a_lease_that_is_granted_while_the_keeper_goes_to_sleep_is_renewed() {
    in_many_orders(|| async {
        let process = Process::new();
        let long = process.leases.lease("l").acquire().await.unwrap();
        others_run().await;
        advance(10 * SECOND);
        // It is due before the keeper would look again for the long one.
        let short = process.lease().ttl(3 * SECOND).acquire().await.unwrap();
        advance(SECOND);
        is_renewed(&short, 3 * SECOND).await;
        drop((short, long));
        process.ends().await;
    });
}
