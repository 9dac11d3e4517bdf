use lockkit::{Error, Lease, Tx, dialect::LeaseOps};
use sqlx::{Pool, Sqlite};

async fn f<DB: LeaseOps>(lease: Lease<Pool<DB>>, tx: Tx<Sqlite>) -> Result<(), Error> {
    lease.commit(tx).await
}

fn main() {}
