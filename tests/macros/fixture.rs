//! A database of its own for every test, and an error type as applications have them.

use lockkit::{Error, Leases};
use sqlx::{
    Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// What services under test have: a pool and leases in it.
pub(crate) struct Shop {
    pub(crate) db: SqlitePool,
    pub(crate) leases: Leases<SqlitePool>,
    _dir: TempDir,
}

pub(crate) type Tx = lockkit::Tx<Sqlite>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ShopError {
    #[error(transparent)]
    Lock(#[from] Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error("refused")]
    Refused,
}

impl Shop {
    /// With one item, number 7, of which there are 10.
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("shop.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off);
        let db = SqlitePoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
        lockkit::migrate(&db).await.unwrap();
        sqlx::query(
            "CREATE TABLE t_items (item_id INTEGER PRIMARY KEY, stock INTEGER NOT NULL, version INTEGER NOT NULL)",
        )
        .execute(&db)
        .await
        .unwrap();
        sqlx::query("INSERT INTO t_items VALUES (7, 10, 1)").execute(&db).await.unwrap();
        Self { leases: Leases::new(db.clone()), db, _dir: dir }
    }

    pub(crate) async fn stock(&self) -> i64 {
        sqlx::query_scalar("SELECT stock FROM t_items WHERE item_id = 7").fetch_one(&self.db).await.unwrap()
    }

    /// Whether somebody holds the lease.
    pub(crate) async fn is_held(&self, key: &str) -> bool {
        is_held(&self.leases, key).await
    }

    /// Returns when nobody holds the lease.
    pub(crate) async fn is_free(&self, key: &str) {
        drop(self.leases.lease(key).acquire().await.unwrap());
    }
}

pub(crate) async fn is_held(leases: &Leases<SqlitePool>, key: &str) -> bool {
    leases.lease(key).try_acquire().await.unwrap().is_none()
}

/// Sells one of item 7, without a look at how many there are.
pub(crate) async fn sell(tx: &mut Tx) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE t_items SET stock = stock - 1 WHERE item_id = 7").execute(&mut **tx).await?;
    Ok(())
}

/// Says that the body has come here, and stays there for ever.
pub(crate) async fn hang(reached: oneshot::Sender<()>) {
    reached.send(()).unwrap();
    std::future::pending::<()>().await;
}

pub(crate) fn assert_send<T: Send>(value: T) -> T {
    value
}
