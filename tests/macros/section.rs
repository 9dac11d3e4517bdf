//! `#[with_lock(row, …)]` and `#[with_lock(named, …)]`: one transaction under a lock.

use std::{
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use lockkit::{Error, OrConflict, Wait, with_lock};
use tokio::sync::oneshot;

use crate::fixture::{Shop, ShopError, assert_send, hang, sell};

/// SQLite's row lock and named lock are the write lock of the database.
async fn is_locked(shop: &Shop) -> bool {
    let mut conn = shop.db.acquire().await.unwrap();
    sqlx::query("PRAGMA busy_timeout = 0").execute(&mut *conn).await.unwrap();
    let locked = sqlx::query("BEGIN IMMEDIATE").execute(&mut *conn).await.is_err();
    if !locked {
        sqlx::query("ROLLBACK").execute(&mut *conn).await.unwrap();
    }
    conn.close().await.unwrap();
    locked
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = item_id, version = 1), wait = "2s", tx = tx)]
async fn sell_row(shop: &Shop, item_id: i64, end: Result<(), ShopError>) -> Result<(), ShopError> {
    assert!(is_locked(shop).await);
    sell(&mut tx).await?;
    end
}

#[with_lock(named, on = &shop.db, key = "item:{item_id}", wait = Duration::from_secs(2), tx = tx)]
async fn sell_named(shop: &Shop, item_id: i64, end: Result<(), ShopError>) -> Result<(), ShopError> {
    assert!(is_locked(shop).await);
    sell(&mut tx).await?;
    end
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), tx = tx)]
async fn panic_row(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    panic!("{}", shop.stock().await)
}

#[with_lock(named, on = &shop.db, key = const "x", tx = tx)]
async fn hang_named(shop: &Shop, reached: oneshot::Sender<()>) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    hang(reached).await;
    Ok(())
}

#[tokio::test]
async fn the_transaction_is_committed_on_ok() {
    let shop = Shop::new().await;
    assert_send(sell_row(&shop, 7, Ok(()))).await.unwrap();
    assert_eq!(shop.stock().await, 9);
    assert_send(sell_named(&shop, 7, Ok(()))).await.unwrap();
    assert_eq!(shop.stock().await, 8);
    assert!(!is_locked(&shop).await);
}

#[tokio::test]
async fn the_transaction_is_rolled_back_on_an_error() {
    let shop = Shop::new().await;
    assert!(matches!(sell_row(&shop, 7, Err(ShopError::Refused)).await, Err(ShopError::Refused)));
    assert!(matches!(sell_named(&shop, 7, Err(ShopError::Refused)).await, Err(ShopError::Refused)));
    assert_eq!(shop.stock().await, 10);
    assert!(!is_locked(&shop).await);
}

#[tokio::test]
async fn the_transaction_is_rolled_back_on_a_panic() {
    let shop = std::sync::Arc::new(Shop::new().await);
    let task = tokio::spawn({
        let shop = shop.clone();
        async move { panic_row(&shop).await }
    });
    assert!(task.await.unwrap_err().is_panic());
    sell_row(&shop, 7, Ok(())).await.unwrap();
    assert_eq!(shop.stock().await, 9);
}

#[tokio::test]
async fn the_transaction_is_rolled_back_on_cancellation() {
    let shop = Shop::new().await;
    let (reached, here) = oneshot::channel();
    tokio::select! {
        done = hang_named(&shop, reached) => unreachable!("{done:?}"),
        here = here => here.unwrap(),
    }
    sell_row(&shop, 7, Ok(())).await.unwrap();
    assert_eq!(shop.stock().await, 9);
}

#[tokio::test]
async fn a_row_that_does_not_exist_is_an_error() {
    let shop = Shop::new().await;
    let failed = sell_row(&shop, 8, Ok(())).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::NoSuchRow { .. })));
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), wait = Wait::Never, on_busy = Ok(false), tx = tx)]
async fn row_unless_busy(shop: &Shop) -> Result<bool, ShopError> {
    sell(&mut tx).await?;
    Ok(shop.stock().await == 10)
}

#[with_lock(named, on = &shop.db, key = "x", wait = "10ms", attempts = 3, on_busy = Ok(false), tx = _tx)]
async fn named_unless_busy(shop: &Shop) -> Result<bool, ShopError> {
    Ok(shop.stock().await == 10)
}

#[with_lock(named, on = &shop.db, key = "x", wait = "10ms", tx = _tx)]
async fn named_impatient(shop: &Shop) -> Result<(), Error> {
    unreachable!("{}", shop.stock().await)
}

#[tokio::test]
async fn on_busy_is_returned_when_somebody_else_holds_the_lock() {
    let shop = Shop::new().await;
    assert!(named_unless_busy(&shop).await.unwrap());
    assert!(row_unless_busy(&shop).await.unwrap());
    let tx = lockkit::begin(&shop.db).await.unwrap();
    assert!(!row_unless_busy(&shop).await.unwrap());
    assert!(!named_unless_busy(&shop).await.unwrap());
    assert!(named_impatient(&shop).await.unwrap_err().is_contended());
    tx.rollback().await.unwrap();
}

fn conflict() -> Error {
    sqlx::sqlite::SqliteQueryResult::default().or_conflict().unwrap_err()
}

