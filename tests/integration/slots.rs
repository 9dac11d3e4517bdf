//! Permits and readers: one is refused only when none is free.

use std::time::Duration;

use lockkit::{
    Error, Key, LeaseStore, Leases,
    store::{AcquiredAll, Claim, Token},
};
use support::{TestDb, on_every_database};
use tokio::time::timeout;

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(2);

/// Holds the leases of these names, as other processes would.
async fn hold(store: &impl LeaseStore, names: impl Iterator<Item = String>) {
    let mut keys: Vec<Key> = names.map(Key::from).collect();
    keys.sort_unstable();
    let claim = |key| Claim::new(key, Token::random(), "another", Duration::from_mins(10));
    let claims: Vec<_> = keys.into_iter().map(claim).collect();
    let granted = store.lease_acquire_all(&claims).await.unwrap();
    assert!(matches!(granted, AcquiredAll::Granted(_)), "{granted:?}");
}

on_every_database! {
    async fn one_reader_more_is_let_in_beside_900<S>(db: TestDb<S>) {
        hold(&db.pool, (0..900).map(|it| format!("k/reader/{it}"))).await;
        let leases = Leases::new(db.pool.clone());
        for number in 0..20 {
            let reader = leases.rw("k").read().try_acquire().await.unwrap();
            reader.unwrap_or_else(|| panic!("reader {number} is refused, though nobody \
                                             writes")).release().await.unwrap();
        }
        // The last one is found too, and the one after it is refused.
        hold(&db.pool, (900..1023).map(|it| format!("k/reader/{it}"))).await;
        let last = leases.rw("k").read().try_acquire().await.unwrap().expect("one is free");
        assert_eq!(last.key(), "k/reader/1023");
        assert!(leases.rw("k").read().try_acquire().await.unwrap().is_none());
    }

    async fn the_only_free_permit_of_many_is_found<S>(db: TestDb<S>) {
        hold(&db.pool, (0..400).filter(|it| *it != 317).map(|it| format!("k/permit/{it}"))).await;
        let leases = Leases::new(db.pool.clone());
        let permit = leases.semaphore("k", 400).try_acquire().await.unwrap().expect("one is free");
        assert_eq!(permit.key(), "k/permit/317");
        assert!(leases.semaphore("k", 400).try_acquire().await.unwrap().is_none());
    }

    async fn fewer_permits_are_the_first_ones_whatever_others_hold<S>(db: TestDb<S>) {
        hold(&db.pool, [2, 10, 11, 12, 13, 14].iter().map(|it| format!("k/permit/{it}"))).await;
        let leases = Leases::new(db.pool.clone());
        let mut permits = Vec::new();
        for _ in 0..4 {
            let request = leases.semaphore("k", 5);
            let permit = timeout(PATIENCE, request.try_acquire()).await.expect("it is answered");
            permits.push(permit.unwrap().expect("one is free"));
        }
        let refused = timeout(PATIENCE, leases.semaphore("k", 5).try_acquire()).await.expect("it is answered");
        assert!(refused.unwrap().is_none());
    }

    async fn the_number_of_permits_is_bounded<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        for permits in [0, 10_001, u32::MAX] {
            let refused = leases.semaphore("k", permits).try_acquire().await;
            assert!(matches!(refused, Err(Error::InvalidOption { option: "semaphore", .. })), "{permits}");
        }
        assert!(leases.semaphore("k", 10_000).try_acquire().await.unwrap().is_some());
    }
}
