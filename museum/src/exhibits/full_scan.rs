//! A lock by a column without an index.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::{Error, PlanCheck, RowLock};

use crate::{
    exhibit::{Elsewhere, Exhibit, on_database},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Id, Kind, Place, Shop, Sql, Text},
};

const TABLES: &str = "CREATE TABLE items (id BIGINT PRIMARY KEY, name VARCHAR(50) NOT NULL, nums BIGINT NOT NULL);
                      INSERT INTO items VALUES (1, 'lamp', 5), (2, 'book', 5)";

const LOCKS_ALL: &str = "`type ALL` is the scan. Under REPEATABLE READ, the default of MySQL and MariaDB, every row \
                         that was read stays locked.";

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
                  every row that it reads. A wants a lamp; B wants a book and has to wait.",
        remedy: "The usual remedy is an index. It helps until the index is dropped, or a condition is written that \
                  cannot use it. No statement fails then. The site only becomes slow, when many customers come.",
        lockkit: "lockkit asks the database for the plan of the statement before it locks, and refuses a scan. The \
                  error `FullScan` names the table and says to create an index. Nothing is locked, so B gets its \
                  book. The first test of the function finds the mistake.",
        more: ("row locks", "../guide.md#row-and-named-locks"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured, PlanCheck::Deny),
        elsewhere: &[
            Elsewhere {
                on: Kind::Sqlite,
                breaks: true,
                note: "SQLite has a single lock for all rows, and shows here what the scan does on MySQL.",
            },
            Elsewhere {
                on: Kind::Postgres,
                breaks: false,
                note: "PostgreSQL reads every row as well, but locks only those that match, so B gets its book. \
                       lockkit refuses the scan all the same.",
            },
            Elsewhere { on: Kind::MySql, breaks: true, note: LOCKS_ALL },
            Elsewhere { on: Kind::MariaDb, breaks: true, note: LOCKS_ALL },
        ],
        also: None,
    }
}

async fn stock<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let lamps = shop.number("SELECT nums FROM items WHERE name = 'lamp'").await?;
    let books = shop.number("SELECT nums FROM items WHERE name = 'book'").await?;
    Ok(format!("{lamps} lamps, {books} books").into())
}

fn stage<DB: Sql>(shop: &Shop<DB>) -> Stage {
    shop.stage("items", stock).bound(Duration::from_secs(10))
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = stage(&shop).actor("A", |me| buyer(me, shop.clone(), "lamp"));
    stage.actor("B", |me| buyer(me, shop, "book")).play("A A B B~ +45s").await
}

async fn buyer<DB: Sql>(me: Actor, shop: Shop<DB>, name: &'static str) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    let select = format!("SELECT nums FROM items WHERE name = '{name}'");
    me.step(format!("EXPLAIN … WHERE name = '{name}'"), async {
        Ok::<_, sqlx::Error>(Some(DB::plan(&mut conn, &select).await?))
    })
    .await?;
    me.step(format!("SELECT '{name}' FOR UPDATE"), async {
        DB::begin_and_lock(&mut conn, &select).await?;
        // Not `enters`: where A locks no more than its lamp, B may lock its book.
        me.mark("has it");
        Ok::<_, sqlx::Error>(())
    })
    .await?;
    me.step("COMMIT", async {}).await;
    Ok(())
}

async fn cured<DB: Sql>(place: Place, check: PlanCheck) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = stage(&shop).actor("A", |me| by_name(me, shop.clone(), check));
    stage.actor("B", |me| by_id(me, shop)).play("A B +45s B B").await
}

async fn by_name<DB: Sql>(me: Actor, shop: Shop<DB>, check: PlanCheck) -> Result<()> {
    let refused = me.step("lock the row by name = 'lamp'", async {
        let mut tx = lockkit::begin(&shop.pool).await?;
        let locked = RowLock::table("items").by("name", Text("lamp")).check_plan(check).lock(&mut tx).await;
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

async fn by_id<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let locked = me.step("lock the row by id = 2", async {
        let mut tx = lockkit::begin(&shop.pool).await?;
        RowLock::table("items").by("id", Id(2)).lock(&mut tx).await?;
        me.enters();
        Ok::<_, Error>(tx)
    });
    let mut tx = locked.await?;
    me.step("UPDATE nums", DB::execute(&mut tx, "UPDATE items SET nums = nums - 1 WHERE id = 2")).await?;
    me.step("commit", async {
        me.leaves();
        tx.commit().await
    })
    .await?;
    Ok(())
}

/// A lock that checks no plan breaks the cure.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let cured = on_database!(Database, cured, PlanCheck::Off);
    (Exhibit { cured, ..exhibit() }, "a scan was not refused")
}
