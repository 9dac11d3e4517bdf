//! A table as a lock: waiters for a row keep their connections.

use std::{future::ready, time::Duration};

use anyhow::Result;
use lockkit::Leases;
use sqlx::Pool;

use super::with_leases::{sells, waits};
use crate::{
    exhibit::{Also, Exhibit, on_database},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Kind, Place, Shop, Sql},
};

const KEY: &str = "report";
const TABLES: &str = "CREATE TABLE resource_lock (name VARCHAR(50) PRIMARY KEY, owner VARCHAR(50) NOT NULL);
                      CREATE TABLE pages (id BIGINT PRIMARY KEY);
                      INSERT INTO resource_lock VALUES ('report', '');
                      INSERT INTO pages VALUES (1)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "12-pool-drained",
        title: "Waiting callers take all connections",
        recipe: "\
BEGIN
SELECT * FROM resource_lock WHERE name = 'report' FOR UPDATE   -- INSERT it if there is none
-- write the report: some minutes
COMMIT",
        happens: "The service has a pool of two connections. A holds the lock in an open transaction, which keeps \
                  one connection. B waits for the lock in the database, and keeps the other one. C does not need the \
                  lock. It wants to read a page, and gets no connection. With a pool of 20 it takes 19 waiting \
                  callers.",
        remedy: "A larger pool is drained by more callers. If A itself needs a second connection, A waits for B and B \
                  for A, and the database sees no deadlock. On MySQL the recipe has another one: two callers that find \
                  no row both lock the gap in the index where it would be. Each INSERT waits for the other caller, and \
                  one of them gets error 1213.",
        lockkit: "Holding a lease keeps no connection, and neither does waiting for one. C reads while A works and B \
                  waits. If a transaction of lockkit gets no connection within its bound, the error is `PoolStarved`, \
                  which says how many connections are in use.",
        more: ("a full pool", "../guide.md#when-it-hangs-or-the-pool-is-full"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: Some(Also {
            on: &[Kind::MySql, Kind::MariaDb],
            happens: "Also here: two callers come first, and nobody has the lock. Both find no row. FOR UPDATE then \
                      locks the gap in which the row would be, and two transactions may lock the same gap. Each \
                      INSERT waits until the other one gives up the gap: a deadlock.",
            broken: on_database!(Database, first_comers),
        }),
    }
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::with_connections(&place, TABLES, 2).await?;
    let (pool, asked) = (shop.pool.clone(), shop.clone());
    let stage = Stage::new("connections", move || ready(in_use(&pool))).clock(|_time| ready(Ok(())));
    let stage = stage.bound(Duration::from_secs(30)).asks(move || waiting(asked.clone()));
    let stage = stage.actor("A", |me| locks(me, shop.clone())).actor("B", |me| locks(me, shop.clone()));
    stage.actor("C", |me| reads(me, shop)).play("A B~ C~ +45s").await
}

/// In the database. B waits there with the last connection, so then C waits for one.
async fn waiting<DB: Sql>(shop: Shop<DB>) -> Result<Option<usize>> {
    Ok(shop.waiting().await?.map(|it| it * 2))
}

/// Without a query, which would need a connection.
fn in_use<DB: Sql>(pool: &Pool<DB>) -> Result<View> {
    let idle = u32::try_from(pool.num_idle())?;
    Ok(format!("{} of 2", pool.size() - idle).into())
}

async fn locks<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let lock = async {
        let mut conn = shop.pool.acquire().await?;
        DB::begin_and_lock(&mut conn, "SELECT name FROM resource_lock WHERE name = 'report'").await?;
        me.enters();
        Ok::<_, sqlx::Error>((conn, ()))
    };
    let _held = me.step("SELECT … FOR UPDATE", lock).await?;
    me.step("COMMIT", async {}).await;
    Ok(())
}

async fn reads<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let read = async {
        shop.number("SELECT count(*) FROM pages").await?;
        Ok::<_, sqlx::Error>(())
    };
    me.step("read a page", read).await?;
    me.mark("answered");
    Ok(())
}

async fn first_comers<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("rows", rows).actor("A", |me| inserts(me, shop.clone()));
    stage.actor("B", |me| inserts(me, shop)).play("A B A~ B A").await
}

async fn rows<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    Ok(shop.number("SELECT count(*) FROM resource_lock WHERE name = 'bill'").await?.to_string().into())
}

async fn inserts<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let mut conn = shop.pool.acquire().await?;
    let find = DB::begin_and_lock(&mut conn, "SELECT name FROM resource_lock WHERE name = 'bill'");
    me.step("SELECT … FOR UPDATE: no row", async { find.await.map(|_rows| ()) }).await?;
    let insert = "INSERT INTO resource_lock VALUES ('bill', '')";
    match me.step("INSERT the row", DB::execute(&mut conn, insert)).await {
        Ok(_inserted) => me.enters(),
        Err(_deadlock) => me.breach(format!("nobody had the lock, and {} does not get it", me.name())),
    }
    me.step("COMMIT", async {}).await;
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::with_connections(&place, TABLES, 2).await?;
    let process = |name: &str| Leases::builder(shop.pool.clone()).holder(name).build();
    let (a, b) = (process("A")?, process("B")?);
    // The lease is no state to show: B may have it a moment after A's release, or a moment later.
    let stage = Stage::new("", || ready(Ok(View::default())));
    let stage = stage.clock(|_time| ready(Ok(()))).actor("A", |me| sells(me, a, KEY));
    let stage = stage.actor("B", |me| waits(me, b, KEY)).actor("C", |me| reads(me, shop));
    stage.play("A B~ C A B B").await
}
