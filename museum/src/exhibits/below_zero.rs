//! A counter below zero.

use anyhow::Result;
use lockkit::with_lock;
use sqlx::SqlitePool;

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE bonus (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL);
                      INSERT INTO bonus VALUES (10001, 1)";
const READ: &str = "SELECT nums FROM bonus WHERE id = 10001";
const WRITE: &str = "UPDATE bonus SET nums = nums - 1 WHERE id = 10001";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "19-below-zero",
        title: "One bonus, two payments, minus one left",
        recipe: "\
nums = SELECT nums FROM bonus WHERE id = 10001
if nums > 0:
    UPDATE bonus SET nums = nums - 1 WHERE id = 10001
    pay",
        happens: "As in exhibit 1, A and B both read 1. Here the database subtracts, so no update is lost. The \
                  counter goes from 1 to 0 to -1, and two customers are paid. The check belongs in the UPDATE.",
        remedy: "`AND nums > 0` in the UPDATE is right, and enough for a counter. A version column also works, if \
                  the program handles an update that changes no row. A rule about more than one number needs a lock.",
        lockkit: "The attribute locks the row for the whole function, so a rule that the function has checked still \
                  holds when it writes. B waits, reads 0, and pays nothing.",
        more: ("the attribute", "../guide.md#the-attribute"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn books(shop: Shop) -> Result<View> {
    let left = shop.number(READ).await?;
    Ok(View { state: format!("{left} left"), breach: (left < 0).then(|| format!("{left} left")) })
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("bonus", &shop, books);
    stage.actor("A", |me| draws(me, shop.clone())).actor("B", |me| draws(me, shop)).play("A B A B").await
}

async fn draws(me: Actor, shop: Shop) -> Result<()> {
    if me.step("SELECT nums", shop.number(READ)).await? > 0 {
        me.step("UPDATE nums = nums - 1", sqlx::query(WRITE).execute(&shop.pool)).await?;
        me.mark("paid");
    }
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("bonus", &shop, books);
    let stage = stage.actor("A", |me| calls(me, shop.clone())).actor("B", |me| calls(me, shop));
    stage.play("A A B~ A B B").await
}

async fn calls(me: Actor, shop: Shop) -> Result<()> {
    me.step("call draw()", async {}).await;
    draw(&me, &shop.pool, 10001).await?;
    Ok(())
}

#[with_lock(row, on = pool, table = "bonus", by(id = id), tx = tx)]
async fn draw(me: &Actor, pool: &SqlitePool, id: i64) -> Result<()> {
    me.enters();
    let nums: i64 = me.step("SELECT nums", sqlx::query_scalar(READ).fetch_one(&mut *tx)).await?;
    if nums > 0 {
        me.step("UPDATE nums = nums - 1", sqlx::query(WRITE).execute(&mut *tx)).await?;
        me.stops("paid");
    } else {
        me.stops("no bonus");
    }
    Ok(())
}
