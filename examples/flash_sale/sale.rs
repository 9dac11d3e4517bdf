//! The service: one draw under each kind of lock, and without any. This is the file to copy from.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use lockkit::{Leases, OrConflict, Stock, with_lock};
use serde::{Deserialize, Serialize};
use sqlx::{Encode, Pool, Type};
use tokio::time::sleep;

#[cfg(feature = "stores")]
use crate::stores::Store;
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
    /// By the snippet that many articles have: `SET NX PX`, and `DEL` at the end.
    #[cfg(feature = "redis")]
    SetNx,
    /// By a lease in another system, which the write does not depend on.
    #[cfg(feature = "stores")]
    Store,
    /// By a lease in another system, whose fence guards the transaction.
    #[cfg(feature = "stores")]
    Guarded,
}

impl Strategy {
    /// Those of a store beside the database.
    #[cfg(feature = "stores")]
    pub(crate) const OF_STORES: &[Self] = &[
        #[cfg(feature = "redis")]
        Self::SetNx,
        Self::Store,
        Self::Guarded,
    ];

    #[cfg(feature = "stores")]
    pub(crate) fn needs_store(self) -> bool {
        Self::OF_STORES.contains(&self)
    }

    /// Whether it may fail: it is there to show how.
    pub(crate) fn may_fail(self) -> bool {
        match self {
            Self::Naive => true,
            #[cfg(feature = "redis")]
            Self::SetNx => true,
            #[cfg(feature = "stores")]
            Self::Store => true,
            _ => false,
        }
    }

    /// Why it may fail.
    pub(crate) fn weakness(self) -> &'static str {
        match self {
            Self::Naive => "checks, then writes, without a lock",
            #[cfg(feature = "redis")]
            Self::SetNx => "its key expires while it works, and it deletes the key of another one",
            #[cfg(feature = "stores")]
            Self::Store => "a process that was stopped past its ttl writes all the same",
            _ => "none",
        }
    }

    /// Those that need the database only.
    pub(crate) const ALL: [Self; 6] = [Self::Naive, Self::Row, Self::Named, Self::Lease, Self::Version, Self::Stock];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Row => "row",
            Self::Named => "named",
            Self::Lease => "lease",
            Self::Version => "version",
            Self::Stock => "stock",
            #[cfg(feature = "redis")]
            Self::SetNx => "set-nx",
            #[cfg(feature = "stores")]
            Self::Store => "store",
            #[cfg(feature = "stores")]
            Self::Guarded => "guarded",
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
    #[cfg(feature = "redis")]
    #[error(transparent)]
    Redis(#[from] redis::RedisError),
}

impl DrawError {
    /// The item was too busy, the lease on it was lost, or the store did not answer; nothing was drawn.
    pub(crate) fn gave_up(&self) -> bool {
        match self {
            Self::Lock(lockkit::Error::RetriesExhausted { .. }) => true,
            // Other writers had all of a SQLite database locked for too long.
            Self::Lock(lockkit::Error::Database { fault: lockkit::Fault::Contended, .. }) => true,
            Self::Lock(err) => err.is_contended() || err.is_lost() || err.is_transient(),
            Self::Database(_) => false,
            #[cfg(feature = "redis")]
            Self::Redis(_) => false,
        }
    }
}

/// The service.
#[derive(Debug)]
pub(crate) struct Sale<DB: Shop> {
    db: Pool<DB>,
    leases: Leases<Pool<DB>>,
    #[cfg(feature = "stores")]
    elsewhere: Option<Elsewhere>,
    retries: AtomicU64,
}

/// Leases in another system.
#[cfg(feature = "stores")]
#[derive(Debug)]
struct Elsewhere {
    leases: Leases<Store>,
    #[cfg(feature = "redis")]
    redis: Option<redis::aio::MultiplexedConnection>,
}

