//! A stock in segments: an empty one says "sold out" while the others are full.

use anyhow::{Result, bail};
use lockkit::{Error, Stock};
use sqlx::Sqlite;

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "11-empty-segment",
        title: "Sold out, with 180 left",
        recipe: "\
-- 200 pieces as 10 segments of 20, so that ten customers can buy at once
segment = hash(<customer>) % 10
UPDATE segments SET nums = nums - 1 WHERE segment = <segment> AND nums > 0
if 0 rows: return \"sold out\"",
        happens: "The customer's hash selects the segment. The first 20 customers have the hash 3 and empty segment \
                  3. B has the same hash and gets \"sold out\". 180 pieces are left in nine segments that B's \
                  request never looked at.",
        remedy: "A better hash makes this rarer. Near the end of every sale it is normal, because the segments do \
                  not become empty together. To look at the other segments, a program must look at all of them, and \
                  must not take a locked segment for an empty one.",
        lockkit: "`Stock` takes from any segment that is not locked. It reports `SoldOut` only after it has counted \
                  all segments, the locked ones included. All 200 pieces are sold, and none twice.",
        more: ("stock", "../guide.md#stock"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(
        "CREATE TABLE segments (segment INTEGER PRIMARY KEY, nums INTEGER NOT NULL);
         INSERT INTO segments VALUES (0, 20), (1, 20), (2, 20), (3, 20), (4, 20), (5, 20), (6, 20), (7, 20), (8, 20),
                                     (9, 20)",
    )
    .await?;
    let stage = Stage::of("stock", &shop, left);
    let stage = stage.actor("20×A", |me| many(me, shop.clone())).actor("B", |me| one(me, shop));
    stage.play("20×A B").await
}

async fn left(shop: Shop) -> Result<View> {
    Ok(format!("{} left", shop.number("SELECT sum(nums) FROM segments").await?).into())
}

async fn buy(shop: &Shop) -> sqlx::Result<i64> {
    let take = sqlx::query("UPDATE segments SET nums = nums - 1 WHERE segment = 3 AND nums > 0");
    Ok(i64::from(take.execute(&shop.pool).await?.rows_affected() == 1))
}

async fn many(me: Actor, shop: Shop) -> Result<()> {
    let all = async {
        let mut bought = 0;
        for _customer in 0..20 {
            bought += buy(&shop).await?;
        }
        Ok::<_, sqlx::Error>(bought)
    };
    me.step("20 × UPDATE segment 3", all).await?;
    me.mark("buy");
    Ok(())
}

async fn one(me: Actor, shop: Shop) -> Result<()> {
    if me.step("UPDATE segment 3", buy(&shop)).await? == 1 {
        me.mark("buys");
        return Ok(());
    }
    me.mark("\"sold out\"");
    let left = shop.number("SELECT sum(nums) FROM segments").await?;
    if left > 0 {
        me.breach(format!("sold out, with {left} left"));
    }
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::open("").await?;
    let stock = Stock::new(shop.pool, "product").segments(10);
    stock.put(200).await?;
    let stage = Stage::of("stock", &stock, left_in_stock);
    let stage = stage.actor("20×A", |me| takes(me, stock.clone(), 20)).actor("B", |me| takes(me, stock.clone(), 1));
    let stage = stage.actor("C", |me| takes(me, stock.clone(), 179)).actor("D", |me| comes_late(me, stock));
    stage.play("20×A B C D").await
}

async fn left_in_stock(stock: Stock<Sqlite>) -> Result<View> {
    Ok(format!("{} left", stock.left().await?).into())
}

async fn takes(me: Actor, stock: Stock<Sqlite>, pieces: u64) -> Result<()> {
    me.step(format!("take {pieces}"), stock.take(pieces)).await?;
    me.mark("buys");
    Ok(())
}

async fn comes_late(me: Actor, stock: Stock<Sqlite>) -> Result<()> {
    match me.step("take 1", stock.take(1)).await {
        Err(Error::SoldOut { left: 0, .. }) => me.mark("\"sold out\""),
        taken => bail!("the last one was sold before, and D got {taken:?}"),
    }
    Ok(())
}
