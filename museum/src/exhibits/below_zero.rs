//! A counter below zero.

use anyhow::Result;
use lockkit::with_lock;
use sqlx::Pool;

use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Id, Place, Shop, Sql},
};

const TABLES: &str = "CREATE TABLE bonus (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL);
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
        lockkit: "A line above the function, `#[with_lock(row, …)]`, locks the row and commits when the function \
                  returns, so a rule that the function has checked still holds when it writes. B waits, reads 0, \
                  and pays nothing.",
        more: ("the attribute", "../guide.md#the-attribute"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let left = shop.number(READ).await?;
    Ok(View { state: format!("{left} left"), breach: (left < 0).then(|| format!("{left} left")) })
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("bonus", books);
    stage.actor("A", |me| draws(me, shop.clone())).actor("B", |me| draws(me, shop)).play("A B A B").await
}

async fn draws<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    if me.step("SELECT nums", shop.number(READ)).await? > 0 {
        me.step("UPDATE nums = nums - 1", shop.execute(WRITE)).await?;
        me.mark("paid");
    }
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("bonus", books);
    let stage = stage.actor("A", |me| calls(me, shop.clone())).actor("B", |me| calls(me, shop));
    stage.play("A A B~ A A B B B").await
}

async fn calls<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    me.step("call draw()", async {}).await;
    draw(&me, &shop.pool, Id(10001)).await?;
    Ok(())
}

#[with_lock(row, on = pool, table = "bonus", by(id = id), tx = tx)]
async fn draw<DB: Sql>(me: &Actor, pool: &Pool<DB>, id: Id) -> Result<()> {
    me.enters();
    let nums = me.step("SELECT nums", DB::number(&mut tx, READ)).await?;
    if nums > 0 {
        me.step("UPDATE nums = nums - 1", DB::execute(&mut tx, WRITE)).await?;
    }
    // The attribute commits after the body, before this participant comes to rest.
    me.step("return; the attribute commits", async { me.stops(if nums > 0 { "paid" } else { "no bonus" }) }).await;
    Ok(())
}
