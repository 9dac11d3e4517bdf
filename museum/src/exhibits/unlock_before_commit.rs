//! A lock that is freed before the commit that it protects.

use std::time::Duration;

use anyhow::Result;
use lockkit::{NamedLock, Tx};

use crate::{
    exhibit::{Elsewhere, Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Kind, Place, Redis, Shop, Sql},
};

const KEY: &str = "order:7";
const TTL: Duration = Duration::from_secs(1200);
const TABLES: &str = "CREATE TABLE orders (customer BIGINT NOT NULL)";
const COUNT: &str = "SELECT count(*) FROM orders WHERE customer = 7";
const INSERT: &str = "INSERT INTO orders VALUES (7)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "16-unlock-before-commit",
        title: "Unlocked, and not committed yet",
        recipe: "\
@Transactional                          # the commit comes after the function
order(customer):
    if not tryLock(\"order:\" + customer, 1200 s): return \"busy\"
    try:     if SELECT count(*) FROM orders … = 0: INSERT INTO orders …
    finally: unlock",
        happens: "A customer clicks twice; one order per customer is allowed. A inserts the order and frees the \
                  lock. The commit comes later, outside of the function. In between, B gets the lock and counts the \
                  orders. A's order is not committed, so B counts 0. Both orders are committed.",
        remedy: "The lock and the check are both correct. Only the order is wrong: the lock must cover the commit. \
                  The 1200 s have a price, too: after a crash the customer is refused for 20 minutes.",
        lockkit: "A named lock belongs to the transaction, so the commit frees it, and so does a crash. B waits for \
                  A's commit, counts 1, and orders nothing. (If the whole rule is one order per customer, a UNIQUE \
                  constraint is enough. `Idempotent` stores A's answer and returns it to a repeated request.)",
        more: ("payments", "../guide/payments.md"),
        broken: on_database!(RedisAndDatabase, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[Elsewhere {
            on: Kind::Sqlite,
            breaks: true,
            note: "SQLite has one writer at a time, so B's INSERT waits for A's commit. On a server it does not wait.",
        }],
        also: None,
    }
}

async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let orders = shop.number(COUNT).await?;
    Ok(View { state: orders.to_string(), breach: (orders > 1).then(|| format!("{orders} orders of one customer")) })
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let redis = Redis::open(&place).await?;
    let stage = shop.stage("orders", books);
    let stage = stage.actor("A", |me| orders(me, redis.clone(), shop.clone()));
    // On SQLite, which has one writer at a time, B's INSERT waits for A's commit.
    let schedule = if DB::LOCKS_ROWS { "A A A A B B B A B B" } else { "A A A A B B B~ A B B B" };
    stage.actor("B", |me| orders(me, redis, shop)).play(schedule).await
}

async fn orders<DB: Sql>(me: Actor, redis: Redis, shop: Shop<DB>) -> Result<()> {
    let mut tx = shop.pool.begin().await?;
    let got = me.step("SET order:7 NX PX 1200000", redis.set_nx_px(KEY, me.name(), TTL)).await?;
    if got.is_none() {
        me.mark("\"busy\"");
        return Ok(());
    }
    if me.step("count the orders", shop.number(COUNT)).await? > 0 {
        me.mark("\"has ordered\"");
        return Ok(());
    }
    me.step("INSERT order", DB::execute(&mut tx, INSERT)).await?;
    me.step("finally: unlock", redis.delete_if(KEY, me.name())).await?;
    me.step("COMMIT", tx.commit()).await?;
    me.mark("orders");
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("orders", books);
    let stage = stage.actor("A", |me| under_name(me, shop.clone())).actor("B", |me| under_name(me, shop));
    stage.play("A A A B~ A B B B").await
}

async fn under_name<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let lock = async {
        let mut tx: Tx<DB> = lockkit::begin(&shop.pool).await?;
        NamedLock::new(KEY).lock(&mut tx).await?;
        me.enters();
        Ok::<_, lockkit::Error>(tx)
    };
    let mut tx = me.step("begin, lock `order:7`", lock).await?;
    let ordered = me.step("count the orders", DB::number(&mut tx, COUNT)).await?;
    if ordered > 0 {
        me.step("rollback", async {
            me.stops("\"has ordered\"");
            tx.rollback().await
        })
        .await?;
        return Ok(());
    }
    me.step("INSERT order", DB::execute(&mut tx, INSERT)).await?;
    let commit = async {
        me.stops("orders");
        tx.commit().await
    };
    me.step("commit", commit).await?;
    Ok(())
}
