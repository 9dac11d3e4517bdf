//! SeaORM and lockkit on one pool: leases, a guard that refuses a stale holder, and named locks, in SeaORM's
//! transactions.
//!
//! ```text
//! cargo run --example with_sea_orm                                                  # on a temporary SQLite file
//! DATABASE_URL=postgres://user:password@localhost/shop cargo run --example with_sea_orm # or mysql://…
//! ```
//!
//! The example creates its tables, named `t_…`, in an empty database, and checks itself: see `orms/trial.rs`.

#[path = "orms/trial.rs"]
mod trial;

use std::env;

use anyhow::{Context, Result};
use lockkit::{
    Leases, NamedLock,
    dialect::{FenceGuardOps, LeaseOps, NamedOps},
};
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, ConnectOptions, ConnectionTrait, Database, DatabaseConnection,
    EntityTrait, PaginatorTrait, QueryFilter, Schema, TransactionTrait,
};
use sqlx::{MySql, Pool, Postgres, Sqlite, sqlite::SqliteJournalMode};

use self::trial::{Mode, WAIT, decide};

#[expect(unreachable_pub, reason = "as SeaORM generates its items")]
mod order {
    use sea_orm::entity::prelude::*;

    #[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "t_orders")]
    pub struct Model {
        #[sea_orm(primary_key)]
        pub id: i64,
        pub user_id: i64,
    }

    #[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

#[expect(unreachable_pub, reason = "as SeaORM generates its items")]
mod item {
    use sea_orm::entity::prelude::*;

    #[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "t_items")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub item_id: i64,
        pub stock: i64,
    }

    #[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

const ITEM: i64 = 7;

/// A database of SeaORM and of lockkit.
trait Both: FenceGuardOps + LeaseOps + NamedOps {
    /// The pool of SeaORM, which serves lockkit too.
    fn pool(db: &DatabaseConnection) -> &Pool<Self>;
}

impl Both for Postgres {
    fn pool(db: &DatabaseConnection) -> &Pool<Self> {
        db.get_postgres_connection_pool()
    }
}

impl Both for MySql {
    fn pool(db: &DatabaseConnection) -> &Pool<Self> {
        db.get_mysql_connection_pool()
    }
}

impl Both for Sqlite {
    fn pool(db: &DatabaseConnection) -> &Pool<Self> {
        db.get_sqlite_connection_pool()
    }
}

struct Shop<DB: Both> {
    db: DatabaseConnection,
    leases: Leases<Pool<DB>>,
}

impl<DB: Both> trial::Shop for Shop<DB> {
    /// There is no row to lock yet, so the user's name is locked.
    async fn order(&self, user_id: i64, mode: Mode) -> Result<bool> {
        let lock = NamedLock::new(lockkit::key!("order:{user_id}")).wait(WAIT).sql::<DB>()?;
        let tx = self.db.begin().await?;
        if mode == Mode::Locked {
            tx.execute_unprepared(&lock).await?;
        }
        let orders = order::Entity::find().filter(order::Column::UserId.eq(user_id)).count(&tx).await?;
        decide().await;
        if orders == 0 {
            order::ActiveModel { user_id: Set(user_id), ..Default::default() }.insert(&tx).await?;
        }
        tx.commit().await?;
        Ok(orders == 0)
    }

    /// The lease outlives its transaction, so a service can call others while it holds it. The guard ties the two
    /// together: of this key, no transaction with an older lease commits after this one.
    async fn sell(&self, mode: Mode) -> Result<bool> {
        if mode == Mode::Naive {
            let tx = self.db.begin().await?;
            let is_sold = sell_one(&tx).await?;
            tx.commit().await?;
            return Ok(is_sold);
        }
        let lease = self.leases.lease(lockkit::key!("item:{ITEM}")).wait(WAIT).acquire().await?;
        let tx = self.db.begin().await?;
        tx.execute_unprepared(&lease.guard_sql::<DB>()?).await?;
        let is_sold = sell_one(&tx).await?;
        tx.commit().await?; // before the lease is released
        lease.release().await?;
        Ok(is_sold)
    }

    async fn sell_too_late(&self, mode: Mode) -> Result<bool> {
        let lease = self.leases.lease(lockkit::key!("item:{ITEM}")).acquire().await?;
        let guard = lease.guard_sql::<DB>()?;
        let stock = stock(&self.db).await?;
        // As if this process were stopped for longer than the ttl.
        self.leases.steal(lease.key()).await?;
        self.sell(Mode::Locked).await?;
        let tx = self.db.begin().await?;
        if mode == Mode::Locked
            && let Err(err) = tx.execute_unprepared(&guard).await
        {
            println!("refused: {err}");
            tx.rollback().await?;
            return Ok(false);
        }
        set_stock(&tx, stock - 1).await?;
        tx.commit().await?;
        Ok(true)
    }

    async fn reset(&self, stock: i64) -> Result<()> {
        order::Entity::delete_many().exec(&self.db).await?;
        item::Entity::delete_many().exec(&self.db).await?;
        item::ActiveModel { item_id: Set(ITEM), stock: Set(stock) }.insert(&self.db).await?;
        Ok(())
    }

    async fn orders(&self) -> Result<Vec<i64>> {
        Ok(order::Entity::find().all(&self.db).await?.into_iter().map(|it| it.user_id).collect())
    }

    async fn stock(&self) -> Result<i64> {
        stock(&self.db).await
    }
}

async fn sell_one(conn: &impl ConnectionTrait) -> Result<bool> {
    let stock = stock(conn).await?;
    decide().await;
    if stock > 0 {
        set_stock(conn, stock - 1).await?;
    }
    Ok(stock > 0)
}

async fn stock(conn: &impl ConnectionTrait) -> Result<i64> {
    Ok(item::Entity::find_by_id(ITEM).one(conn).await?.context("the item does not exist")?.stock)
}

async fn set_stock(conn: &impl ConnectionTrait, stock: i64) -> Result<()> {
    item::ActiveModel { item_id: Set(ITEM), stock: Set(stock) }.update(conn).await?;
    Ok(())
}

async fn run_on<DB: Both>(db: DatabaseConnection) -> Result<()> {
    lockkit::migrate(DB::pool(&db)).await?;
    let schema = Schema::new(db.get_database_backend());
    db.execute(&schema.create_table_from_entity(order::Entity)).await?;
    db.execute(&schema.create_table_from_entity(item::Entity)).await?;
    let shop = Shop { leases: Leases::new(DB::pool(&db).clone()), db };
    trial::run(shop).await
}

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = env::var("DATABASE_URL")
        .unwrap_or_else(|_| format!("sqlite://{}?mode=rwc", folder.path().join("shop.db").display()));
    let mut options = ConnectOptions::new(url.clone());
    // SeaORM's default is one connection on SQLite.
    options.max_connections(10).sqlx_logging(false);
    options.map_sqlx_sqlite_opts(|it| it.journal_mode(SqliteJournalMode::Wal));
    let db = Database::connect(options).await.context("cannot connect to DATABASE_URL")?;
    match db.get_database_backend() {
        sea_orm::DbBackend::Postgres => run_on::<Postgres>(db).await,
        sea_orm::DbBackend::MySql => run_on::<MySql>(db).await,
        _ => run_on::<Sqlite>(db).await,
    }
}
