//! A row lock without a bound on the wait.

use std::time::Duration;

use anyhow::Result;
use lockkit::RowLock;

use crate::{
    exhibit::{Elsewhere, Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Id, Kind, Place, Shop, Sql},
};

const TABLES: &str = "CREATE TABLE items (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL);
                      INSERT INTO items VALUES (1, 5)";

const UPDATE: &str = "UPDATE items SET nums = nums - 1 WHERE id = 1";

/// How long a customer may be kept waiting.
const BOUND: Duration = Duration::from_secs(30);

const ENDS: &str = "On MySQL and MariaDB the wait ends after `innodb_lock_wait_timeout`, by default 50 s, with error \
                    1205. Until then every caller keeps its connection.";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "02-for-update",
        title: "A row lock with no limit on the wait",
        recipe: "\
SET autocommit = 0
SELECT nums FROM items WHERE id = 1 FOR UPDATE
-- pay at another service, while the row is locked
UPDATE items SET nums = nums - 1 WHERE id = 1
COMMIT",
        happens: "A locks the row and then waits for another service. C only reads, and gets its answer at once: a \
                  row lock does not stop plain reads, so a check by a plain SELECT sees the old number. B wants the \
                  lock and waits as long as A works. On PostgreSQL, with its default settings, that wait has no end.",
        remedy: "\"Keep transactions short\" sets no limit. When the other service is slow, every caller that needs \
                  the row hangs, and each of them keeps a connection. The recipe also lacks `AND nums >= 1` in its \
                  UPDATE.",
        lockkit: "A lock of lockkit waits at most 10 s unless another `wait` is set; here it is 50 ms. (Only `lead`, \
                  for leaders, and `Wait::Unbounded` wait without a limit.) B gets the error `Contended` and can \
                  answer its customer. When it tries again after A's commit, it gets the lock.",
        more: ("row locks", "../guide.md#row-and-named-locks"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[
            Elsewhere {
                on: Kind::Sqlite,
                breaks: true,
                note: "SQLite has no FOR UPDATE. BEGIN IMMEDIATE stands for it, and locks the whole database.",
            },
            Elsewhere { on: Kind::MySql, breaks: true, note: ENDS },
            Elsewhere { on: Kind::MariaDb, breaks: true, note: ENDS },
        ],
        also: None,
    }
}

async fn nums<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    Ok(format!("{} left", shop.number("SELECT nums FROM items").await?).into())
}

async fn reader<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    me.step("a plain SELECT nums", shop.number("SELECT nums FROM items WHERE id = 1")).await?;
    me.mark("answered");
    Ok(())
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("items", nums).bound(BOUND).actor("A", |me| buyer(me, shop.clone()));
    let stage = stage.actor("B", |me| buyer(me, shop.clone())).actor("C", |me| reader(me, shop));
    // As long as the database lets B wait.
    let time = DB::LOCK_WAIT.map_or(3600, |it| it.as_secs());
    stage.play(&format!("A C B~ +{time}s")).await
}

async fn buyer<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    me.step("SELECT … FOR UPDATE", async {
        DB::begin_and_lock(&mut conn, "SELECT nums FROM items WHERE id = 1").await?;
        me.enters();
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.step("UPDATE nums", DB::execute(&mut conn, UPDATE)).await?;
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("items", nums).bound(BOUND).actor("A", |me| bounded(me, shop.clone()));
    stage
        .actor("B", |me| bounded(me, shop.clone()))
        .actor("C", |me| reader(me, shop))
        .play(
            "A C B +3600s A A B B B \
                 ",
        )
        .await
}

async fn bounded<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    loop {
        let mut tx = shop.pool.begin().await?;
        let lock = RowLock::table("items").by("id", Id(1)).wait(Duration::from_millis(50));
        let locked = me.step("lock the row, wait 50 ms", async {
            lock.lock(&mut *tx).await?;
            me.enters();
            Ok::<_, lockkit::Error>(())
        });
        match locked.await {
            Err(err) if err.is_contended() => me.gives_up("\"busy\""),
            locked => {
                locked?;
                me.step("UPDATE nums", DB::execute(&mut tx, UPDATE)).await?;
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
