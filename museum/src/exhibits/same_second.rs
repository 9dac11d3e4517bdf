//! A version made of the time, in whole seconds.

use anyhow::Result;
use lockkit::{Error, Versioned, VersionedRow};
use sqlx::Sqlite;

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE items (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL, saved_at TEXT NOT NULL,
                                          version INTEGER NOT NULL);
                      INSERT INTO items VALUES (1, 20, '12:00:00', 1)";

/// The time of all steps: they take less than a second.
const NOW: &str = "12:00:05";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "14-same-second",
        title: "Two saves in one second",
        recipe: "\
nums, saved_at = SELECT nums, saved_at FROM items WHERE id = 1
loop:
    UPDATE items SET nums = <new>, saved_at = now()
        WHERE id = 1 AND saved_at = <saved_at>
    if 1 row: done, else read again",
        happens: "The version of the row is the time of its last save, in whole seconds. C saves at 12:00:05. A and \
                  B read that version, and both save in the same second. A's save sets the time to 12:00:05, which \
                  it was before. So B's check finds nothing changed, and B overwrites A's save. The 5 pieces that A \
                  sold are in stock again.",
        remedy: "Microseconds make it rarer. The loop has no limit, and inside one transaction it cannot succeed \
                  (exhibit 13).",
        lockkit: "The version is a number that each save increases. (A version that is a time is always set later \
                  than the one before.) B's save fails with `Conflict`; B reads again, and adds its 10 to A's 15.",
        more: ("versions", "../guide.md#versions"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

/// A sells 5, and B puts in 10. When both have said that they saved, there must be 25.
async fn books(shop: Shop) -> Result<View> {
    let nums = shop.number("SELECT nums FROM items").await?;
    let breach = (nums == 30).then(|| "A's save is lost: 30 left, not 25".to_owned());
    Ok(View { state: format!("{nums} left"), breach })
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("items", &shop, books);
    let stage = stage.actor("A", |me| by_time(me, shop.clone(), -5)).actor("B", |me| by_time(me, shop.clone(), 10));
    stage.actor("C", |me| by_time(me, shop, 0)).play("C C A B A B").await
}

async fn by_time(me: Actor, shop: Shop, more: i64) -> Result<()> {
    let read = async {
        let query = sqlx::query_as("SELECT nums, saved_at FROM items WHERE id = 1");
        let (nums, saved_at): (i64, String) = query.fetch_one(&shop.pool).await?;
        Ok::<_, sqlx::Error>((nums, Some(saved_at)))
    };
    let (nums, saved_at) = me.step("SELECT saved_at", read).await?;
    let save = sqlx::query("UPDATE items SET nums = ?, saved_at = ? WHERE id = 1 AND saved_at = ?");
    let save = save.bind(nums + more).bind(NOW).bind(saved_at);
    me.step(format!("UPDATE nums = {}", nums + more), save.execute(&shop.pool)).await?;
    me.mark("saves");
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("items", &shop, books);
    let stage = stage.actor("A", |me| by_number(me, shop.clone(), -5)).actor("B", |me| by_number(me, shop.clone(), 10));
    stage.actor("C", |me| by_number(me, shop, 0)).play("C C A B A B B B").await
}

async fn by_number(me: Actor, shop: Shop, more: i64) -> Result<()> {
    let item = || VersionedRow::<Sqlite>::table("items").by("id", 1);
    loop {
        let read = async {
            let found: Versioned<(i64, i64, String, i64)> = item().read(&mut shop.pool.acquire().await?).await?;
            let version = found.row.3;
            anyhow::Ok((found, version))
        };
        let (found, _version) = me.step("read the version", read).await?;
        let nums = found.row.1 + more;
        let save = async {
            let mut tx = lockkit::begin(&shop.pool).await?;
            if let Err(err) = item().expected(found.version).bump(&mut tx).await {
                tx.rollback().await?;
                return Err(err.into());
            }
            sqlx::query("UPDATE items SET nums = ? WHERE id = 1").bind(nums).execute(&mut *tx).await?;
            tx.commit().await?;
            anyhow::Ok(())
        };
        match me.step(format!("save nums = {nums}"), save).await {
            Err(err) if err.downcast_ref().is_some_and(Error::is_conflict) => me.mark("refused"),
            saved => {
                saved?;
                me.mark("saves");
                return Ok(());
            }
        }
    }
}
