//! Two transactions that wait for each other.

use lockkit::{Error, Fault, RowLock, Tx};
use sqlx::{Encode, Pool, Type};

use crate::Server;
use crate::server::Backend;

/// What a deadlock leaves behind.
#[derive(Debug)]
pub struct Deadlock<S: Backend> {
    /// The transaction that the server ended.
    pub victim: Tx<S::DB>,
    /// What the victim was told.
    pub error: Error,
    /// The transaction that has both rows now.
    pub survivor: Tx<S::DB>,
}

impl<S: Backend> Deadlock<S>
where
    i64: for<'v> Encode<'v, S::DB> + Type<S::DB>,
{
    /// Has two transactions lock the rows 1 and 2 of the table `t`, by its column `id`, in opposite orders.
    ///
    /// # Panics
    /// If the server does not end exactly one of them.
    pub async fn of(pool: &Pool<<S as Server>::DB>) -> Self {
        let lock = |id: i64| RowLock::table("t").by("id", id);
        let mut one = lockkit::begin(pool).await.expect("begin");
        let mut two = lockkit::begin(pool).await.expect("begin");
        lock(1).lock(&mut *one).await.expect("lock the first row");
        lock(2).lock(&mut *two).await.expect("lock the second row");
        let (first, second) = tokio::join!(lock(2).lock(&mut *one), lock(1).lock(&mut *two));
        let (victim, error, survivor) = match (first, second) {
            (Err(err), Ok(_)) => (one, err, two),
            (Ok(_), Err(err)) => (two, err, one),
            both => panic!("{both:?}"),
        };
        assert!(matches!(error, Error::Database { fault: Fault::Deadlock, .. }), "{error:?}");
        Self { victim, error, survivor }
    }
}
