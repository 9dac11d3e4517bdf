//! The trial of an example with an ORM: tasks race for orders and for stock, under locks and without, and the rows that
//! they leave are counted.

use std::{collections::HashSet, future::Future, sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use tokio::{task::JoinSet, time::sleep};

const USERS: i64 = 8;

/// How often each user sends the same order.
const REQUESTS: i64 = 4;

const STOCK: i64 = 20;

const BUYERS: i64 = 32;

/// The longest wait for a lock: longer than anything takes that happens at all.
pub(crate) const WAIT: Duration = Duration::from_mins(1);

/// Whether the tasks take locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Locked,
    Naive,
}

/// A shop whose data the ORM reads and writes: orders, and the stock of one item.
pub(crate) trait Shop: Send + Sync + 'static {
    /// Deletes all orders, and sets the stock.
    fn reset(&self, stock: i64) -> impl Future<Output = Result<()>> + Send;

    /// Inserts an order unless this user has one. Returns whether it did.
    fn order(&self, user_id: i64, mode: Mode) -> impl Future<Output = Result<bool>> + Send;

    /// Takes a piece if there is one. Returns whether there was.
    fn sell(&self, mode: Mode) -> impl Future<Output = Result<bool>> + Send;

    /// Reads the stock, loses the lease to an heir that sells a piece, and sells one more by what it has read. Returns
    /// whether it could.
    fn sell_too_late(&self, mode: Mode) -> impl Future<Output = Result<bool>> + Send;

    /// The user of each order.
    fn orders(&self) -> impl Future<Output = Result<Vec<i64>>> + Send;

    fn stock(&self) -> impl Future<Output = Result<i64>> + Send;
}

/// Stands for what a request does between its read and its write.
pub(crate) async fn decide() {
    sleep(Duration::from_millis(5)).await;
}

/// Fails if anything goes wrong under the locks, or if nothing does without them.
pub(crate) async fn run(shop: impl Shop) -> Result<()> {
    let shop = Arc::new(shop);
    for mode in [Mode::Naive, Mode::Locked] {
        let wrong = orders_that_are_wrong(&shop, mode).await? + sales_that_are_wrong(&shop, mode).await?;
        let is_right = wrong == 0;
        ensure!(is_right == (mode == Mode::Locked), "{mode:?}: {wrong} orders and sales are wrong");
    }
    Ok(())
}

async fn orders_that_are_wrong(shop: &Arc<impl Shop>, mode: Mode) -> Result<usize> {
    shop.reset(0).await?;
    let (ordered, failed) = race(0..USERS * REQUESTS, |number| {
        let shop = shop.clone();
        async move { shop.order(number % USERS, mode).await }
    })
    .await;
    let orders = shop.orders().await?;
    let users = HashSet::<_>::from_iter(&orders).len();
    println!("{mode:?}: {users} users have {} orders; {failed} requests failed", orders.len());
    ensure!(ordered == orders.len(), "{ordered} requests ordered");
    Ok(orders.len() - users + failed)
}

async fn sales_that_are_wrong(shop: &Arc<impl Shop>, mode: Mode) -> Result<usize> {
    shop.reset(STOCK).await?;
    let (sold, failed) = race(0..BUYERS, |_| {
        let shop = shop.clone();
        async move { shop.sell(mode).await }
    })
    .await;
    let left = shop.stock().await?;
    println!("{mode:?}: {sold} of {STOCK} pieces sold, {left} left; {failed} requests failed");
    let raced = usize::try_from(STOCK - left)?.abs_diff(sold);

    shop.reset(STOCK).await?;
    let too_late = shop.sell_too_late(mode).await?;
    let gone = STOCK - shop.stock().await?;
    println!(
        "{mode:?}: the heir sold one; its predecessor {}; {gone} gone",
        if too_late { "too" } else { "was refused" }
    );
    Ok(raced + failed + usize::from(gone != 1 + i64::from(too_late)))
}

/// Runs the tasks at once. Returns how many have done their work, and how many have failed.
async fn race<F>(numbers: impl Iterator<Item = i64>, task: impl Fn(i64) -> F) -> (usize, usize)
where
    F: Future<Output = Result<bool>> + Send + 'static,
{
    let (mut done, mut failed) = (0, 0);
    for ended in numbers.map(task).collect::<JoinSet<_>>().join_all().await {
        match ended {
            Ok(is_done) => done += usize::from(is_done),
            Err(err) => {
                eprintln!("{err:#}");
                failed += 1;
            }
        }
    }
    (done, failed)
}
