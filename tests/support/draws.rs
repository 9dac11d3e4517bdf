//! One item in stock and many who draw from it, under each strategy of `lockkit` or under none: the oracle of the
//! contention tests, within one process and across processes.

use std::error::Error as StdError;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use lockkit::{Leases, NamedLock, RetryPolicy, RowLock, Versioned, VersionedRow, is_retryable};
use sqlx::{Database, Encode, Pool, Type};
use tokio::task::{JoinSet, yield_now};

use crate::{Backend, TestDb};

/// How the draws are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Not at all: the control, which must fail the oracle.
    Naive,
    Row,
    Named,
    Lease,
    Version,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Naive => "naive",
            Self::Row => "row",
            Self::Named => "named",
            Self::Lease => "lease",
            Self::Version => "version",
        })
    }
}

impl FromStr for Strategy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::Naive, Self::Row, Self::Named, Self::Lease, Self::Version]
            .into_iter()
            .find(|strategy| strategy.to_string() == name)
            .ok_or_else(|| format!("{name} is not a strategy"))
    }
}

/// What came of many draws, by the word of those who drew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub won: u64,
    pub sold_out: u64,
    /// Waited in vain for the lock, or tried in vain again and again.
    pub gave_up: u64,
}

impl Tally {
    pub fn draws(self) -> u64 {
        self.won + self.sold_out + self.gave_up
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.won += other.won;
        self.sold_out += other.sold_out;
        self.gave_up += other.gave_up;
    }
}

/// What the database says afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Stock {
    pub before: u64,
    pub left: i64,
    pub wins: u64,
}

impl Stock {
    /// Puts this many pieces on sale.
    pub async fn fill<S: Backend>(db: &TestDb<S>, stock: u64) {
        db.execute(
            "CREATE TABLE item (
                 id BIGINT NOT NULL PRIMARY KEY, stock BIGINT NOT NULL, wins BIGINT NOT NULL, version BIGINT NOT NULL
             )",
        )
        .await;
        db.execute(&format!("INSERT INTO item VALUES (1, {stock}, 0, 1)")).await;
    }

    /// Looks at what is left of `before` pieces.
    pub async fn look<S: Backend>(db: &TestDb<S>, before: u64) -> Self {
        let left = db.fetch_i64("SELECT stock FROM item WHERE id = 1").await.expect("the item");
        let wins = db.fetch_i64("SELECT wins FROM item WHERE id = 1").await.expect("the item");
        Self { before, left, wins: u64::try_from(wins).expect("wins are counted up") }
    }

    /// Whether every win took one piece, and no piece was taken twice.
    pub fn adds_up(self, tally: Tally) -> bool {
        let sold = i64::try_from(self.before).expect("a small stock") - self.left;
        self.left >= 0 && i64::try_from(tally.won) == Ok(sold) && tally.won == self.wins
    }
}

/// A service that sells the item.
#[derive(Debug)]
pub struct Draws<S: Backend> {
    pool: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
}

type BoxError = Box<dyn StdError + Send + Sync>;

/// Longer than any test: who gives up is not an error, but too many of them would make a test vacuous.
const PATIENCE: Duration = Duration::from_mins(2);

