//! `explain`: who blocks whom now, as a tree: those who hold first, those who wait for them below.
//!
//! - `picture` is what is known, `tree` writes it. The questions are in `sql`.

pub(crate) mod picture;
mod tree;

use anyhow::{Context, Result};
use lockkit::{Error, Key, LeaseStore, Leases};
use sqlx::Pool;

use self::picture::{Picture, queues};
use crate::{
    args::{ExplainArgs, On},
    block_on,
    exit::Exit,
    secret::Secrets,
    sql::Inspect,
    target::{ActOnDatabase, Target},
};

pub(crate) fn explain(on: &On, args: &ExplainArgs, secrets: &mut Secrets) -> Result<Exit> {
    let keys = args.key.iter().map(|it| Key::from(it.as_str())).collect();
    let picture = block_on(Target::of(on, secrets)?.act_on_database(Look { keys }))?;
    for unseen in &picture.unseen {
        eprintln!("lockkit: {unseen}");
    }
    if args.json {
        println!("{}", serde_json::to_string(&picture)?);
    } else if picture.waits.is_empty() && picture.leases.is_empty() {
        eprintln!("lockkit: nobody waits");
    } else {
        println!("{}", tree::tree(&picture));
    }
    Ok(Exit::Success)
}

struct Look {
    keys: Vec<Key>,
}

impl ActOnDatabase for Look {
    type Output = Picture;

    async fn on<DB: Inspect>(self, pool: Pool<DB>) -> Result<Picture>
    where
        Pool<DB>: LeaseStore,
    {
        let mut conn = pool.acquire().await?;
        let (waits, mut unseen) = DB::waits(&mut conn, &self.keys).await.context("cannot look for locks")?;
        let mut ids: Vec<i64> = waits.iter().flat_map(|it| it.holders.iter().copied().chain([it.waiter])).collect();
        ids.sort_unstable();
        ids.dedup();
        let sessions = DB::sessions(&mut conn, &ids).await.context("cannot look for sessions")?;
        drop(conn);
        let leases = match Leases::new(pool).list("").await {
            Ok(leases) => queues(&leases),
            // Row locks need no tables.
            Err(Error::NotMigrated { .. }) => Vec::new(),
            Err(err) => {
                unseen.push(format!("leases are not shown: {err}"));
                Vec::new()
            }
        };
        Ok(Picture { sessions, waits, leases, unseen })
    }
}
