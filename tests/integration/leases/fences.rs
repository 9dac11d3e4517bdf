//! Fences, which rise with every grant, and the keys that are swept without losing them.

use std::time::Duration;

use lockkit::{Error, LeaseStore, Leases, Released};
use support::{TestDb, on_every_database};
use tokio::time::{sleep, timeout};

use super::{MILLIS, expire};

on_every_database! {
    async fn fences_rise_across_release_expiry_theft_and_sweep<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let mut last = lockkit::Fence::from(0);
        for round in 0..20 {
            let lease = leases.lease("k").acquire().await.unwrap();
            assert!(lease.fence() > last, "round {round}");
            last = lease.fence();
            match round % 4 {
                0 => assert_eq!(lease.release().await.unwrap(), Released::WhileHeld),
                1 => expire(&db, "k").await,
                2 => assert_eq!(leases.steal("k").await.unwrap().unwrap().fence, last),
                _ => {
                    lease.release().await.unwrap();
                    sleep(MILLIS(5)).await;
                    assert_eq!(db.pool.lease_sweep(MILLIS(1), 10).await.unwrap(), 1);
                    assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease").await, Some(0));
                }
            }
        }
    }

    async fn old_keys_are_swept_in_the_background_and_held_ones_are_not<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).sweep_every(MILLIS(100)).build().unwrap();
        let held = leases.lease("held").acquire().await.unwrap();
        let old = Leases::builder(db.pool.clone()).sweep_every(None).build().unwrap();
        for number in 0..20 {
            old.lease(format!("old:{number}")).acquire().await.unwrap().release().await.unwrap();
        }
        // As if all of them had been acquired long ago.
        db.execute("UPDATE lockkit_lease SET fence = 1000").await;
        let swept = async {
            while db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease").await != Some(2) {
                sleep(MILLIS(20)).await;
            }
        };
        timeout(Duration::from_secs(20), swept).await.expect("only the held one and the sweeper are left");
        assert_eq!(held.release().await.unwrap(), Released::WhileHeld);
    }

    async fn a_fence_above_the_clock_is_never_forgotten<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        let high = 1_i64 << 61;
        db.execute(&format!("UPDATE lockkit_lease SET fence = {high}")).await;

        sleep(MILLIS(5)).await;
        assert_eq!(db.pool.lease_sweep(MILLIS(1), 10).await.unwrap(), 0);
        let lease = leases.lease("k").acquire().await.unwrap();
        assert!(lease.fence().as_i64() > high, "{}", lease.fence());
    }

    async fn a_fence_that_cannot_rise_is_an_error_and_not_a_grant<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        db.execute(&format!("UPDATE lockkit_lease SET fence = {}", (1_i64 << 62) - 1)).await;

        let refused = leases.lease("k").try_acquire().await.unwrap_err();
        assert!(matches!(refused, Error::Database { .. }), "{refused:?}");
        assert_eq!(leases.show("k").await.unwrap(), None);
    }
}
