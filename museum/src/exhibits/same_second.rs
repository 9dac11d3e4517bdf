//! A version made of the time, in whole seconds.

use anyhow::Result;
use lockkit::{Error, Versioned, VersionedRow};

use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Id, Item, Place, Shop, Sql},
};

const TABLES: &str = "CREATE TABLE items (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL, saved_at VARCHAR(8) NOT NULL,
                                          version BIGINT NOT NULL);
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
        happens: "The version of the row is the time of its last save, in whole seconds. C saves the row at \
                  12:00:05 and leaves the 20 pieces as they are. A and B read 20 and that version. In the same \
                  second, A sells 5 and saves 15, and B adds 10 and saves 30. A's save sets the time to 12:00:05, \
                  which it was before. So B's check finds nothing changed, and B overwrites A's save: 30 pieces \
                  instead of 25.",
        remedy: "Microseconds make it rarer. The loop has no limit, and inside one transaction it cannot succeed \
                  (exhibit 13).",
        lockkit: "The version is a number that each save increases. (A version that is a time is always set later \
                  than the one before.) B's save fails with `Conflict`; B reads again, and adds its 10 to A's 15.",
        more: ("versions", "../guide.md#versions"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

/// A sells 5, and B puts in 10. When both have said that they saved, there must be 25.
async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let nums = shop.number("SELECT nums FROM items").await?;
    let breach = (nums == 30).then(|| "A's save is lost: 30 left, not 25".to_owned());
    Ok(View { state: format!("{nums} left"), breach })
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("items", books);
    let stage = stage.actor("A", |me| by_time(me, shop.clone(), -5)).actor("B", |me| by_time(me, shop.clone(), 10));
    stage.actor("C", |me| by_time(me, shop, 0)).play("C C A B A B").await
}

async fn by_time<DB: Sql>(me: Actor, shop: Shop<DB>, more: i64) -> Result<()> {
    let read = async {
        let nums = shop.number("SELECT nums FROM items WHERE id = 1").await?;
        let saved_at = DB::text(&mut *shop.pool.acquire().await?, "SELECT saved_at FROM items WHERE id = 1").await?;
        Ok::<_, sqlx::Error>((nums, Some(saved_at)))
    };
    let (nums, saved_at) = me.step("SELECT saved_at", read).await?;
    let (nums, saved_at) = (nums + more, saved_at.unwrap_or_default());
    let save = format!("UPDATE items SET nums = {nums}, saved_at = '{NOW}' WHERE id = 1 AND saved_at = '{saved_at}'");
    me.step(format!("UPDATE nums = {nums}"), shop.execute(&save)).await?;
    me.mark("saves");
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("items", books);
    let stage = stage.actor("A", |me| by_number(me, shop.clone(), -5)).actor("B", |me| by_number(me, shop.clone(), 10));
    stage.actor("C", |me| by_number(me, shop, 0)).play("C C A B A B B B").await
}

async fn by_number<DB: Sql>(me: Actor, shop: Shop<DB>, more: i64) -> Result<()> {
    let item = || VersionedRow::<DB>::table("items").by("id", Id(1));
    loop {
        let read = async {
            let found: Versioned<Item> = item().read(&mut shop.pool.acquire().await?).await?;
            let version = found.row.version;
            anyhow::Ok((found, version))
        };
        let (found, _version) = me.step("read the version", read).await?;
        let nums = found.row.nums + more;
        let save = async {
            let mut tx = lockkit::begin(&shop.pool).await?;
            if let Err(err) = item().expected(found.version).bump(&mut tx).await {
                tx.rollback().await?;
                return Err(err.into());
            }
            DB::execute(&mut tx, &format!("UPDATE items SET nums = {nums} WHERE id = 1")).await?;
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
