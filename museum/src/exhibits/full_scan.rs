//! A lock by a column without an index.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::{Error, PlanCheck, RowLock};

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT NOT NULL, nums INTEGER NOT NULL);
                      INSERT INTO items VALUES (1, 'lamp', 5), (2, 'book', 5)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "03-full-scan",
        title: "A lock of one row that locks the whole table",
        recipe: "\
BEGIN
SELECT nums FROM items WHERE name = 'lamp' FOR UPDATE   -- no index on name
UPDATE items SET nums = nums - 1 WHERE name = 'lamp'
COMMIT",
        happens: "The column `name` has no index, so the database reads every row to find the lamp. MySQL locks \
                  every row that it reads. A wants a lamp; B wants a book and has to wait. (This run is on SQLite, \
                  which has a single lock for all rows. It shows what the scan does on MySQL.)",
        remedy: "The usual remedy is an index. It helps until the index is dropped, or a condition is written that \
                  cannot use it. No statement fails then. The site only becomes slow, when many customers come.",
        lockkit: "lockkit asks the database for the plan of the statement before it locks, and refuses a scan. The \
                  error `FullScan` names the table and says to create an index. Nothing is locked, so B gets its \
                  book. The mistake is found by the first test.",
        more: ("row locks", "../guide.md#row-and-named-locks"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured(PlanCheck::Deny))),
    }
}

async fn stock(shop: Shop) -> Result<View> {
    let (lamps, books): (i64, i64) = sqlx::query_as(
        "SELECT (SELECT nums FROM items WHERE name = 'lamp'), (SELECT nums FROM items WHERE name = 'book')",
    )
    .fetch_one(&shop.pool)
    .await?;
    Ok(format!("{lamps} lamps, {books} books").into())
}

fn stage(shop: &Shop) -> Stage {
    let clock = shop.clone();
    let stage = Stage::of("items", shop, stock);
    stage.clock(move |time| clock.clone().pass(time)).bound(Duration::from_secs(10))
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = stage(&shop).actor("A", |me| buyer(me, shop.clone(), "lamp"));
    stage.actor("B", |me| buyer(me, shop, "book")).play("A A B B~ +60s").await
}

async fn buyer(me: Actor, shop: Shop, name: &'static str) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    me.step(format!("EXPLAIN … WHERE name = '{name}'"), async {
        let explain = "EXPLAIN QUERY PLAN SELECT nums FROM items WHERE name = ?";
        let plan: (i64, i64, i64, String) = sqlx::query_as(explain).bind(name).fetch_one(&mut *conn).await?;
        Ok::<_, sqlx::Error>(Some(plan.3))
    })
    .await?;
    me.step(format!("SELECT '{name}' FOR UPDATE"), async {
        sqlx::query("BEGIN IMMEDIATE").execute(&mut *conn).await?;
        me.enters();
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    Ok(())
}

async fn cured(check: PlanCheck) -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = stage(&shop).actor("A", |me| by_name(me, shop.clone(), check));
    stage.actor("B", |me| by_id(me, shop)).play("A B +60s B B").await
}

async fn by_name(me: Actor, shop: Shop, check: PlanCheck) -> Result<()> {
    let refused = me.step("lock the row by name = 'lamp'", async {
        let mut tx = lockkit::begin(&shop.pool).await?;
        let locked = RowLock::table("items").by("name", "lamp").check_plan(check).lock(&mut tx).await;
        tx.rollback().await?;
        locked.map(|_rows| ())
    });
    match refused.await {
        Err(Error::FullScan { .. }) => me.gives_up("refused"),
        locked => {
            locked?;
            bail!("a scan was not refused");
        }
    }
    Ok(())
}

async fn by_id(me: Actor, shop: Shop) -> Result<()> {
    let locked = me.step("lock the row by id = 2", async {
        let mut tx = lockkit::begin(&shop.pool).await?;
        RowLock::table("items").by("id", 2).lock(&mut tx).await?;
        me.enters();
        Ok::<_, Error>(tx)
    });
    let mut tx = locked.await?;
    me.step("UPDATE nums", sqlx::query("UPDATE items SET nums = nums - 1 WHERE id = 2").execute(&mut *tx)).await?;
    me.step("commit", async {
        me.leaves();
        tx.commit().await
    })
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_checks_no_plan_breaks_the_cure() {
        let planted = Play::on_sqlite(|| Box::pin(cured(PlanCheck::Off)));
        let err = Exhibit { cured: planted, ..exhibit() }.shows().expect_err("the scan was not refused");
        assert_eq!(err.root_cause().to_string(), "a scan was not refused");
    }
}
