//! One statement about several leases: each is told by its token, also where two have one key.

use std::time::Duration;

use lockkit::{
    LeaseStore, Leases,
    store::{Acquired, Answer, Claim, Release, Renewal, Token},
};
use support::{TestDb, on_every_database};
use tokio::time::timeout;

fn claim() -> Claim {
    Claim::new("k", Token::random(), "holder", Duration::from_secs(20))
}

on_every_database! {
    async fn a_lost_lease_is_gone_beside_the_one_that_has_its_key_now<S>(db: TestDb<S>) {
        let (lost, held) = (claim(), claim());
        assert!(matches!(db.pool.lease_acquire(&held).await.unwrap(), Acquired::Granted(_)));
        let renewal = |it: &Claim| Renewal::new(it.key.clone(), it.token, it.ttl);
        let renewed = db.pool.lease_renew(&[renewal(&lost), renewal(&held)]).await.unwrap();
        assert_eq!(renewed, [Answer::Gone, Answer::Done]);
        let renewed = db.pool.lease_renew(&[renewal(&held), renewal(&lost)]).await.unwrap();
        assert_eq!(renewed, [Answer::Done, Answer::Gone]);
        for min_hold in [Duration::from_secs(60), Duration::ZERO] {
            let release = |it: &Claim| Release::new(it.key.clone(), it.token, min_hold);
            let released = db.pool.lease_release_all(&[release(&lost), release(&held)]).await.unwrap();
            assert_eq!(released, [Answer::Gone, Answer::Done]);
            let released = db.pool.lease_release_all(&[release(&held), release(&lost)]).await.unwrap();
            assert_eq!(released, [Answer::Gone, Answer::Gone]);
            db.execute("UPDATE lockkit_lease SET expires_us = 1").await;
            assert!(matches!(db.pool.lease_acquire(&held).await.unwrap(), Acquired::Granted(_)));
        }
    }

    async fn a_stolen_lease_is_lost_although_this_process_holds_its_key_again<S>(db: TestDb<S>) {
        let ours = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(3)).build().unwrap();
        let stolen = ours.lease("k").acquire().await.unwrap();
        assert!(Leases::new(db.pool_of(1).await).steal("k").await.unwrap().is_some());
        // Both are renewed in one statement.
        let others = Leases::new(db.pool.clone());
        let turn = others.lease("k").acquire().await.unwrap();
        turn.release().await.unwrap();
        let held = ours.lease("k").acquire().await.unwrap();

        timeout(Duration::from_secs(30), stolen.lost()).await.expect("it is lost");
        assert!(held.is_trusted() && !stolen.is_trusted());
    }
}
