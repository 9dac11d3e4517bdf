//! A row lock without a bound on the wait.

use std::time::Duration;

use anyhow::Result;
use lockkit::RowLock;

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE items (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL);
                      INSERT INTO items VALUES (1, 5)";

/// How long a customer may be kept waiting.
const BOUND: Duration = Duration::from_secs(60);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "02-for-update",
        title: "A row lock with no limit on the wait",
        recipe: "\
SET autocommit = 0
SELECT nums FROM items WHERE id = 1 FOR UPDATE   -- SQLite: BEGIN IMMEDIATE
-- pay at another service, while the row is locked
UPDATE items SET nums = nums - 1 WHERE id = 1
COMMIT",
        happens: "A locks the row and then waits for another service. C only reads, and gets its answer at once: a \
                  row lock does not stop plain reads, so a check by a plain SELECT sees the old number. B wants the \
                  lock and waits as long as A works. On PostgreSQL, with its default settings, that wait has no end.",
        remedy: "\"Keep transactions short\" sets no limit. When the other service is slow, every caller that needs \
                  the row hangs, and each of them keeps a connection. The recipe also lacks `AND nums >= 1` in its \
                  UPDATE.",
        lockkit: "Every lock of lockkit has a limit: 10 s by default, 50 ms in this run. B gets the error \
                  `Contended` and can answer its customer. When it tries again after A's commit, it gets the lock.",
        more: ("row locks", "../guide.md#row-and-named-locks"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn nums(shop: Shop) -> Result<View> {
    Ok(format!("{} left", shop.number("SELECT nums FROM items").await?).into())
}

async fn reader(me: Actor, shop: Shop) -> Result<()> {
    me.step("a plain SELECT nums", shop.number("SELECT nums FROM items WHERE id = 1")).await?;
    me.mark("answered");
    Ok(())
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("items", &shop, nums).clock({
        let shop = shop.clone();
        move |time| shop.clone().pass(time)
    });
    let stage = stage.bound(BOUND).actor("A", |me| buyer(me, shop.clone())).actor("B", |me| buyer(me, shop.clone()));
    stage.actor("C", |me| reader(me, shop)).play("A C B~ +3600s").await
}

async fn buyer(me: Actor, shop: Shop) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    me.step("SELECT … FOR UPDATE", async {
        sqlx::query("BEGIN IMMEDIATE").execute(&mut *conn).await?;
        me.enters();
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.step("UPDATE nums", sqlx::query("UPDATE items SET nums = nums - 1").execute(&mut *conn)).await?;
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("items", &shop, nums).clock({
        let shop = shop.clone();
        move |time| shop.clone().pass(time)
    });
    let stage =
        stage.bound(BOUND).actor("A", |me| bounded(me, shop.clone())).actor("B", |me| bounded(me, shop.clone()));
    stage.actor("C", |me| reader(me, shop)).play("A C B +3600s A A B B B").await
}

async fn bounded(me: Actor, shop: Shop) -> Result<()> {
    loop {
        let mut tx = shop.pool.begin().await?;
        let lock = RowLock::table("items").by("id", 1).wait(Duration::from_millis(50));
        let locked = me.step("lock the row, wait 50 ms", async {
            lock.lock(&mut *tx).await?;
            me.enters();
            Ok::<_, lockkit::Error>(())
        });
        match locked.await {
            Err(err) if err.is_contended() => me.gives_up("\"busy\""),
            locked => {
                locked?;
                me.step("UPDATE nums", sqlx::query("UPDATE items SET nums = nums - 1").execute(&mut *tx)).await?;
                me.step("COMMIT", async {
                    me.leaves();
                    tx.commit().await
                })
                .await?;
                return Ok(());
            }
        }
    }
}
