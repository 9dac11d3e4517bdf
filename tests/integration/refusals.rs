//! What the end of a wait says where no other holder has the lease.

use std::time::Duration;

use lockkit::{Error, Fault, Leases};
use support::{JoinSet, TestDb, on_databases};

on_databases! { [sqlite]
    async fn the_callers_own_transaction_in_the_way_of_its_claim_is_no_holder<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let tx = lockkit::begin(&db.pool).await.unwrap();
        let says_so = |err: Error| {
            assert!(matches!(err, Error::Database { fault: Fault::Contended, .. }), "{err:?}");
            assert_eq!(err.key().unwrap(), "k");
            assert!(format!("{err:?}").contains("DatabaseLocked"), "{err:?}");
        };
        for wait in [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(7)] {
            says_so(leases.lease("k").wait(wait).acquire().await.unwrap_err());
        }
        says_so(leases.lease("k").try_acquire().await.unwrap_err());
        says_so(leases.all(["k", "l"]).try_acquire().await.unwrap_err());
        tx.rollback().await.unwrap();
        drop(leases.lease("k").acquire().await.unwrap());
    }
}

on_databases! { [postgres]
    async fn leases_are_acquired_where_serializable_is_the_default<S>(db: TestDb<S>) {
        let name = db.fetch_text("SELECT current_database()").await.unwrap();
        db.execute(&format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")).await;
        for _ in 0..4 {
            let mut clients = JoinSet::new();
            for _ in 0..4 {
                let leases = Leases::builder(db.pool_of(3).await).wait(Duration::from_secs(120)).build().unwrap();
                clients.spawn(async move {
                    for _ in 0..15 {
                        leases.lease("k").acquire().await?.release().await?;
                    }
                    Ok::<_, Error>(())
                });
            }
            while let Some(client) = clients.join_next().await {
                client.unwrap().unwrap();
            }
        }
    }
}
