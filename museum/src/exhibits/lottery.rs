//! Read, then write: two customers win the last prize.

use anyhow::Result;
use lockkit::{RowLock, Tx};

#[cfg(test)]
use crate::world::Changed;
use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Id, Nums, Place, Shop, Sql},
};

const TABLES: &str = "CREATE TABLE prizes (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL);
                      CREATE TABLE wins (customer VARCHAR(9) NOT NULL);
                      INSERT INTO prizes VALUES (1, 1)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "01-lottery",
        title: "Two customers win the last prize",
        recipe: "\
nums = SELECT nums FROM prizes WHERE id = 1
if nums > 0:
    UPDATE prizes SET nums = <nums - 1> WHERE id = 1
    INSERT INTO wins VALUES (<customer>)",
        happens: "One prize is left. A reads 1. Before A writes, B reads 1 as well. Each has seen that a prize is \
                  left, so each takes it: two wins of one prize. Every statement is correct by itself. The mistake \
                  is the time between the read and the write.",
        remedy: "A mutex in the program closes that gap within one process. Two servers have two mutexes. A \
                  transaction alone does not close it either: under READ COMMITTED, and under MySQL's REPEATABLE \
                  READ, both transactions read 1 and both commit.",
        lockkit: "A row lock covers the read and the write. B waits until A has committed, and then reads 0.",
        more: ("choose a lock", "../guide/choose.md"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let left = shop.number("SELECT nums FROM prizes").await?;
    let won = shop.number("SELECT count(*) FROM wins").await?;
    let breach = (left + won != 1).then(|| format!("{won} wins of 1 prize"));
    Ok(View { state: format!("{left} left, {won} won"), breach })
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("prizes", books);
    let stage = stage.actor("A", |me| customer(me, shop.clone())).actor("B", |me| customer(me, shop));
    stage.play("A B A B").await
}

async fn customer<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM prizes WHERE id = 1")).await?;
    if nums == 0 {
        return Ok(());
    }
    me.step(format!("UPDATE nums = {}, INSERT win", nums - 1), async {
        shop.execute(&update(nums - 1)).await?;
        shop.execute(&insert(me.name())).await?;
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.mark("wins");
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("prizes", books);
    let stage = stage.actor("A", |me| with_row_lock(me, shop.clone())).actor("B", |me| with_row_lock(me, shop));
    stage.play("A B~ A A B B").await
}

async fn with_row_lock<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let (mut tx, nums) = me.step("begin, lock the row: nums", lock(&me, &shop)).await?;
    if nums == 0 {
        me.step("rollback", async {
            me.stops("no prize");
            tx.rollback().await
        })
        .await?;
        return Ok(());
    }
    me.step(format!("UPDATE nums = {}, INSERT win", nums - 1), async {
        DB::execute(&mut tx, &update(nums - 1)).await?;
        DB::execute(&mut tx, &insert(me.name())).await?;
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.step("commit", async {
        me.stops("wins");
        tx.commit().await
    })
    .await?;
    Ok(())
}

fn update(nums: i64) -> String {
    format!("UPDATE prizes SET nums = {nums} WHERE id = 1")
}

fn insert(customer: &str) -> String {
    format!("INSERT INTO wins VALUES ('{customer}')")
}

async fn lock<DB: Sql>(me: &Actor, shop: &Shop<DB>) -> lockkit::Result<(Tx<DB>, i64)> {
    let mut tx = lockkit::begin(&shop.pool).await?;
    let Nums(nums) = RowLock::table("prizes").by("id", Id(1)).fetch_one(&mut tx).await?;
    me.enters();
    Ok((tx, nums))
}

/// With a guard in the UPDATE, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken = on_database!(Database, guarded);
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}

#[cfg(test)]
async fn guarded<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("prizes", books);
    let stage = stage.actor("A", |me| with_guard(me, shop.clone())).actor("B", |me| with_guard(me, shop));
    stage.play("A B A B").await
}

#[cfg(test)]
async fn with_guard<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    me.step("SELECT nums", shop.number("SELECT nums FROM prizes WHERE id = 1")).await?;
    me.step("UPDATE nums = nums - 1 WHERE nums > 0, INSERT win", async {
        let Changed(rows) = shop.execute("UPDATE prizes SET nums = nums - 1 WHERE id = 1 AND nums > 0").await?;
        if rows == 1 {
            shop.execute(&insert(me.name())).await?;
        }
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    Ok(())
}
