//! A version that is checked again and again in one transaction.

use std::sync::Arc;

use anyhow::Result;
use lockkit::{RetryPolicy, Versioned, VersionedRow};

use crate::{
    exhibit::{Elsewhere, Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Changed, Id, Item, Kind, Place, Shop, Sql},
};

const TABLES: &str = "CREATE TABLE items (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL, version BIGINT NOT NULL);
                      INSERT INTO items VALUES (1, 20, 1)";

const VERSION: &str = "SELECT version FROM items WHERE id = 1";

const OLD_VERSION: &str = "REPEATABLE READ is the default of MySQL and MariaDB. The UPDATE looks at the row as it is \
                           and changes nothing, while the SELECT still shows version 1.";

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
                  again, each time. No number of tries can succeed, although nothing else writes.",
        remedy: "More tries do not help. If each try has its own transaction, three are still too few for many \
                  writers: 64 tasks that retry at once need 13 tries for each save (docs/benchmarks/counters, \
                  PostgreSQL). The pauses between tries need a random part.",
        lockkit: "Every attempt begins anew, in its own transaction. The second attempt reads what A has written. \
                  Tasks of one process that conflict take turns, and pauses have a random part.",
        more: ("versions", "../guide.md#versions"),
        broken: on_database!(Database, broken, Scope::OneForAll),
        cured: on_database!(Database, cured),
        elsewhere: &[
            Elsewhere {
                on: Kind::Sqlite,
                breaks: true,
                note: "SQLite refuses the UPDATE, because the snapshot is old. MySQL reports 0 changed rows.",
            },
            Elsewhere {
                on: Kind::Postgres,
                breaks: true,
                note: "The run on PostgreSQL asks for REPEATABLE READ: the UPDATE fails, and then every further \
                       statement. By default PostgreSQL is READ COMMITTED, where the second try reads A's version \
                       and succeeds.",
            },
            Elsewhere { on: Kind::MySql, breaks: true, note: OLD_VERSION },
            Elsewhere { on: Kind::MariaDb, breaks: true, note: OLD_VERSION },
        ],
        also: None,
    }
}

async fn row<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let nums = shop.number("SELECT nums FROM items").await?;
    let version = shop.number(VERSION).await?;
    Ok(format!("{nums}, version {version}").into())
}

/// Of a transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    OneForAll,
    #[cfg(test)]
    OneEach,
}

impl Scope {
    fn schedule(self) -> &'static str {
        match self {
            Self::OneForAll => "B A B B B B B",
            #[cfg(test)]
            Self::OneEach => "B A B B B",
        }
    }
}

async fn broken<DB: Sql>(place: Place, scope: Scope) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("item", row);
    let stage = stage.actor("A", |me| once(me, shop.clone())).actor("B", |me| three_times(me, shop, scope));
    stage.play(scope.schedule()).await
}

async fn once<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let save = "UPDATE items SET nums = 30, version = 2 WHERE id = 1 AND version = 1";
    me.step("UPDATE … version = 1", shop.execute(save)).await?;
    me.mark("saves");
    Ok(())
}

async fn three_times<DB: Sql>(me: Actor, shop: Shop<DB>, scope: Scope) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    DB::execute(&mut conn, DB::BEGIN_SNAPSHOT).await?;
    for attempt in 1..=3 {
        if scope != Scope::OneForAll && attempt > 1 {
            DB::execute(&mut conn, "ROLLBACK").await?;
            DB::execute(&mut conn, DB::BEGIN_SNAPSHOT).await?;
        }
        let found = me.step(format!("try {attempt}: SELECT version"), DB::number(&mut conn, VERSION)).await;
        let version = found.unwrap_or(1);
        let save = format!("UPDATE items SET nums = nums + 5, version = {version} + 1 WHERE version = {version}");
        let saved = me.step(format!("UPDATE … version = {version}"), DB::execute(&mut conn, &save)).await;
        if saved.is_ok_and(|it| it == Changed(1)) {
            DB::execute(&mut conn, "COMMIT").await?;
            me.mark("saves");
            return Ok(());
        }
    }
    // A connection goes back to its pool as it is.
    DB::execute(&mut conn, "ROLLBACK").await?;
    me.gives_up("gives up");
    me.breach("all tries failed, without another writer");
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("item", row);
    let stage = stage.actor("A", |me| once(me, shop.clone())).actor("B", |me| retries(me, shop));
    stage.play("B A B B B").await
}

async fn retries<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let (me, shop) = (Arc::new(me), Arc::new(shop));
    let attempt = async |number| {
        let item = || VersionedRow::<DB>::table("items").by("id", Id(1));
        let read = async {
            let found: Versioned<Item> = item().read(&mut shop.pool.acquire().await?).await?;
            let version = found.row.version;
            anyhow::Ok((found, version))
        };
        let (found, version) = me.step(format!("attempt {number}: read the version"), read).await?;
        let save = async {
            let mut tx = lockkit::begin(&shop.pool).await?;
            item().expected(found.version).bump(&mut tx).await?;
            let nums = found.row.nums + 5;
            DB::execute(&mut tx, &format!("UPDATE items SET nums = {nums} WHERE id = 1")).await?;
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

/// With a transaction for each try, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken = on_database!(Database, broken, Scope::OneEach);
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}
