//! `explain`: who blocks whom now, as a tree: those who hold first, those who wait for them below.
//!
//! - `queue` is who waits for leases, `tree` writes it and the sessions of the database.

mod queue;
mod tree;

use anyhow::{Context, Result};
use lockkit::{Error, Key, LeaseStore, Leases};
use lockkit_inspect::{Inspect, Waits, with_causes};
use serde::Serialize;
use sqlx::Pool;

use self::queue::{Queue, queues};
use crate::{
    args::{ExplainArgs, On},
    block_on,
    exit::{Exit, print, tell},
    secret::Secrets,
    target::{ActOnDatabase, Target},
};

/// Who blocks whom.
#[derive(Debug, Default, Serialize)]
struct Picture {
    #[serde(flatten)]
    waits: Waits,
    /// The leases that are waited for.
    leases: Vec<Queue>,
}

pub(crate) fn explain(on: &On, args: &ExplainArgs, secrets: &mut Secrets) -> Result<Exit> {
    let keys = args.key.iter().map(|it| Key::from(it.as_str())).collect();
    let picture = block_on(Target::of(on, secrets)?.act_on_database(Look { keys }))?;
    for unseen in &picture.waits.unseen {
        tell(unseen);
    }
    if args.json {
        print(&serde_json::to_string(&picture)?)?;
    } else if picture.waits.waits.is_empty() && picture.leases.is_empty() {
        tell("nobody waits");
    } else {
        print(&tree::tree(&picture))?;
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
        let mut waits = Waits::of::<DB>(&mut conn, &self.keys).await.context("cannot look for locks")?;
        drop(conn);
        let leases = match Leases::new(pool).list("").await {
            Ok(leases) => queues(&leases),
            // Row locks need no tables.
            Err(Error::NotMigrated { .. }) => Vec::new(),
            Err(err) => {
                waits.unseen.push(format!("leases are not shown: {}", with_causes(&err)));
                Vec::new()
            }
        };
        Ok(Picture { waits, leases })
    }
}
