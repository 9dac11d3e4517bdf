//! Functions under `#[with_lock]`, dropped at every await.

use lockkit::{Error, Leases, with_lock};
use sqlx::Pool;
use support::{Server, TestDb, on_every_database};
use tokio::task::yield_now;

use super::Bench;

on_every_database! {
    async fn functions_under_the_attribute_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        type Db = Pool<<S as Server>::DB>;
        type Connection = <<S as Server>::DB as sqlx::Database>::Connection;

        async fn write(conn: &mut Connection) -> Result<(), Error> {
            S::execute(conn, "INSERT INTO t VALUES (1)").await.expect("insert");
            yield_now().await;
            S::execute(conn, "INSERT INTO t VALUES (2)").await.expect("insert");
            Ok(())
        }
        #[with_lock(named, on = pool, key = "k", tx = tx)]
        async fn named(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(row, on = pool, table = "item", by(id = 1_i64), tx = tx)]
        async fn row(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(version, on = pool, attempts = 2, tx = tx)]
        async fn version(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(lease, on = leases, key = "k", tx = tx)]
        async fn lease(leases: &Leases<Db>) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(lease, on = leases, keys = ["k", "l"], tx = tx)]
        async fn leases_of_two(leases: &Leases<Db>) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(idempotent, on = pool, key = "k:{request}", request = &request, tx = tx)]
        async fn idempotent(pool: &Db, request: u32) -> Result<(), Error> {
            write(&mut tx).await
        }

        let bench = Bench::<S>::new(db).await;
        let Bench { pool, leases, .. } = &bench;
        let mut requests = 0..;
        let idempotent = async || (idempotent(pool, requests.next().expect("without an end")), ());
        let all_or_none = async |(), completed| bench.all_or_none(completed).await;
        bench.drop_everywhere("a function with a named lock", async || (named(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function with a row lock", async || (row(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function with a version", async || (version(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function whose answer is stored", idempotent, all_or_none).await;
        bench.drop_everywhere("a function with a lease", async || (lease(leases), ()), all_or_none).await;
        bench.drop_everywhere("a function with two leases", async || (leases_of_two(leases), ()), all_or_none).await;
    }
}
