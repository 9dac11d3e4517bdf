use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn lent(db: &SqlitePool) -> Outcome {
    sqlx::query("UPDATE t SET n = 1").execute(&mut tx).await?;
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn shared(db: &SqlitePool) -> Outcome {
    let n: i64 = sqlx::query_scalar("SELECT n FROM t").bind(1).fetch_one(&tx).await?;
    drop(n);
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn given(db: &SqlitePool) -> Outcome {
    let query = sqlx::query("UPDATE t SET n = 1");
    query.execute(tx).await?;
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn built(db: &SqlitePool) -> Outcome {
    let mut query = sqlx::QueryBuilder::<sqlx::Sqlite>::new("UPDATE t SET n = ");
    query.push_bind(1).build().execute(&mut tx).await?;
    Ok(())
}

struct Statement;

impl Statement {
    async fn execute(self, _tx: &mut lockkit::Tx<sqlx::Sqlite>) -> Result<(), Error> {
        Ok(())
    }
}

// A method of that name that takes the transaction itself.
#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn of_another_type(db: &SqlitePool) -> Outcome {
    Statement.execute(&mut tx).await?;
    Ok(())
}

fn main() {}
