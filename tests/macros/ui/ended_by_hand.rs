use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), tx = tx)]
async fn rolled_back(leases: &Pool) -> Result<(), Error> {
    if leases.list("").await?.is_empty() {
        tx.rollback().await?;
    }
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", as = lease, tx = tx)]
async fn committed_with_the_lease(leases: &Pool) -> Result<(), Error> {
    lease.commit(tx).await
}

#[with_lock(lease, on = leases, key = "k", as = held)]
async fn released(leases: &Pool) -> Result<(), Error> {
    held.release().await?;
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["k", "l"], as = both)]
async fn all_released(leases: &Pool) -> Result<(), Error> {
    match both.release().await? {
        _ => Ok(()),
    }
}

#[with_lock(named, on = leases.store(), key = "k", attempts = 3, tx = tx)]
async fn spawned(leases: &Pool) -> Result<(), Error> {
    tokio::spawn(async move {
        sqlx::query("UPDATE t SET n = 1").execute(&mut *tx).await.unwrap();
    });
    Ok(())
}

#[with_lock(named, on = leases.store(), key = "k", tx = tx)]
async fn given_away(leases: &Pool) -> Result<(), Error> {
    drop(tx);
    Ok(())
}

// These are others of the same name.
#[with_lock(lease, on = leases, key = "k", as = lease, tx = tx)]
async fn shadowed(leases: &Pool) -> Result<(), Error> {
    lease.verify(&mut tx).await?;
    {
        let lease = leases.lease("other").acquire().await?;
        let tx = lockkit::begin(leases.store()).await?;
        lease.commit(tx).await?;
    }
    let release = async |lease: lockkit::Lease<SqlitePool>| lease.release().await;
    release(leases.lease("other").acquire().await?).await?;
    if let Some(tx) = None::<lockkit::Tx<sqlx::Sqlite>> {
        tx.commit().await?;
    }
    Ok(())
}

fn main() {}
