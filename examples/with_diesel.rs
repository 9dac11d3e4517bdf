//! Diesel on its own connections, and lockkit beside it: leases, a guard that refuses a stale holder, and named locks,
//! in Diesel's transactions.
//!
//! ```text
//! DATABASE_URL=postgres://user:password@localhost/shop cargo run --example with_diesel
//! ```
//!
//! The example creates its tables, named `t_…`, in an empty database, and checks itself: see `orms/trial.rs`.

#[path = "orms/trial.rs"]
mod trial;

use std::env;

use anyhow::{Context, Result};
use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use lockkit::{Leases, NamedLock};
use sqlx::{PgPool, Postgres};

use self::trial::{Mode, WAIT, decide};

diesel::table! {
    t_orders (id) {
        id -> BigInt,
        user_id -> BigInt,
    }
}

diesel::table! {
    t_items (item_id) {
        item_id -> BigInt,
        stock -> BigInt,
    }
}

const ITEM: i64 = 7;

struct Shop {
    url: String,
    /// On connections of sqlx, which Diesel does not use.
    leases: Leases<PgPool>,
}

impl Shop {
    /// In a service, from a pool of diesel-async.
    async fn connect(&self) -> Result<AsyncPgConnection> {
        Ok(AsyncPgConnection::establish(&self.url).await?)
    }
}

impl trial::Shop for Shop {
    /// There is no row to lock yet, so the user's name is locked.
    async fn order(&self, user_id: i64, mode: Mode) -> Result<bool> {
        let lock = NamedLock::new(lockkit::key!("order:{user_id}")).wait(WAIT).sql::<Postgres>()?;
        let mut conn = self.connect().await?;
        conn.transaction(async |conn| {
            if mode == Mode::Locked {
                conn.batch_execute(&lock).await?;
            }
            let of_user = t_orders::table.filter(t_orders::user_id.eq(user_id));
            let orders: i64 = of_user.count().get_result(conn).await?;
            decide().await;
            if orders == 0 {
                let order = diesel::insert_into(t_orders::table).values(t_orders::user_id.eq(user_id));
                order.execute(conn).await?;
            }
            Ok(orders == 0)
        })
        .await
    }

    /// The lease outlives its transaction, so a service can call others while it holds it. The guard ties the two
    /// together: of this key, no transaction with an older lease commits after this one.
    async fn sell(&self, mode: Mode) -> Result<bool> {
        let mut conn = self.connect().await?;
        if mode == Mode::Naive {
            return conn.transaction(async |conn| sell_one(conn).await).await;
        }
        let lease = self.leases.lease(lockkit::key!("item:{ITEM}")).wait(WAIT).acquire().await?;
        let guard = lease.guard_sql::<Postgres>()?;
        let selling = conn.transaction(async |conn| {
            conn.batch_execute(&guard).await?;
            sell_one(conn).await
        });
        let is_sold = selling.await?; // committed, before the lease is released
        lease.release().await?;
        Ok(is_sold)
    }

    async fn sell_too_late(&self, mode: Mode) -> Result<bool> {
        let mut conn = self.connect().await?;
        let lease = self.leases.lease(lockkit::key!("item:{ITEM}")).acquire().await?;
        let guard = lease.guard_sql::<Postgres>()?;
        let stock = stock(&mut conn).await?;
        // As if this process were stopped for longer than the ttl.
        self.leases.steal(lease.key()).await?;
        self.sell(Mode::Locked).await?;
        let selling = conn.transaction(async |conn| {
            if mode == Mode::Locked {
                conn.batch_execute(&guard).await?;
            }
            set_stock(conn, stock - 1).await
        });
        let sold: Result<()> = selling.await;
        if let Err(err) = &sold {
            println!("refused: {err}");
        }
        Ok(sold.is_ok())
    }

    async fn reset(&self, stock: i64) -> Result<()> {
        let mut conn = self.connect().await?;
        diesel::delete(t_orders::table).execute(&mut conn).await?;
        diesel::delete(t_items::table).execute(&mut conn).await?;
        let item = (t_items::item_id.eq(ITEM), t_items::stock.eq(stock));
        diesel::insert_into(t_items::table).values(item).execute(&mut conn).await?;
        Ok(())
    }

    async fn orders(&self) -> Result<Vec<i64>> {
        Ok(t_orders::table.select(t_orders::user_id).load(&mut self.connect().await?).await?)
    }

    async fn stock(&self) -> Result<i64> {
        stock(&mut self.connect().await?).await
    }
}

async fn sell_one(conn: &mut AsyncPgConnection) -> Result<bool> {
    let stock = stock(conn).await?;
    decide().await;
    if stock > 0 {
        set_stock(conn, stock - 1).await?;
    }
    Ok(stock > 0)
}

async fn stock(conn: &mut AsyncPgConnection) -> Result<i64> {
    Ok(t_items::table.find(ITEM).select(t_items::stock).first(conn).await?)
}

async fn set_stock(conn: &mut AsyncPgConnection, stock: i64) -> Result<()> {
    diesel::update(t_items::table.find(ITEM)).set(t_items::stock.eq(stock)).execute(conn).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = env::var("DATABASE_URL").context("DATABASE_URL must name a PostgreSQL database")?;
    let pool = PgPool::connect(&url).await?;
    lockkit::migrate(&pool).await?;
    let shop = Shop { leases: Leases::new(pool), url };
    let tables = "CREATE TABLE t_orders (id BIGSERIAL PRIMARY KEY, user_id BIGINT NOT NULL);
                  CREATE TABLE t_items (item_id BIGINT PRIMARY KEY, stock BIGINT NOT NULL)";
    shop.connect().await?.batch_execute(tables).await?;
    trial::run(shop).await
}
