//! Read, then write: two customers win the last prize.

use anyhow::Result;
use lockkit::{RowLock, Tx};
use sqlx::Sqlite;

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE prizes (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL);
                      CREATE TABLE wins (customer TEXT NOT NULL);
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
        more: ("row locks", "../guide.md#row-and-named-locks"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn books(shop: Shop) -> Result<View> {
    let left = shop.number("SELECT nums FROM prizes").await?;
    let won = shop.number("SELECT count(*) FROM wins").await?;
    let breach = (left + won != 1).then(|| format!("{won} wins of 1 prize"));
    Ok(View { state: format!("{left} left, {won} won"), breach })
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("prizes", &shop, books);
    let stage = stage.actor("A", |me| customer(me, shop.clone())).actor("B", |me| customer(me, shop));
    stage.play("A B A B").await
}

async fn customer(me: Actor, shop: Shop) -> Result<()> {
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM prizes WHERE id = 1")).await?;
    if nums == 0 {
        return Ok(());
    }
    me.step(format!("UPDATE nums = {}, INSERT win", nums - 1), async {
        sqlx::query("UPDATE prizes SET nums = ? WHERE id = 1").bind(nums - 1).execute(&shop.pool).await?;
        sqlx::query("INSERT INTO wins VALUES (?)").bind(me.name()).execute(&shop.pool).await?;
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.mark("wins");
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("prizes", &shop, books);
    let stage = stage.actor("A", |me| with_row_lock(me, shop.clone())).actor("B", |me| with_row_lock(me, shop));
    stage.play("A B~ A A B B").await
}

async fn with_row_lock(me: Actor, shop: Shop) -> Result<()> {
    let (mut tx, nums) = me.step("begin, lock the row: nums", lock(&me, &shop)).await?;
    if nums == 0 {
        me.stops("no prize");
        me.step("rollback", tx.rollback()).await?;
        return Ok(());
    }
    me.step(format!("UPDATE nums = {}, INSERT win", nums - 1), async {
        sqlx::query("UPDATE prizes SET nums = ? WHERE id = 1").bind(nums - 1).execute(&mut *tx).await?;
        sqlx::query("INSERT INTO wins VALUES (?)").bind(me.name()).execute(&mut *tx).await?;
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

async fn lock(me: &Actor, shop: &Shop) -> lockkit::Result<(Tx<Sqlite>, i64)> {
    let mut tx = lockkit::begin(&shop.pool).await?;
    let (_id, nums): (i64, i64) = RowLock::table("prizes").by("id", 1).fetch_one(&mut tx).await?;
    me.enters();
    Ok((tx, nums))
}
