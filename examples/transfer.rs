//! Money between accounts: two rows are locked in sorted order, so opposite transfers never deadlock.
//!
//! ```text
//! cargo run --example transfer                                                   # on a temporary SQLite file
//! cargo run --example transfer -- postgres://user:password@localhost/bank
//! cargo run --example transfer -- mysql://user:password@localhost/bank
//! ```
//!
//! Locking first the payer and then the payee, as it is often written, deadlocks as soon as two customers pay each
//! other at the same moment. `by_any` locks both rows with one statement in the order of their key, whoever pays whom.
//! The table `t_accounts` is made anew.

use std::{env, future::Future, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use lockkit::{RowLock, dialect::RowOps};
use sqlx::{Database, Encode, MySql, Pool, Postgres, Sqlite, Type, pool::PoolOptions};
use tokio::task::JoinSet;

const ACCOUNTS: i64 = 4;
const OPENING_BALANCE: i64 = 1_000;
const TASKS: u64 = 16;
const TRANSFERS: u32 = 25;

#[derive(Debug, thiserror::Error)]
enum TransferError {
    #[error("account {account_id} has only {balance}")]
    TooLittle { account_id: i64, balance: i64 },
    #[error(transparent)]
    Lock(#[from] lockkit::Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// Moves money, or nothing at all.
async fn transfer<DB: Bank>(pool: &Pool<DB>, from: i64, to: i64, amount: i64) -> Result<(), TransferError>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    let mut tx = lockkit::begin(pool).await?;
    RowLock::table("t_accounts").by_any("account_id", [from, to]).wait(Duration::from_secs(10)).lock(&mut tx).await?;
    // Both rows are ours now: what is read here is true until the commit.
    let balance = DB::balance(&mut tx, from).await?;
    if balance < amount {
        // The transaction is rolled back when `tx` is dropped; here there is nothing to undo.
        return Err(TransferError::TooLittle { account_id: from, balance });
    }
    DB::add(&mut tx, from, -amount).await?;
    DB::add(&mut tx, to, amount).await?;
    tx.commit().await?;
    Ok(())
}

/// Many tasks pay each other in all directions.
async fn run<DB: Bank>(url: &str) -> Result<()>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    let pool = PoolOptions::<DB>::new().max_connections(8).connect(url).await?;
    DB::open_accounts(&pool).await?;

    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let pool = pool.clone();
        tasks.spawn(async move {
            let mut rng = fastrand::Rng::with_seed(task);
            let (mut paid, mut refused) = (0, 0);
            for _ in 0..TRANSFERS {
                let from = rng.i64(1..=ACCOUNTS);
                let to = (from + rng.i64(0..ACCOUNTS - 1)) % ACCOUNTS + 1;
                match transfer(&pool, from, to, rng.i64(1..500)).await {
                    Ok(()) => paid += 1,
                    Err(TransferError::TooLittle { .. }) => refused += 1,
                    Err(err) => bail!(err),
                }
            }
            Ok((paid, refused))
        });
    }
    let (mut paid, mut refused) = (0, 0);
    while let Some(counts) = tasks.join_next().await {
        let counts = counts??;
        paid += counts.0;
        refused += counts.1;
    }

    let balances = DB::balances(&pool).await?;
    println!("{paid} transfers between {ACCOUNTS} accounts on {}, {refused} refused for lack of money", DB::NAME);
    println!("balances: {balances:?}, together {}", balances.iter().sum::<i64>());
    ensure!(balances.iter().sum::<i64>() == ACCOUNTS * OPENING_BALANCE, "money was made or lost");
    ensure!(balances.iter().all(|it| *it >= 0), "an account was overdrawn");
    Ok(())
}

/// The table `t_accounts`, spelled for each database. A service that knows its database writes these in place.
trait Bank: RowOps + Database<Arguments: Sync> {
    fn open_accounts(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<()>> + Send;
    fn balance(conn: &mut Self::Connection, account_id: i64) -> impl Future<Output = sqlx::Result<i64>> + Send;
    fn add(conn: &mut Self::Connection, account_id: i64, amount: i64) -> impl Future<Output = sqlx::Result<()>> + Send;
    fn balances(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Vec<i64>>> + Send;
}

macro_rules! bank {
    ($database:ty, $a:literal, $b:literal) => {
        impl Bank for $database {
            async fn open_accounts(pool: &Pool<Self>) -> sqlx::Result<()> {
                sqlx::query("DROP TABLE IF EXISTS t_accounts").execute(pool).await?;
                sqlx::query(
                    "CREATE TABLE t_accounts (account_id BIGINT NOT NULL PRIMARY KEY, balance BIGINT NOT NULL)",
                )
                .execute(pool)
                .await?;
                for account_id in 1..=ACCOUNTS {
                    sqlx::query(concat!("INSERT INTO t_accounts VALUES (", $a, ", ", $b, ")"))
                        .bind(account_id)
                        .bind(OPENING_BALANCE)
                        .execute(pool)
                        .await?;
                }
                Ok(())
            }

            async fn balance(conn: &mut Self::Connection, account_id: i64) -> sqlx::Result<i64> {
                sqlx::query_scalar(concat!("SELECT balance FROM t_accounts WHERE account_id = ", $a))
                    .bind(account_id)
                    .fetch_one(conn)
                    .await
            }

            async fn add(conn: &mut Self::Connection, account_id: i64, amount: i64) -> sqlx::Result<()> {
                sqlx::query(concat!("UPDATE t_accounts SET balance = balance + ", $a, " WHERE account_id = ", $b))
                    .bind(amount)
                    .bind(account_id)
                    .execute(conn)
                    .await?;
                Ok(())
            }

            async fn balances(pool: &Pool<Self>) -> sqlx::Result<Vec<i64>> {
                sqlx::query_scalar("SELECT balance FROM t_accounts ORDER BY account_id").fetch_all(pool).await
            }
        }
    };
}

bank!(Sqlite, "?", "?");
bank!(MySql, "?", "?");
bank!(Postgres, "$1", "$2");

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = match env::args().nth(1) {
        Some(url) => url,
        None => format!("sqlite://{}?mode=rwc", folder.path().join("bank.db").display()),
    };
    match url.split(':').next().context("the argument is the URL of a database")? {
        "sqlite" => run::<Sqlite>(&url).await,
        "mysql" | "mariadb" => run::<MySql>(&url).await,
        "postgres" | "postgresql" => run::<Postgres>(&url).await,
        other => bail!("cannot use {other}; give a URL with postgres://, mysql:// or sqlite://"),
    }
}
