//! Claims and releases that arrive together, and share statements.

use std::time::{Duration, Instant};

use lockkit::store::{Claim, LeaseStore, Token};
use lockkit::{LeaseRequest, Leases, Released};
use sqlx::pool::PoolOptions;
use support::{JoinSet, Proxy, Server, TestDb, on_every_database, on_every_server};

const TASKS: usize = 40;
const TTL: Duration = Duration::from_secs(60);

/// Leases that were released, so that each database shares statements for them.
async fn released<S: LeaseStore>(leases: &Leases<S>) -> Vec<String> {
    let keys: Vec<_> = (0..TASKS).map(|it| format!("k{it}")).collect();
    for _ in 0..2 {
        for key in &keys {
            leases.lease(key).acquire().await.unwrap().release().await.unwrap();
        }
    }
    keys
}

/// Tries all requests at once. Returns whether each was granted, and keeps what was granted.
async fn tried<S: LeaseStore>(requests: impl IntoIterator<Item = LeaseRequest<S>>) -> Vec<Option<lockkit::Lease<S>>> {
    let mut tries = JoinSet::new();
    for (at, request) in requests.into_iter().enumerate() {
        tries.spawn(async move { (at, request.try_acquire().await.unwrap()) });
    }
    let mut answers = tries.join_all().await;
    answers.sort_by_key(|it| it.0);
    answers.into_iter().map(|it| it.1).collect()
}

on_every_database! {
    async fn each_claim_is_answered_by_the_row_of_its_own_lease<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let free = released(&here).await;
        let held = there.lease("k3 held").acquire().await.unwrap();
        let without_ttl = there.lease("k3 without ttl").acquire().await.unwrap();
        db.execute("UPDATE lockkit_lease SET ttl_us = NULL WHERE name = 'k3 without ttl'").await;
        let dead = Claim::new("k3 expired", Token::random(), "the dead", TTL);
        db.pool.lease_acquire(&dead).await.unwrap();
        db.execute("UPDATE lockkit_lease SET expires_us = 1 WHERE name = 'k3 expired'").await;
        let pinned = there.lease("k3 pinned").acquire().await.unwrap();
        // On SQLite, the transaction would have the one write lock.
        let tx = if S::NAME == "SQLite" {
            None
        } else {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            pinned.verify(&mut tx).await.unwrap();
            Some(tx)
        };

        for round in 0..3 {
            let others = ["k3 held", "k3 without ttl", "k3 pinned", "k3 expired"].map(str::to_owned);
            let keys: Vec<_> = free.iter().cloned().chain(others).chain([format!("new {round}")]).collect();
            // Of different ttls, and each of the first ones twice.
            let requests = keys.iter().chain(&keys[..8]).enumerate();
            let ttl = |at| TTL + Duration::from_secs(at as u64);
            let granted = tried(requests.map(|(at, key)| here.lease(key).ttl(ttl(at)))).await;
            let number = |key: &str| {
                let all = keys.iter().chain(&keys[..8]).zip(&granted);
                all.filter(|(it, lease)| *it == key && lease.is_some()).count()
            };
            for key in &keys {
                let expected = usize::from(!["k3 held", "k3 without ttl", "k3 pinned"].contains(&&**key));
                assert_eq!(number(key), expected, "`{key}` in round {round} on {}", S::NAME);
            }
            for lease in granted.iter().flatten() {
                let shown = here.show(lease.key().clone()).await.unwrap().unwrap();
                assert_eq!(shown.fence, lease.fence(), "{}", lease.key());
                assert!(shown.expires_in > TTL / 2, "{}: {:?}", lease.key(), shown.expires_in);
                let previous = lease.previous().map(|it| it.holder.clone());
                let is_expired = lease.key().as_str() == "k3 expired" && round == 0;
                assert_eq!(previous.as_deref(), is_expired.then_some("the dead"), "{}", lease.key());
            }
            let mut releases = JoinSet::new();
            for lease in granted.into_iter().flatten() {
                releases.spawn(lease.release());
            }
            assert!(releases.join_all().await.into_iter().all(|it| it.unwrap() == Released::WhileHeld));
        }
        match tx {
            Some(tx) => pinned.commit(tx).await.unwrap(),
            None => drop(pinned.release().await.unwrap()),
        }
        held.release().await.unwrap();
        without_ttl.release().await.unwrap();
        assert_eq!(here.list("").await.unwrap(), []);
    }
}

on_every_server! {
    async fn a_dead_connection_fails_no_claim_that_shares_its_statement<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(8).connect(proxy.url()).await.unwrap();
        let (here, there) = (Leases::new(pool), Leases::new(db.pool.clone()));
        let keys = released(&here).await;
        let held = there.lease("held").acquire().await.unwrap();
        for _ in 0..20 {
            here.lease("warm").acquire().await.unwrap().release().await.unwrap();
            proxy.reset();
            tokio::time::sleep(Duration::from_millis(1)).await;
            let granted = tried(keys.iter().map(|it| &**it).chain(["held"]).map(|it| here.lease(it))).await;
            let number = granted.iter().flatten().count();
            assert_eq!((number, granted.last().unwrap().is_some()), (TASKS, false), "on {}", S::NAME);
            for lease in granted.into_iter().flatten() {
                lease.release().await.unwrap();
            }
        }
        held.release().await.unwrap();
        // Nothing stays until its ttl: what a lost answer left open is released in the background.
        let begun = Instant::now();
        while !here.list("").await.unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", here.list("").await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
