use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

struct S(Pool);

#[with_lock(lease, on = &self.0, key = "k")]
impl S {
    async fn f(&self) -> Result<(), Error> {
        let _ = &self.0;
        Ok(())
    }
}

fn main() {}
