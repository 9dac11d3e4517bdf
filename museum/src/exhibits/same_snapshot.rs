//! A version that is checked again and again in one transaction.

use std::sync::Arc;

use anyhow::Result;
use lockkit::{RetryPolicy, Versioned, VersionedRow};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const TABLES: &str = "CREATE TABLE items (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL, version INTEGER NOT NULL);
                      INSERT INTO items VALUES (1, 20, 1)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "13-same-snapshot",
        title: "Three tries that cannot succeed",
        recipe: "\
BEGIN
repeat 3 times:
    nums, version = SELECT nums, version FROM items WHERE id = 1
    UPDATE items SET nums = <nums + 5>, version = <version + 1>
        WHERE id = 1 AND version = <version>
    if 1 row: COMMIT, done",
        happens: "B reads version 1. A changes the row, so B's update is refused and B tries again. But B is still \
                  in the same transaction, which shows the database as it was at its first read. B reads version 1 \
                  again, each time. No number of tries can succeed, although nothing else writes. (SQLite reports an \
                  old snapshot; MySQL reports 0 changed rows.)",
        remedy: "More tries do not help. If each try has its own transaction, three are still too few for 16 \
                  writers that repeat in step, and the pauses between tries need a random part.",
        lockkit: "Every attempt begins anew, in its own transaction. The second attempt reads what A has written. \
                  Tasks of one process that conflict take turns, and pauses have a random part.",
        more: ("versions", "../guide.md#versions"),
        broken: Play::on_sqlite(|| Box::pin(broken(Scope::OneForAll, "B A B B B B B"))),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn row(shop: Shop) -> Result<View> {
    let (nums, version): (i64, i64) = sqlx::query_as("SELECT nums, version FROM items").fetch_one(&shop.pool).await?;
    Ok(format!("{nums}, version {version}").into())
}

/// Of a transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    OneForAll,
    #[cfg(test)]
    OneEach,
}

async fn broken(scope: Scope, schedule: &str) -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("item", &shop, row);
    let stage = stage.actor("A", |me| once(me, shop.clone())).actor("B", |me| three_times(me, shop, scope));
    stage.play(schedule).await
}

async fn once(me: Actor, shop: Shop) -> Result<()> {
    let save = "UPDATE items SET nums = 30, version = 2 WHERE id = 1 AND version = 1";
    me.step("UPDATE … version = 1", sqlx::query(save).execute(&shop.pool)).await?;
    me.mark("saves");
    Ok(())
}

async fn three_times(me: Actor, shop: Shop, scope: Scope) -> Result<()> {
    let mut tx = shop.pool.begin().await?;
    for attempt in 1..=3 {
        if scope != Scope::OneForAll && attempt > 1 {
            tx.rollback().await?;
            tx = shop.pool.begin().await?;
        }
        let version = me.step(format!("try {attempt}: SELECT version"), version(&mut tx)).await?;
        let save = sqlx::query("UPDATE items SET nums = nums + 5, version = ?1 + 1 WHERE version = ?1").bind(version);
        let saved = me.step(format!("UPDATE … version = {version}"), save.execute(&mut *tx)).await;
        if saved.is_ok_and(|it| it.rows_affected() == 1) {
            tx.commit().await?;
            me.mark("saves");
            return Ok(());
        }
    }
    me.gives_up("gives up");
    me.breach("all tries failed, without another writer");
    Ok(())
}

async fn version(conn: &mut SqliteConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("SELECT version FROM items WHERE id = 1").fetch_one(conn).await
}

async fn cured() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let stage = Stage::of("item", &shop, row);
    let stage = stage.actor("A", |me| once(me, shop.clone())).actor("B", |me| retries(me, shop));
    stage.play("B A B B B").await
}

async fn retries(me: Actor, shop: Shop) -> Result<()> {
    let (me, shop) = (Arc::new(me), Arc::new(shop));
    let attempt = async |number| {
        let item = || VersionedRow::<Sqlite>::table("items").by("id", 1);
        let read = async {
            let found: Versioned<(i64, i64, i64)> = item().read(&mut shop.pool.acquire().await?).await?;
            let version = found.row.2;
            anyhow::Ok((found, version))
        };
        let (found, version) = me.step(format!("attempt {number}: read the version"), read).await?;
        let save = async {
            let mut tx = lockkit::begin(&shop.pool).await?;
            item().expected(found.version).bump(&mut tx).await?;
            sqlx::query("UPDATE items SET nums = ? WHERE id = 1").bind(found.row.1 + 5).execute(&mut *tx).await?;
            tx.commit().await?;
            anyhow::Ok(())
        };
        me.step(format!("save over version {version}"), save).await
    };
    RetryPolicy::new().attempts(3).retry_if(is_conflict, attempt).await?;
    me.mark("saves");
    Ok(())
}

fn is_conflict(err: &anyhow::Error) -> bool {
    err.downcast_ref().is_some_and(lockkit::Error::is_conflict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_a_transaction_for_each_try_the_recipe_does_not_break() {
        let planted = Play::on_sqlite(|| Box::pin(broken(Scope::OneEach, "B A B B B")));
        let err = Exhibit { broken: planted, ..exhibit() }.shows().expect_err("the recipe was cured");
        assert_eq!(err.to_string(), "the recipe does not break any more");
    }
}