/// Each attempt sells one and fails, until the last.
#[with_lock(
    row,
    on = &shop.db,
    table = "t_items",
    by(item_id = id),
    attempts = 3,
    deadline = "30s",
    as = attempt,
    tx = tx
)]
async fn third_time_lucky(shop: &Shop, id: i64, name: String) -> Result<(u32, String), ShopError> {
    sell(&mut tx).await?;
    if attempt < 3 {
        return Err(conflict().into());
    }
    let _ = shop;
    Ok((attempt, name.clone()))
}

#[with_lock(named, on = &shop.db, key = keys(counter), attempts = 2, tx = tx)]
async fn never_lucky(shop: &Shop, counter: &AtomicU32) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    let _ = (shop, counter.fetch_add(1, SeqCst));
    Err(conflict().into())
}

fn keys(counter: &AtomicU32) -> &'static str {
    counter.fetch_add(100, SeqCst);
    "x"
}

#[tokio::test]
async fn every_attempt_has_a_transaction_of_its_own() {
    let shop = Shop::new().await;
    let (attempt, name) = assert_send(third_time_lucky(&shop, 7, "n".to_owned())).await.unwrap();
    assert_eq!((attempt, name.as_str()), (3, "n"));
    assert_eq!(shop.stock().await, 9);
}

#[tokio::test]
async fn attempts_end_and_the_key_was_asked_for_once() {
    let shop = Shop::new().await;
    let counter = AtomicU32::new(0);
    let failed = never_lucky(&shop, &counter).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::RetriesExhausted { attempts: 2, .. })));
    assert_eq!(counter.load(SeqCst), 102);
    assert_eq!(shop.stock().await, 10);
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), deadline = "200ms", tx = tx)]
async fn too_slow(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    let _ = shop;
    std::future::pending().await
}

#[tokio::test]
async fn the_deadline_cuts_off_an_attempt_and_rolls_it_back() {
    let shop = Shop::new().await;
    let failed = too_slow(&shop).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::RetriesExhausted { attempts: 1, .. })));
    sell_row(&shop, 7, Ok(())).await.unwrap();
    assert_eq!(shop.stock().await, 9);
}

/// `&mut self`, a method that owns what it locks by, and a loop.
struct Owner {
    db: sqlx::SqlitePool,
    item: Option<i64>,
    ran: u32,
}

impl Owner {
    #[with_lock(row, on = &self.db, table = "t_items", by(item_id = self.item), attempts = 2, tx = tx)]
    async fn by_mut(&mut self) -> Result<u32, ShopError> {
        self.ran += 1;
        sell(&mut tx).await?;
        if self.ran == 1 { Err(conflict().into()) } else { Ok(self.ran) }
    }

    #[with_lock(row, on = &self.db, table = "t_items", by(item_id = self.item), tx = tx)]
    async fn by_value(self) -> Result<Self, ShopError> {
        sell(&mut tx).await?;
        Ok(self)
    }
}

#[tokio::test]
async fn the_body_may_change_or_own_what_the_lock_was_named_by() {
    let shop = Shop::new().await;
    let mut owner = Owner { db: shop.db.clone(), item: Some(7), ran: 0 };
    assert_eq!(assert_send(owner.by_mut()).await.unwrap(), 2);
    assert_eq!(assert_send(owner.by_value()).await.unwrap().ran, 2);
    assert_eq!(shop.stock().await, 8);
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = id), tx = tx)]
async fn by_what_the_body_moves(shop: &Shop, id: Box<i64>) -> Result<Box<i64>, ShopError> {
    sell(&mut tx).await?;
    Ok(id)
}

#[tokio::test]
async fn the_body_may_move_what_the_rows_were_found_by() {
    let shop = Shop::new().await;
    assert_eq!(*assert_send(by_what_the_body_moves(&shop, Box::new(7))).await.unwrap(), 7);
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), attempts = 3, as = attempt, tx = tx)]
async fn hang_in_the_second_attempt(
    shop: &Shop,
    reached: &std::sync::Mutex<Option<oneshot::Sender<()>>>,
) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    if attempt == 1 {
        return Err(conflict().into());
    }
    let reached = reached.lock().unwrap().take().unwrap();
    hang(reached).await;
    Ok(())
}

#[tokio::test]
async fn an_attempt_is_rolled_back_on_cancellation() {
    let shop = Shop::new().await;
    let (reached, here) = oneshot::channel();
    let reached = std::sync::Mutex::new(Some(reached));
    tokio::select! {
        done = hang_in_the_second_attempt(&shop, &reached) => unreachable!("{done:?}"),
        here = here => here.unwrap(),
    }
    sell_row(&shop, 7, Ok(())).await.unwrap();
    assert_eq!(shop.stock().await, 9);
}

/// `Send`, but not `Sync`, as the body of a request is.
struct Request(std::cell::Cell<u32>);

#[with_lock(named, on = &shop.db, key = const "x", tx = tx)]
async fn handler(shop: &Shop, request: Request) -> Result<u32, ShopError> {
    request.0.set(request.0.get() + 1);
    sell(&mut tx).await?;
    let _ = shop;
    Ok(request.0.get())
}

#[tokio::test]
async fn arguments_need_not_be_sync() {
    let shop = Shop::new().await;
    assert_eq!(assert_send(handler(&shop, Request(1.into()))).await.unwrap(), 2);
}
