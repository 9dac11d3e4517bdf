#![allow(unused_variables)]

use lockkit::{Error, Leases, testing::MemoryStore, with_lock};
use sqlx::{AnyPool, Database, Pool};

struct Service {
    db: AnyPool,
}

impl Service {
    #[with_lock(row, on = &self.db, table = "t", by(id = id), tx = tx)]
    async fn any_row(&self, id: i64) -> Result<(), Error> {
        sqlx::query("DELETE FROM t").execute(&mut *tx).await.unwrap();
        Ok(())
    }

    #[with_lock(named, on = &self.db, key = "k", attempts = 3, as = n, tx = tx)]
    async fn any_name(&self) -> Result<u32, Error> {
        sqlx::query("DELETE FROM t").execute(&mut *tx).await.unwrap();
        Ok(n)
    }

    #[with_lock(session, on = &self.db, key = "k")]
    async fn any_session(&self) -> Result<(), Error> {
        Ok(())
    }

    #[with_lock(version, on = &self.db, tx = tx)]
    async fn any_version(&self) -> Result<(), Error> {
        Ok(())
    }
}

#[with_lock(row, on = db, table = "t", by(id = id), tx = tx)]
async fn generic_row<DB: Database>(db: &Pool<DB>, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", tx = tx)]
async fn generic_name<DB: Database>(db: &Pool<DB>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(session, on = db, key = "k", as = session)]
async fn generic_session<DB: Database>(db: &Pool<DB>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, on = db, tx = tx)]
async fn generic_version<DB: Database>(db: &Pool<DB>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", tx = tx)]
async fn not_in_a_database(leases: &Leases<MemoryStore>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
