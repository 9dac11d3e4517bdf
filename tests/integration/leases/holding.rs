//! Leases that are held: exclusion, renewal, waits, and what operators see.

use std::time::{Duration, Instant};

use lockkit::{Error, Leases, LossReason, Released};
use support::{JoinSet, Server, TestDb, on_every_database, on_every_server, refusal, spawn};
use tokio::time::{sleep, timeout};

use super::{MILLIS, expire};

on_every_database! {
    async fn one_holds_and_others_are_told_who<S>(db: TestDb<S>) {
        let first = Leases::builder(db.pool.clone()).holder("api-1").build().unwrap();
        let second = Leases::builder(db.pool_of(2).await).holder("api-2").build().unwrap();

        let lease = first.lease("order:42").acquire().await.unwrap();
        assert!(second.lease("order:42").try_acquire().await.unwrap().is_none());
        assert!(first.lease("order:42").try_acquire().await.unwrap().is_none(), "leases are not re-entrant");

        let refused = refusal(async || second.lease("order:42").wait(MILLIS(100)).acquire().await).await;
        assert!(refused.is_contended());
        let Error::Contended { key, waited, holder: Some(holder), .. } = refused else { panic!("{refused:?}") };
        assert_eq!(key, "order:42");
        assert!(waited >= MILLIS(100));
        let holder = holder.as_lease().expect("a lease");
        assert_eq!((holder.holder.as_str(), holder.fence), ("api-1", lease.fence()));

        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        assert!(second.lease("order:42").try_acquire().await.unwrap().is_some());
    }

    async fn a_late_release_does_not_free_the_next_holder<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let stale = leases.lease("k").acquire().await.unwrap();
        expire(&db, "k").await;
        let next = leases.lease("k").acquire().await.unwrap();
        assert!(next.fence() > stale.fence());

        assert_eq!(stale.release().await.unwrap(), Released::AlreadyLost);
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());

        let stale = next;
        expire(&db, "k").await;
        let next = leases.lease("k").acquire().await.unwrap();
        drop(stale);
        sleep(MILLIS(200)).await;
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());
    }

    async fn a_lease_is_renewed_for_as_long_as_it_is_held<S>(db: TestDb<S>) {
        let ttl = MILLIS(3000);
        let leases = Leases::builder(db.pool.clone()).ttl(ttl).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        for _ in 0..8 {
            sleep(ttl / 4).await;
            assert!(lease.is_trusted());
            assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
        }
        assert!(leases.show("k").await.unwrap().unwrap().renewals >= 3);
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    }

    async fn a_dropped_lease_is_released_in_the_background<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        drop(leases.lease("k").acquire().await.unwrap());
        let next = timeout(MILLIS(2000), leases.lease("k").acquire()).await.expect("long before the ttl").unwrap();
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn an_extension_outlives_the_old_ttl_and_a_lost_lease_cannot_be_extended<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(MILLIS(5000)).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let before = lease.trusted_until();
        lease.extend(Duration::from_secs(60)).await.unwrap();
        assert!(lease.trusted_until() > before + Duration::from_secs(50));
        assert!(leases.show("k").await.unwrap().unwrap().expires_in > Duration::from_secs(50));

        leases.steal("k").await.unwrap();
        let lost = lease.extend(Duration::from_secs(60)).await.unwrap_err();
        assert!(matches!(lost, Error::Lost { reason: LossReason::Stolen, .. }), "{lost:?}");
        assert!(!lease.is_trusted());
    }

    async fn an_extension_never_shortens_what_others_may_rely_on<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let until = lease.trusted_until();
        lease.extend(MILLIS(300)).await.unwrap();
        assert!(lease.trusted_until() >= until);
        assert!(leases.show("k").await.unwrap().unwrap().expires_in > Duration::from_secs(20));
    }

    async fn a_short_ttl_is_renewed_in_time_whatever_the_builder_says<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).renew_every(Duration::from_secs(9)).build().unwrap();
        let lease = leases.lease("k").ttl(MILLIS(3000)).acquire().await.unwrap();
        sleep(MILLIS(4500)).await;
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    }

    async fn no_answer_is_not_taken_for_somebody_else<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let leases = Leases::builder(pool.clone()).own_connections(0).build().unwrap();
        let only = pool.acquire().await.unwrap();
        let refused = leases.lease("k").wait(MILLIS(100)).acquire().await.unwrap_err();
        assert!(matches!(refused, Error::PoolStarved { held: 1, waiting: 1, size: 1, .. }), "{refused:?}");
        drop(only);
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    }

    async fn a_wait_for_a_connection_takes_nothing_from_the_time_of_the_lease<S>(db: TestDb<S>) {
        let ttl = Duration::from_secs(4);
        let pool = db.pool_of(1).await;
        let leases = Leases::builder(pool.clone()).own_connections(0).ttl(ttl).build().unwrap();
        let only = pool.acquire().await.unwrap();
        let free = async {
            sleep(MILLIS(1800)).await;
            let freed = Instant::now();
            drop(only);
            freed
        };
        let (lease, freed) = tokio::join!(leases.lease("k").acquire(), free);
        let lease = lease.unwrap();
        assert!(lease.trusted_until() > freed + Duration::from_secs(3), "{:?}", lease.trusted_until() - freed);
        lease.release().await.unwrap();
    }

    async fn operators_see_list_and_steal<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).holder("worker 1").build().unwrap();
        assert_eq!(leases.show("job:a").await.unwrap(), None);
        assert_eq!(leases.steal("job:a").await.unwrap(), None);

        let b = leases.lease("job:b").acquire().await.unwrap();
        let _a = leases.lease("job:a").acquire().await.unwrap();
        let _other = leases.lease("order:1").acquire().await.unwrap();
        let _wild = leases.lease("job_%").acquire().await.unwrap();
        let keys =
            |list: Vec<lockkit::store::LeaseInfo>| list.into_iter().map(|it| it.key.to_string()).collect::<Vec<_>>();
        assert_eq!(keys(leases.list("job:").await.unwrap()), ["job:a", "job:b"]);
        assert_eq!(keys(leases.list("job_%").await.unwrap()), ["job_%"], "a prefix is text, not a pattern");
        assert_eq!(leases.list("").await.unwrap().len(), 4);

        let shown = leases.show("job:b").await.unwrap().unwrap();
        assert_eq!((shown.holder.as_str(), shown.fence, shown.renewals), ("worker 1", b.fence(), 0));
        assert!(shown.expires_in > Duration::from_secs(25) && shown.expires_in <= Duration::from_secs(30));
        assert!(shown.acquired_at.elapsed().unwrap() < Duration::from_secs(30));

        assert_eq!(leases.steal("job:b").await.unwrap().unwrap().fence, b.fence());
        assert_eq!(leases.show("job:b").await.unwrap(), None);
        assert_eq!(b.release().await.unwrap(), Released::AlreadyLost);
    }

    async fn keys_that_differ_in_any_byte_are_different_leases<S>(db: TestDb<S>) {
        let long = "x".repeat(255);
        let longer = format!("{}y", &long[..254]);
        let injection = "'; DROP TABLE lockkit_lease; --";
        let keys = ["abc", "ABC", "abc ", " abc", "é", "e\u{301}", injection, "%", "_", "\\", "🔑", &long, &longer];
        let leases = Leases::new(db.pool.clone());
        let mut held = Vec::new();
        for key in keys {
            held.push(leases.lease(key).try_acquire().await.unwrap().unwrap_or_else(|| panic!("{key:?} is taken")));
        }
        assert_eq!(leases.list("").await.unwrap().len(), keys.len());
        for (lease, key) in held.iter().zip(keys) {
            assert_eq!(leases.show(key).await.unwrap().unwrap().fence, lease.fence());
        }
    }

    async fn waiters_hold_no_connection<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool_of(1).await);
        let lease = leases.lease("k").acquire().await.unwrap();
        let waiters: Vec<_> = (0..10)
            .map(|_| {
                let request = leases.lease("k").wait(Duration::from_secs(20));
                spawn(async move { request.acquire().await.unwrap().release().await.unwrap() })
            })
            .collect();
        sleep(MILLIS(300)).await;

        // The only connection is free for the holder, whatever it wants to do with it.
        let mut tx = lockkit::begin(leases.store()).await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap(), Released::WhileHeld);
        }
    }

    async fn leases_of_a_thousand_keys_do_not_meet<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let mut tasks = JoinSet::new();
        for task in 0..20 {
            let leases = leases.clone();
            tasks.spawn(async move {
                for number in 0..50 {
                    let lease = leases.lease(format!("item:{}", task * 50 + number)).try_acquire().await.unwrap();
                    lease.expect("nobody else wants this key").release().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease WHERE token IS NULL").await, Some(1000));
    }
}

on_every_server! {
    async fn an_unreachable_server_costs_the_lease_when_trust_runs_out<S>(db: TestDb<S>) {
        let proxy = support::Proxy::start(&db.url);
        let pool =
            sqlx::pool::PoolOptions::<<S as Server>::DB>::new().max_connections(2).connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool).ttl(MILLIS(900)).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        proxy.stall(true);
        let until = lease.trusted_until();
        let reason = timeout(Duration::from_secs(5), lease.lost()).await.expect("without asking the server");
        assert!(matches!(reason, LossReason::Expired | LossReason::Unreachable), "{reason:?}");
        // A renewal may still have come through before the stall.
        assert!(lease.trusted_until() >= until && lease.trusted_until() <= Instant::now());
        assert!(!lease.is_trusted());
        proxy.stall(false);
    }
}
