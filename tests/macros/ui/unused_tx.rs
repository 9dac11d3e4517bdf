#![deny(unused_must_use)]

async fn f(db: &sqlx::SqlitePool) -> Result<(), lockkit::Error> {
    lockkit::begin(db).await?;
    Ok(())
}

fn main() {}
