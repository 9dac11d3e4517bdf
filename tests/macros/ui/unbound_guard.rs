//! A guard that is not bound is dropped at once, and so releases what it stands for.

#![deny(let_underscore_drop, unused_must_use)]

use lockkit::{Error, Leases, SessionLock, dialect::SessionOps};
use sqlx::{Pool, SqlitePool};

async fn leases(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    leases.lease("k").acquire().await?;
    leases.semaphore("k", 3).take(2).acquire().await?;
    leases.lease("k").acquire();
    leases.lease("k");
    let _ = leases.lease("k").acquire().await?;
    Ok(())
}

async fn session<DB: SessionOps>(pool: &Pool<DB>) -> Result<(), Error> {
    SessionLock::new("k").acquire(pool).await?;
    Ok(())
}

fn main() {}