// A service that knows its database needs none of the type parameters.
impl<DB: Shop> Sale<DB>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    pub(crate) fn new(db: Pool<DB>) -> Self {
        let leases = Leases::new(db.clone());
        Self {
            leases,
            db,
            #[cfg(feature = "stores")]
            elsewhere: None,
            retries: AtomicU64::new(0),
        }
    }

    /// With leases in the store of this URL.
    #[cfg(feature = "stores")]
    pub(crate) async fn with_store(mut self, url: &str) -> anyhow::Result<Self> {
        let leases = Leases::builder(Store::connect(url).await?).fence_domain("flash sale").build()?;
        #[cfg(feature = "redis")]
        let redis = match leases.store() {
            Store::Redis(_) => {
                // Without a bound, which a process that was stopped would exceed.
                let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
                Some(redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&patient).await?)
            }
            #[allow(unreachable_patterns, reason = "the demo may have been built with this store only")]
            _ => None,
        };
        self.elsewhere = Some(Elsewhere {
            leases,
            #[cfg(feature = "redis")]
            redis,
        });
        Ok(self)
    }

    #[cfg(feature = "stores")]
    fn elsewhere(&self) -> &Elsewhere {
        self.elsewhere.as_ref().expect("BUG: these strategies run with a store only")
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
            #[cfg(feature = "redis")]
            Strategy::SetNx => self.draw_with_set_nx(item_id, buyer_id).await,
            #[cfg(feature = "stores")]
            Strategy::Store => self.draw_with_lease_elsewhere(item_id, buyer_id).await,
            #[cfg(feature = "stores")]
            Strategy::Guarded => self.draw_guarded(item_id, buyer_id).await,
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

    /// Buyers do not wait for each other, only for themselves: the same buyer may draw twice at once. The piece and the
    /// win are committed together.
    #[with_lock(
        named,
        on = &self.db,
        key = "item:{item_id}:{buyer_id}",
        wait = "30s",
        attempts = 10,
        as = attempt,
        tx = tx
    )]
    async fn draw_from_stock(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        if attempt > 1 {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
        if DB::has_won(&mut *tx, item_id, buyer_id).await? {
            return Ok(Outcome::WonBefore);
        }
        match stock_of(&self.db, item_id).take_in(&mut tx, 1).await {
            Ok(_) => {}
            Err(lockkit::Error::SoldOut { .. }) => return Ok(Outcome::SoldOut),
            Err(err) => return Err(err.into()),
        }
        sleep(THINKING).await;
        DB::add_win(&mut *tx, item_id, buyer_id).await?;
        Ok(Outcome::Won)
    }

    /// The snippet of the articles. The key expires while its owner still works, and `DEL` then frees the lock of
    /// another one.
    #[cfg(feature = "redis")]
    async fn draw_with_set_nx(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        use redis::{AsyncCommands, ExistenceCheck::NX, SetExpiry::PX, SetOptions};

        let mut redis = self.elsewhere().redis.clone().expect("BUG: this strategy runs with Redis only");
        let key = format!("set-nx:{item_id}");
        let options = SetOptions::default().conditional_set(NX).with_expiration(PX(1000));
        while !redis.set_options::<_, _, bool>(&key, 1, options.clone()).await? {
            sleep(THINKING).await;
        }
        let outcome = self.draw_without_lock(item_id, buyer_id).await;
        redis.del::<_, ()>(&key).await?;
        outcome
    }

    /// Nothing ties the writes to the lease: a process that was stopped past its ttl writes all the same.
    #[cfg(feature = "stores")]
    #[with_lock(
        lease,
        on = &self.elsewhere().leases,
        key = "item:{item_id}",
        ttl = "1s",
        wait = "30s",
        on_lost = continue
    )]
    async fn draw_with_lease_elsewhere(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        self.draw_without_lock(item_id, buyer_id).await
    }

    /// The fence of the lease guards the transaction: what was stopped past its ttl cannot commit.
    #[cfg(feature = "stores")]
    #[with_lock(
        lease,
        on = &self.elsewhere().leases,
        pool = &self.db,
        key = "item:{item_id}",
        ttl = "1s",
        wait = "30s",
        tx = tx
    )]
    async fn draw_guarded(&self, item_id: i64, buyer_id: i64) -> Result<Outcome, DrawError> {
        check_then_write::<DB>(&mut *tx, item_id, buyer_id).await
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
