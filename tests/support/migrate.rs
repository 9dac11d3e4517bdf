//! The program that makes `lockkit`'s tables as a service does when it starts: connects, says so, and migrates when it
//! is told to, so that several can be made to do it at once.

use std::env;
use std::error::Error;
use std::io::{Write, stdin, stdout};

use lockkit::dialect::Dialect;
use sqlx::pool::PoolOptions;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::args().nth(1).ok_or("usage: test-migrate URL; the tests start it themselves")?;
    match url.split(':').next() {
        Some("sqlite") => migrate::<sqlx::Sqlite>(&url).await,
        Some("postgres") => migrate::<sqlx::Postgres>(&url).await,
        Some("mysql") => migrate::<sqlx::MySql>(&url).await,
        _ => Err(format!("{url} is the URL of no database").into()),
    }
}

async fn migrate<DB: Dialect>(url: &str) -> Result<(), Box<dyn Error>> {
    let pool = PoolOptions::<DB>::new().max_connections(2).connect(url).await?;
    println!("connected");
    stdout().flush()?;
    stdin().read_line(&mut String::new())?;
    Ok(lockkit::migrate(&pool).await?)
}
