#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

// What the body does with the names of a wrong attribute is no mistake as well.

#[with_lock(row, on = db, tabel = "t", by(id = id), attempts = 3, as = n, tx = conn)]
async fn transaction(db: &SqlitePool, id: i64) -> Result<u32, sqlx::Error> {
    sqlx::query("DELETE FROM t WHERE id = ?").bind(id).execute(&mut *conn).await?;
    Ok(n)
}

#[with_lock(named, on = db, key = "k")]
async fn no_transaction(db: &SqlitePool) -> Result<i64, Error> {
    let count: i64 = sqlx::query_scalar("SELECT 1").fetch_one(&mut *tx).await.unwrap();
    Ok(count)
}

#[with_lock(lease, on = leases, ttl = "30s", as = lease)]
async fn under_a_lease(leases: &Leases<SqlitePool>) -> Result<i64, Error> {
    Ok(lease.fence().get())
}

#[with_lock(row, on = db, table = "t", by(state = "ready"), skip_locked = true, rows = jobs: Vec<(i64,)>, tx = tx)]
async fn queue(db: &SqlitePool) -> Result<usize, Error> {
    for (id,) in &jobs {
        sqlx::query("DELETE FROM t WHERE id = ?").bind(id).execute(&mut *tx).await.unwrap();
    }
    Ok(jobs.len())
}

#[with_lock(row, on = db, table = "t", by(state = "ready"), rows = jobs, tx = tx)]
async fn rows_without_type(db: &SqlitePool) -> Result<usize, Error> {
    sqlx::query("DELETE FROM t").execute(&mut *tx).await.unwrap();
    Ok(jobs.len())
}

#[with_lock(row, on = db, table = "t", by(state = "ready"), txn = conn)]
async fn misspelt_transaction(db: &SqlitePool) -> Result<(), Error> {
    sqlx::query("DELETE FROM t").execute(&mut *conn).await.unwrap();
    Ok(())
}

#[with_lock(named, on = db, key = "k", attempts = 3, as n, tx = tx)]
async fn attempt_without_equals(db: &SqlitePool) -> Result<u32, Error> {
    sqlx::query("DELETE FROM t").execute(&mut *tx).await.unwrap();
    Ok(n)
}

#[with_lock(named, on = db, key = "k", tx = &mut conn)]
async fn transaction_by_reference(db: &SqlitePool) -> Result<(), Error> {
    sqlx::query("DELETE FROM t").execute(&mut *conn).await.unwrap();
    Ok(())
}

struct Service {
    db: SqlitePool,
}

impl Service {
    #[with_lock(lease, on = leases, key = "k", atempts = 3)]
    #[with_lock(named, on = &self.db, key = "k", tx = &mut conn)]
    async fn stacked(&self, leases: &Leases<SqlitePool>) -> Result<(), Error> {
        sqlx::query("DELETE FROM t").execute(&mut *conn).await.unwrap();
        Ok(())
    }
}

fn main() {}
