//! A stock in segments: an empty one says "sold out" while the others are full.

use anyhow::{Result, bail};
use lockkit::{Error, Stock};

use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Changed, Place, Shop, Sql},
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
        more: ("a flash sale", "../guide/flash-sale.md"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(
        &place,
        "CREATE TABLE segments (segment BIGINT PRIMARY KEY, nums BIGINT NOT NULL);
         INSERT INTO segments VALUES (0, 20), (1, 20), (2, 20), (3, 20), (4, 20), (5, 20), (6, 20), (7, 20), (8, 20),
                                     (9, 20)",
    )
    .await?;
    let stage = shop.stage("stock", left);
    let stage = stage.actor("20×A", |me| many(me, shop.clone())).actor("B", |me| one(me, shop));
    stage.play("20×A B").await
}

async fn left<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    Ok(format!("{} left", shop.number("SELECT sum(nums) FROM segments").await?).into())
}

async fn buy<DB: Sql>(shop: &Shop<DB>) -> sqlx::Result<i64> {
    let taken = shop.execute("UPDATE segments SET nums = nums - 1 WHERE segment = 3 AND nums > 0").await?;
    Ok(i64::from(taken == Changed(1)))
}

async fn many<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
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

async fn one<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
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

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, "").await?;
    let stock = Stock::new(shop.pool, "product").segments(10);
    stock.put(200).await?;
    let stage = Stage::of("stock", &stock, left_in_stock);
    let stage = stage.actor("20×A", |me| takes(me, stock.clone(), 20)).actor("B", |me| takes(me, stock.clone(), 1));
    let stage = stage.actor("C", |me| takes(me, stock.clone(), 179)).actor("D", |me| comes_late(me, stock));
    stage.play("20×A B C D").await
}

async fn left_in_stock<DB: Sql>(stock: Stock<DB>) -> Result<View> {
    Ok(format!("{} left", stock.left().await?).into())
}

async fn takes<DB: Sql>(me: Actor, stock: Stock<DB>, pieces: u64) -> Result<()> {
    me.step(format!("take {pieces}"), stock.take(pieces)).await?;
    me.mark("buys");
    Ok(())
}

async fn comes_late<DB: Sql>(me: Actor, stock: Stock<DB>) -> Result<()> {
    match me.step("take 1", stock.take(1)).await {
        Err(Error::SoldOut { left: 0, .. }) => me.mark("\"sold out\""),
        taken => bail!("the last one was sold before, and D got {taken:?}"),
    }
    Ok(())
}
