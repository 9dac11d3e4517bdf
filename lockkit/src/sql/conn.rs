//! Where a statement runs: on the caller's connection, or on one borrowed from a pool for this statement.

use std::{
    future::Future,
    ops::{Deref, DerefMut},
};

use sqlx::Pool;

use crate::{
    body::guard::Guard,
    sql::{AsConnection, Dialect, Unsettled, check_in, connection},
    value::error::Result,
};

mod sealed {
    pub trait Sealed {}
}

/// Where a statement runs: `&pool`, or `&mut conn` and `&mut tx` (also as `&mut *tx`, the connection inside).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a pool nor a connection to a database that lockkit knows",
    label = "pass `&pool`, or inside a transaction `&mut *tx`"
)]
pub trait On<DB: Dialect>: Send + sealed::Sealed {
    /// The connection, for as long as the statement takes.
    #[doc(hidden)]
    type Conn: Finish + DerefMut<Target = DB::Connection> + Send;

    /// The return value of a write that a transaction may still undo. `()` on a pool, where the statement itself
    /// commits.
    type Written<W>;

    /// Whether the connection is still to be borrowed.
    #[doc(hidden)]
    const IS_POOL: bool;

    /// Gets the connection.
    #[doc(hidden)]
    fn reach(self, doing: &'static str) -> impl Future<Output = Result<Self::Conn>> + Send;

    /// Converts the value of a write: `()` where the write is already committed.
    #[doc(hidden)]
    fn written<W>(write: W) -> Self::Written<W>;
}

/// A connection that must be notified when no statement is in flight any more.
pub trait Finish {
    /// Declares that every statement has been answered.
    fn finish(self);
}

impl<C> sealed::Sealed for &mut C {}

impl<'c, DB: Dialect, C: AsConnection<DB>> On<DB> for &'c mut C {
    type Conn = Lent<'c, DB>;
    type Written<W> = W;
    const IS_POOL: bool = false;

    async fn reach(self, _doing: &'static str) -> Result<Self::Conn> {
        Ok(Lent(self.as_connection()))
    }

    fn written<W>(write: W) -> W {
        write
    }
}

impl<DB: Dialect> sealed::Sealed for &Pool<DB> {}

impl<DB: Dialect> On<DB> for &Pool<DB> {
    type Conn = Pooled<DB>;
    type Written<W> = ();
    const IS_POOL: bool = true;

    async fn reach(self, doing: &'static str) -> Result<Self::Conn> {
        let conn = connection(self, doing, None).await?;
        Ok(Pooled(Guard::new(Unsettled::new(conn))))
    }

    fn written<W>(_write: W) {}
}

/// The caller's connection.
#[derive(Debug)]
pub struct Lent<'c, DB: Dialect>(&'c mut DB::Connection);

impl<DB: Dialect> Finish for Lent<'_, DB> {
    fn finish(self) {}
}

impl<DB: Dialect> Deref for Lent<'_, DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        self.0
    }
}

impl<DB: Dialect> DerefMut for Lent<'_, DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.0
    }
}

/// A connection of a pool.
#[derive(Debug)]
pub struct Pooled<DB: Dialect>(Guard<Unsettled<DB>>);

impl<DB: Dialect> Finish for Pooled<DB> {
    fn finish(self) {
        check_in::<DB>(self.0.defuse().conn);
    }
}

impl<DB: Dialect> Deref for Pooled<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        &self.0.conn
    }
}

impl<DB: Dialect> DerefMut for Pooled<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        &mut self.0.get_mut().conn
    }
}
