//! Two people edit the same item, and neither overwrites the other: whoever saves second hears of it, and tries again.
//!
//! ```text
//! cargo run --example versioned                                                   # on a temporary SQLite file
//! cargo run --example versioned -- sqlite://shop.db?mode=rwc
//! ```
//!
//! Both have the item on their screens. One sells five, the other puts in ten. Written back blindly, the second save
//! would undo the first; here it is a conflict, and the change is made again to what is there now. The table `t_items`
//! is made anew.

use std::env;

use anyhow::{Result, bail, ensure};
use lockkit::{Error, RetryPolicy, Versioned};
use sqlx::{FromRow, SqlitePool};

/// The line that optimistic locking costs is `#[versioned(…)]`. PostgreSQL, MySQL and MariaDB need no other.
#[derive(FromRow, Versioned)]
#[versioned(table = "t_items", key = "item_id", version = "version")]
struct Article {
    item_id: i64,
    name: String,
    stock: i64,
    version: i64,
}

/// Changes the stock of an item, as often as somebody else is faster, up to five times.
async fn change(pool: &SqlitePool, worker: &str, item_id: i64, by: i64) -> Result<Article, Error> {
    let attempt = async |number| {
        let mut item = Article::load(pool, item_id).await?;
        item.stock += by;
        item.save(pool).await?;
        println!("{worker}: saved in attempt {number}: {} of {}, version {}", item.stock, item.name, item.version);
        Ok(item)
    };
    RetryPolicy::new().attempts(5).retry(attempt).await
}

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = match env::args().nth(1) {
        Some(url) => url,
        None => format!("sqlite://{}?mode=rwc", folder.path().join("shop.db").display()),
    };
    let pool = SqlitePool::connect(&url).await?;
    sqlx::raw_sql(
        "DROP TABLE IF EXISTS t_items;
         CREATE TABLE t_items (item_id INTEGER PRIMARY KEY, name TEXT NOT NULL, stock INTEGER NOT NULL, \
                               version INTEGER NOT NULL);
         INSERT INTO t_items VALUES (7, 'lamps', 20, 1)",
    )
    .execute(&pool)
    .await?;

    // Both read version 1.
    let mut on_the_screen_of_ann = Article::load(&pool, 7).await?;
    let mut on_the_screen_of_bob = Article::load(&pool, 7).await?;

    on_the_screen_of_ann.stock -= 5;
    on_the_screen_of_ann.save(&pool).await?;
    println!("ann: sold 5: {} left, version {}", on_the_screen_of_ann.stock, on_the_screen_of_ann.version);

    on_the_screen_of_bob.stock += 10;
    match on_the_screen_of_bob.save(&pool).await {
        Ok(()) => bail!("bob overwrote what ann did"),
        Err(Error::Conflict { expected: Some(expected), found: Some(found), .. }) => {
            println!("bob: conflict: the item has version {found}, not {expected} any more; trying again");
        }
        Err(err) => return Err(err.into()),
    }
    let item = change(&pool, "bob", on_the_screen_of_bob.item_id, 10).await?;
    ensure!((item.stock, item.version) == (25, 3), "an update was lost");

    // Both at once, again and again.
    let worker = |name: &'static str, by| {
        let pool = pool.clone();
        tokio::spawn(async move {
            for _ in 0..100 {
                let attempt = |_| async {
                    let mut item = Article::load(&pool, 7).await?;
                    item.stock += by;
                    item.save(&pool).await?;
                    Ok::<_, Error>(())
                };
                RetryPolicy::new().attempts(1000).retry(attempt).await?;
            }
            println!("{name}: 100 more saves of {by:+}");
            Ok::<_, Error>(())
        })
    };
    let (ann, bob) = (worker("ann", -1), worker("bob", 2));
    ann.await??;
    bob.await??;
    let item = Article::load(&pool, 7).await?;
    println!("at the end: {} of {}, version {}", item.stock, item.name, item.version);
    ensure!((item.stock, item.version) == (125, 203), "an update was lost");
    Ok(())
}