impl<S> Draws<S>
where
    S: Backend,
    i64: for<'v> Encode<'v, S::DB> + Type<S::DB>,
    <S::DB as Database>::Arguments: Clone,
{
    pub fn new(pool: Pool<S::DB>) -> Self {
        let leases = Leases::builder(pool.clone()).wait(PATIENCE).build().expect("valid settings");
        Self { pool, leases }
    }

    /// Draws `draws` times in each of `tasks` tasks.
    ///
    /// # Panics
    /// If a draw fails otherwise than by giving up.
    pub async fn draw_all(self, strategy: Strategy, tasks: u64, draws: u64) -> Tally {
        let draws_of_all = Arc::new(self);
        let mut drawing = JoinSet::new();
        for _ in 0..tasks {
            let item = Arc::clone(&draws_of_all);
            drawing.spawn(async move {
                let mut tally = Tally::default();
                for _ in 0..draws {
                    match item.draw(strategy).await {
                        Ok(true) => tally.won += 1,
                        Ok(false) => tally.sold_out += 1,
                        Err(err) if gave_up(&*err) => tally.gave_up += 1,
                        Err(err) => panic!("a {strategy} draw on {}: {err} ({err:?})", S::NAME),
                    }
                }
                tally
            });
        }
        let mut all = Tally::default();
        while let Some(tally) = drawing.join_next().await {
            all += tally.expect("a task that draws");
        }
        all
    }

    /// One draw; whether it won.
    async fn draw(&self, strategy: Strategy) -> Result<bool, BoxError> {
        match strategy {
            Strategy::Naive => {
                let mut conn = self.pool.acquire().await?;
                read_check_write::<S>(&mut conn).await
            }
            Strategy::Row => {
                let mut tx = lockkit::begin(&self.pool).await?;
                RowLock::table("item").by("id", 1_i64).wait(PATIENCE).lock(&mut *tx).await?;
                let won = read_check_write::<S>(&mut tx).await?;
                tx.commit().await?;
                Ok(won)
            }
            Strategy::Named => {
                let mut tx = lockkit::begin(&self.pool).await?;
                NamedLock::new("item:1").wait(PATIENCE).lock(&mut *tx).await?;
                let won = read_check_write::<S>(&mut tx).await?;
                tx.commit().await?;
                Ok(won)
            }
            Strategy::Lease => {
                let lease = self.leases.lease("item:1").acquire().await?;
                let mut tx = lockkit::begin(&self.pool).await?;
                let won = read_check_write::<S>(&mut tx).await?;
                lease.commit(tx).await?;
                Ok(won)
            }
            Strategy::Version => {
                let policy = RetryPolicy::new().deadline(PATIENCE);
                policy.retry_if(|err: &BoxError| is_retryable(&**err), |_| self.draw_by_version()).await
            }
        }
    }

    async fn draw_by_version(&self) -> Result<bool, BoxError> {
        let item = || VersionedRow::<S::DB>::table("item").by("id", 1_i64);
        let mut tx = lockkit::begin(&self.pool).await?;
        // The version first: a stock that is newer than its version makes a conflict, never a lost update.
        let Versioned { row: (), version, .. } = item().read(&mut *tx).await?;
        let stock = stock::<S>(&mut tx).await?;
        if stock == 0 {
            tx.rollback().await?;
            return Ok(false);
        }
        item().expected(version).bump(&mut *tx).await?;
        take::<S>(&mut tx, stock).await?;
        tx.commit().await?;
        Ok(true)
    }
}

fn gave_up(err: &(dyn StdError + 'static)) -> bool {
    // Without a lock of lockkit, SQLite refuses a write that waited for 5 s.
    let is_busy = |err: &sqlx::Error| err.as_database_error().is_some_and(|it| it.code().is_some_and(|it| it == "5"));
    matches!(err.downcast_ref(), Some(lockkit::Error::Contended { .. } | lockkit::Error::RetriesExhausted { .. }))
        || err.downcast_ref().is_some_and(is_busy)
}

/// What is only correct while nobody else does it: the new stock is computed here, from the stock that was read.
async fn read_check_write<S: Backend>(conn: &mut <S::DB as Database>::Connection) -> Result<bool, BoxError> {
    let stock = stock::<S>(conn).await?;
    if stock == 0 {
        return Ok(false);
    }
    yield_now().await;
    take::<S>(conn, stock).await?;
    Ok(true)
}

async fn stock<S: Backend>(conn: &mut <S::DB as Database>::Connection) -> Result<i64, BoxError> {
    Ok(S::fetch_i64(conn, "SELECT stock FROM item WHERE id = 1").await?.ok_or("there is no item")?)
}

async fn take<S: Backend>(conn: &mut <S::DB as Database>::Connection, stock: i64) -> Result<(), BoxError> {
    let sql = format!("UPDATE item SET stock = {}, wins = wins + 1 WHERE id = 1", stock - 1);
    match S::execute(conn, &sql).await? {
        1 => Ok(()),
        changed => Err(format!("{changed} items were changed").into()),
    }
}
