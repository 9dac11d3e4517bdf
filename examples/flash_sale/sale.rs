//! The service: one draw under each kind of lock, and without any. This is the file to copy from.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use lockkit::{Leases, OrConflict, Stock, with_lock};
use serde::{Deserialize, Serialize};
use sqlx::{Encode, Pool, Type};
use tokio::time::sleep;

use crate::{draws::Draw, shop::Shop};

/// How draws of the same item are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Strategy {
    /// Not at all: check, then write.
    Naive,
    /// By a lock on the item's row.
    Row,
    /// By a lock on the item's name, inside a transaction.
    Named,
    /// By a lease on the item's name; the transaction commits only while it is held.
    Lease,
    /// By the item's version, which the write compares.
    Version,
    /// By a lock on the buyer's name alone: the pieces of the item are in a segmented stock.
    Stock,
}

impl Strategy {
    pub(crate) const ALL: [Self; 6] = [Self::Naive, Self::Row, Self::Named, Self::Lease, Self::Version, Self::Stock];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Row => "row",
            Self::Named => "named",
            Self::Lease => "lease",
            Self::Version => "version",
            Self::Stock => "stock",
        }
    }
}

/// What came of a draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Won,
    SoldOut,
    WonBefore,
}

/// Why a draw failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrawError {
    #[error(transparent)]
    Lock(#[from] lockkit::Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl DrawError {
    /// The item was too busy; nothing was drawn.
    pub(crate) fn gave_up(&self) -> bool {
        matches!(self, Self::Lock(lockkit::Error::Contended { .. } | lockkit::Error::RetriesExhausted { .. }))
    }
}

/// The service.
#[derive(Debug)]
pub(crate) struct Sale<DB: Shop> {
    db: Pool<DB>,
    leases: Leases<Pool<DB>>,
    retries: AtomicU64,
}

// A service that knows its database needs none of the type parameters.
impl<DB: Shop> Sale<DB>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    pub(crate) fn new(db: Pool<DB>) -> Self {
        Self { leases: Leases::new(db.clone()), db, retries: AtomicU64::new(0) }
    }

    pub(crate) async fn draw(&self, strategy: Strategy, draw: Draw) -> Result<Outcome, DrawError> {
        let Draw { item_id, buyer_id } = draw;
        match strategy {
            Strategy::Naive => self.draw_without_lock(item_id, buyer_id).await,
            Strategy::Row => self.draw_with_row_lock(item_id, buyer_id).await,
            Strategy::Named => self.draw_with_named_lock(item_id, buyer_id).await,
            Strategy::Lease => self.draw_with_lease(item_id, buyer_id).await,
            Strategy::Version => self.draw_with_version(item_id, buyer_id).await,
            Strategy::Stock => self.draw_from_stock(item_id, buyer_id).await,
        }
    }

    /// The snippet that everybody has written once.
    async fn draw_without_lock(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        let mut conn = self.db.acquire().await?;
        check_then_write::<DB>(&mut conn, item_id, buyer_id).await
    }

    /// The row of the item is locked before it is read, until the commit.
    #[with_lock(row, on = &self.db, table = "t_items", by(item_id = item_id), wait = "30s", tx = tx)]
    async fn draw_with_row_lock(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        check_then_write::<DB>(&mut *tx, item_id, buyer_id).await
    }

    /// The same for what has no row: here a name, locked until the commit.
    #[with_lock(named, on = &self.db, key = "item:{item_id}", wait = "30s", tx = tx)]
    async fn draw_with_named_lock(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        check_then_write::<DB>(&mut *tx, item_id, buyer_id).await
    }

    /// The lease could also span processes and other services; whoever lost it cannot commit.
    #[with_lock(lease, on = &self.leases, key = "item:{item_id}", ttl = "30s", wait = "30s", tx = tx)]
    async fn draw_with_lease(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        check_then_write::<DB>(&mut *tx, item_id, buyer_id).await
    }

    /// Nothing is locked: a write that finds another version than was read is a conflict, and all of it is run again.
    #[with_lock(version, on = &self.db, deadline = "30s", as = attempt, tx = tx)]
    async fn draw_with_version(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        if attempt > 1 {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
        let item = DB::item(&mut *tx, item_id).await?;
        if item.stock == 0 {
            return Ok(Outcome::SoldOut);
        }
        if DB::has_won(&mut *tx, item_id, buyer_id).await? {
            return Ok(Outcome::WonBefore);
        }
        sleep(THINKING).await;
        DB::set_stock_if(&mut *tx, item_id, item.stock - 1, item.version).await?.or_conflict()?;
        DB::add_win(&mut *tx, item_id, buyer_id).await?;
        Ok(Outcome::Won)
    }

    /// Buyers do not wait for each other, only for themselves: the same buyer may draw twice at once. The piece and the win
    /// are committed together.
    #[with_lock(named, on = &self.db, key = "item:{item_id}:{buyer_id}", wait = "30s", attempts = 10, as = attempt, tx = tx)]
    async fn draw_from_stock(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        if attempt > 1 {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
        if DB::has_won(&mut *tx, item_id, buyer_id).await? {
            return Ok(Outcome::WonBefore);
        }
        match stock_of(&self.db, item_id).take_in(&mut *tx, 1).await {
            Ok(_) => {}
            Err(lockkit::Error::SoldOut { .. }) => return Ok(Outcome::SoldOut),
            Err(err) => return Err(err.into()),
        }
        sleep(THINKING).await;
        DB::add_win(&mut *tx, item_id, buyer_id).await?;
        Ok(Outcome::Won)
    }

    /// How many attempts were made beyond the first of each draw.
    pub(crate) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }
}

/// The pieces of an item, in segments.
pub(crate) fn stock_of<DB: Shop>(pool: &Pool<DB>, item_id: i64) -> Stock<DB> {
    Stock::new(pool.clone(), format!("item:{item_id}")).wait(Duration::from_secs(30))
}

/// What a service does between its look and its write: prices, coupons, another service.
const THINKING: Duration = Duration::from_millis(1);

/// Correct only while nobody else draws the same item. Every strategy but `version` runs these same lines.
async fn check_then_write<DB: Shop>(
    conn: &mut DB::Connection,
    item_id: i64,
    buyer_id: i64,
) -> Result<Outcome, DrawError> {
    let item = DB::item(conn, item_id).await?;
    if item.stock == 0 {
        return Ok(Outcome::SoldOut);
    }
    if DB::has_won(conn, item_id, buyer_id).await? {
        return Ok(Outcome::WonBefore);
    }
    sleep(THINKING).await;
    DB::set_stock(conn, item_id, item.stock - 1).await?;
    DB::add_win(conn, item_id, buyer_id).await?;
    Ok(Outcome::Won)
}
