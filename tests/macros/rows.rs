//! `#[with_lock(row, …)]` on several rows: `by_any`, `order_by`, `limit`, `skip_locked` and `rows`.

use lockkit::{Error, with_lock};

use crate::fixture::{Shop, ShopError};

#[derive(Debug, sqlx::FromRow)]
struct Item {
    item_id: i64,
    stock: i64,
}

impl Shop {
    async fn with_items() -> Self {
        let shop = Self::new().await;
        sqlx::query("INSERT INTO t_items VALUES (8, 20, 1), (9, 30, 1)").execute(&shop.db).await.unwrap();
        shop
    }

    #[with_lock(row, on = &self.db, table = "t_items", by_any(item_id = ids), tx = tx)]
    async fn total(&self, ids: &[i64]) -> Result<i64, ShopError> {
        Ok(sqlx::query_scalar("SELECT sum(stock) FROM t_items").fetch_one(&mut *tx).await?)
    }

    #[with_lock(row, on = &self.db, table = "t_items", by_any(item_id = ids.clone()), rows = items: Vec<Item>, tx = tx)]
    async fn sell_each(&self, ids: Vec<i64>) -> Result<Vec<i64>, ShopError> {
        for item in &items {
            sqlx::query("UPDATE t_items SET stock = ? WHERE item_id = ?")
                .bind(item.stock - 1)
                .bind(item.item_id)
                .execute(&mut *tx)
                .await?;
        }
        drop(ids);
        Ok(items.into_iter().map(|it| it.item_id).collect())
    }

    #[with_lock(
        row,
        on = &self.db,
        table = "t_items",
        by_any(item_id = [7_i64, 8, 9]),
        by(version = version),
        order_by(item_id),
        limit = limit,
        skip_locked,
        rows = items: Vec<(i64, i64, i64)>,
        tx = tx,
        on_busy = Ok(Vec::new())
    )]
    async fn next(&self, version: i64, limit: u32) -> Result<Vec<i64>, ShopError> {
        let _ = &mut *tx;
        Ok(items.into_iter().map(|(item_id, ..)| item_id).collect())
    }

    #[with_lock(
        row,
        on = &self.db,
        table = "t_items",
        by(item_id = item_id),
        skip_locked,
        rows = items: Vec<Item>,
        tx = tx
    )]
    async fn stock_if_free(&self, item_id: i64) -> Result<i64, ShopError> {
        let _ = &mut *tx;
        Ok(items.iter().map(|it| it.stock).sum())
    }

    #[with_lock(
        row,
        on = &self.db,
        table = "t_items",
        by_any(item_id = ids),
        rows = items: Vec<Item>,
        attempts = 3,
        retry_if = |err: &ShopError| matches!(err, ShopError::Refused),
        as = attempt,
        tx = tx
    )]
    async fn sell_at_the_second_attempt(&self, ids: &[i64]) -> Result<(u32, i64), ShopError> {
        sqlx::query("UPDATE t_items SET stock = stock - 1").execute(&mut *tx).await?;
        if attempt == 1 {
            return Err(ShopError::Refused);
        }
        Ok((attempt, items.into_iter().map(|it| it.stock).sum()))
    }
}

#[tokio::test]
async fn several_rows_are_locked_by_the_values_of_one_column() {
    let shop = Shop::with_items().await;
    assert_eq!(shop.total(&[9, 7]).await.unwrap(), 60);
    let missing = shop.total(&[9, 1]).await.unwrap_err();
    assert!(matches!(missing, ShopError::Lock(Error::NoSuchRow { .. })), "{missing:?}");
    let none = shop.total(&[]).await.unwrap_err();
    assert!(matches!(none, ShopError::Lock(Error::InvalidOption { .. })), "{none:?}");
}

#[tokio::test]
async fn the_body_gets_the_locked_rows_in_order() {
    let shop = Shop::with_items().await;
    assert_eq!(shop.sell_each(vec![9, 7]).await.unwrap(), [7, 9]);
    assert_eq!(shop.stock().await, 9);
    let missing = shop.sell_each(vec![7, 1]).await.unwrap_err();
    assert!(matches!(missing, ShopError::Lock(Error::NoSuchRow { .. })), "{missing:?}");
    assert_eq!(shop.stock().await, 9);
}

#[tokio::test]
async fn a_queue_takes_as_many_rows_as_its_limit_says_and_is_busy_without_any() {
    let shop = Shop::with_items().await;
    assert_eq!(shop.next(1, 2).await.unwrap(), [7, 8]);
    assert_eq!(shop.next(1, 5).await.unwrap(), [7, 8, 9]);
    assert_eq!(shop.next(2, 5).await.unwrap(), [0; 0]);
    assert_eq!(shop.stock_if_free(8).await.unwrap(), 20);
    let busy = shop.stock_if_free(1).await.unwrap_err();
    assert!(matches!(&busy, ShopError::Lock(err) if err.is_contended()), "{busy:?}");
}

#[tokio::test]
async fn every_attempt_gets_the_rows_anew() {
    let shop = Shop::with_items().await;
    assert_eq!(shop.sell_at_the_second_attempt(&[7, 8]).await.unwrap(), (2, 30));
    assert_eq!(shop.stock().await, 9);
}

type Items = Vec<Item>;

macro_rules! of_type {
    ($name:ident, $rows:ty) => {
        #[with_lock(row, on = &shop.db, table = "t_items", by_any(item_id = [7, 8]), rows = items: $rows, tx = _tx)]
        async fn $name(shop: &Shop) -> Result<i64, Error> {
            Ok(items.iter().map(|item| item.stock).sum())
        }
    };
}

of_type!(aliased, Items);
of_type!(of_a_macro, Vec<Item>);

#[with_lock(row, on = &shop.db, table = "t_items", by(version = version), row = item: Item, tx = tx)]
async fn the_only(shop: &Shop, version: i64) -> Result<i64, ShopError> {
    sqlx::query("UPDATE t_items SET version = 5 WHERE item_id = ?").bind(item.item_id).execute(&mut *tx).await?;
    Ok(item.stock)
}

#[with_lock(
    row,
    on = &shop.db,
    table = "t_items",
    order_by(item_id),
    limit = 1,
    skip_locked,
    row = item: Item,
    attempts = 2,
    tx = _tx
)]
async fn the_first(shop: &Shop) -> Result<i64, Error> {
    Ok(item.item_id)
}

#[tokio::test]
async fn rows_have_any_name_of_a_type_that_is_a_vec() {
    let shop = Shop::with_items().await;
    assert_eq!(aliased(&shop).await.unwrap(), 30);
    assert_eq!(of_a_macro(&shop).await.unwrap(), 30);
}

#[tokio::test]
async fn one_row_is_exactly_one() {
    let shop = Shop::with_items().await;
    sqlx::query("CREATE INDEX t_items_version ON t_items (version)").execute(&shop.db).await.unwrap();
    assert!(matches!(the_only(&shop, 1).await, Err(ShopError::Lock(Error::InvalidOption { option: "row", .. }))));
    assert!(matches!(the_only(&shop, 5).await, Err(ShopError::Lock(Error::NoSuchRow { .. }))));
    sqlx::query("UPDATE t_items SET version = 2 WHERE item_id > 7").execute(&shop.db).await.unwrap();
    assert_eq!(the_only(&shop, 1).await.unwrap(), 10);
    assert_eq!(the_only(&shop, 5).await.unwrap(), 10);
    assert_eq!(the_first(&shop).await.unwrap(), 7);
}
