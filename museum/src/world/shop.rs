//! A shop on a database of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use sqlx::{ConnectOptions, Connection, Pool};

use super::{Changed, Place, Sql, shift_leases};
use crate::stage::{Stage, View};

#[derive(Debug)]
pub(crate) struct Shop<DB: Sql> {
    pub(crate) pool: Pool<DB>,
    /// The clock of the database, for recipes that store times.
    seconds: Arc<AtomicI64>,
}

impl<DB: Sql> Shop<DB> {
    /// A shop with these tables, and lockkit's.
    pub(crate) async fn open(place: &Place, tables: &str) -> Result<Self> {
        Self::with_connections(place, tables, 8).await
    }

    /// A shop whose services share so many connections.
    pub(crate) async fn with_connections(place: &Place, tables: &str, connections: u32) -> Result<Self> {
        let pool = DB::open(place, connections).await?;
        lockkit::migrate(&pool).await?;
        if !tables.is_empty() {
            DB::execute(&mut *pool.acquire().await?, tables).await?;
        }
        // A connection comes back to its pool a moment after its last use.
        while pool.num_idle() < usize::try_from(pool.size())? {
            tokio::task::yield_now().await;
        }
        Ok(Self { pool, seconds: Arc::default() })
    }

    /// A stage that shows this shop, and knows from the database who waits.
    pub(crate) fn stage<F>(&self, state_title: &'static str, view: impl Fn(Self) -> F + Send + 'static) -> Stage
    where
        F: Future<Output = Result<View>> + Send + 'static,
    {
        let (clock, asked) = (self.clone(), self.clone());
        let stage = Stage::of(state_title, self, view).clock(move |time| clock.clone().pass(time));
        stage.asks(move || asked.clone().waiting())
    }

    /// Runs a statement in a transaction of its own.
    pub(crate) async fn execute(&self, sql: &str) -> sqlx::Result<Changed> {
        DB::execute(&mut *self.pool.acquire().await?, sql).await
    }

    /// A number in the database.
    pub(crate) async fn number(&self, sql: &str) -> sqlx::Result<i64> {
        DB::number(&mut *self.pool.acquire().await?, sql).await
    }

    /// How many sessions wait for a lock. `None` if the database cannot tell.
    pub(crate) async fn waiting(self) -> Result<Option<usize>> {
        let Some(count) = DB::WAITING else { return Ok(None) };
        // The pool may be in use as a whole.
        let mut conn = self.pool.connect_options().connect().await?;
        let waiting = DB::number(&mut conn, count).await?;
        conn.close().await?;
        Ok(Some(usize::try_from(waiting)?))
    }

    /// Lets time pass for the database: for the recipes, and for lockkit's leases in it.
    pub(crate) async fn pass(self, time: Duration) -> Result<()> {
        self.seconds.fetch_add(i64::try_from(time.as_secs())?, Ordering::Relaxed);
        shift_leases(&self.pool, time).await
    }

    /// The clock of the database.
    pub(crate) fn now(&self) -> i64 {
        self.seconds.load(Ordering::Relaxed)
    }
}

impl<DB: Sql> Clone for Shop<DB> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), seconds: self.seconds.clone() }
    }
}
