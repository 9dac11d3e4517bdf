//! Who holds a lock, asked of the server after a wait for it has failed. What goes wrong here is no error: the caller hears
//! that the lock is held, without a name.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    error::Error,
    holder::{Holder, LockHolder},
    key::Key,
    sql::{Dialect, connection},
};

/// How long the server may take to say it.
const LIMIT: Duration = Duration::from_secs(1);

/// The holder, asked on the connection that has waited.
pub(crate) async fn seen(look: impl Future<Output = sqlx::Result<Option<LockHolder>>>) -> Option<Box<Holder>> {
    timeout(LIMIT, look).await.ok()?.ok()?.map(|it| Box::new(it.into()))
}

/// The error of a wait whose transaction has been rolled back, with the holder that a connection of the pool sees.
pub(crate) async fn with_holder<DB: Dialect>(
    pool: &Pool<DB>,
    err: Error,
    look: impl AsyncFnOnce(&mut DB::Connection, &Key) -> sqlx::Result<Option<LockHolder>>,
) -> Error {
    let Error::Contended { key, waited, holder: None } = err else { return err };
    let looking = async {
        let mut conn = connection(pool, "looking for the holder of", Some(&key)).await.ok()?;
        look(&mut conn, &key).await.ok()?
    };
    let holder = timeout(LIMIT, looking).await.ok().flatten().map(|it| Box::new(it.into()));
    Error::Contended { key, waited, holder }
}
