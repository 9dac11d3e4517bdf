//! What operators see and do: who holds a lease, and taking it away.

use std::time::Duration;

use lockkit::{Error, Leases, Released};
use support::{TestDb, on_every_database};

on_every_database! {
    async fn a_lease_is_stolen_from_the_holder_that_was_seen_and_from_no_other<S>(db: TestDb<S>) {
        let (leases, operator) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let first = leases.lease("k").acquire().await.unwrap();
        let seen = operator.show("k").await.unwrap().unwrap();
        assert_eq!(seen.fence, first.fence());
        first.release().await.unwrap();
        assert_eq!(operator.steal_if("k", seen.fence).await.unwrap(), None, "nobody holds it");

        // Another holder came between the look and the answer.
        let second = leases.lease("k").acquire().await.unwrap();
        assert_eq!(operator.steal_if("k", seen.fence).await.unwrap(), None);
        assert_eq!(operator.show("k").await.unwrap().unwrap().fence, second.fence());
        second.extend(Duration::from_secs(30)).await.unwrap();

        let taken = operator.steal_if("k", second.fence()).await.unwrap().unwrap();
        assert_eq!((taken.fence, taken.key.as_str()), (second.fence(), "k"));
        assert_eq!(operator.show("k").await.unwrap(), None);
        assert_eq!(second.release().await.unwrap(), Released::AlreadyLost);
        assert!(matches!(operator.steal_if("", seen.fence).await, Err(Error::InvalidKey { .. })));
        db.assert_nothing_left().await;
    }
}
