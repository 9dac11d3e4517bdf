//! `#[with_lock]` on functions that are generic over their database or store: the bounds that they need.

use lockkit::{
    Error, LeaseStore, Leases,
    dialect::{Dialect, LeaseOps, NamedOps, RowOps, SessionOps},
    with_lock,
};
use sqlx::{Encode, Executor, IntoArguments, Pool, Type};

use crate::fixture::{Shop, ShopError};

#[with_lock(named, on = pool, key = "order:{id}", tx = tx)]
async fn under_a_name<DB: NamedOps>(pool: &Pool<DB>, id: i64) -> Result<i64, ShopError>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    DB::Arguments: IntoArguments<DB>,
{
    sqlx::query("SELECT 1").execute(&mut *tx).await?;
    Ok(id)
}

#[with_lock(row, on = pool, table = "t_items", by(item_id = id), tx = tx)]
async fn under_a_row<DB: RowOps>(pool: &Pool<DB>, id: i64) -> Result<i64, Error>
where
    for<'q> i64: Encode<'q, DB> + Type<DB>,
{
    let _ = &mut *tx;
    Ok(id)
}

#[with_lock(version, on = pool, tx = tx)]
async fn in_a_transaction<DB: Dialect>(pool: &Pool<DB>) -> Result<(), Error> {
    let _ = &mut *tx;
    Ok(())
}

#[with_lock(lease, on = leases, key = "order:{id}")]
async fn under_a_lease<S: LeaseStore>(leases: &Leases<S>, id: i64) -> Result<i64, Error> {
    Ok(id)
}

#[with_lock(lease, on = leases, key = "order:{id}", as = lease, tx = tx)]
async fn under_a_lease_with_tx<DB: LeaseOps>(leases: &Leases<Pool<DB>>, id: i64) -> Result<i64, Error> {
    lease.verify(&mut tx).await?;
    Ok(id)
}

#[with_lock(session, on = pool, key = "leader")]
async fn under_a_session_lock<DB: SessionOps>(pool: &Pool<DB>) -> Result<(), Error> {
    Ok(())
}

#[tokio::test]
async fn a_function_may_be_generic_over_its_database() {
    let shop = Shop::new().await;
    assert_eq!(under_a_name(&shop.db, 7).await.unwrap(), 7);
    assert_eq!(under_a_row(&shop.db, 7).await.unwrap(), 7);
    in_a_transaction(&shop.db).await.unwrap();
    assert_eq!(under_a_lease(&shop.leases, 7).await.unwrap(), 7);
    assert_eq!(under_a_lease_with_tx(&shop.leases, 7).await.unwrap(), 7);
    let _ = under_a_session_lock::<sqlx::Postgres>;
}
