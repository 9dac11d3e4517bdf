use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

trait T {
    #[with_lock(lease, on = self.leases(), key = "k")]
    async fn f(&self) -> Result<(), Error>;

    fn leases(&self) -> &Pool;
}

fn main() {}
