//! `migrate`: lockkit's tables.

use std::path::PathBuf;

use anyhow::{Context, Result};
use lockkit::{LeaseStore, dialect::write_migrations};
use lockkit_inspect::Inspect;
use sqlx::{MySql, Pool, Postgres, Sqlite};

use crate::{
    args::{MigrateArgs, On},
    block_on,
    exit::{Exit, print, tell},
    secret::Secrets,
    target::{ActOnDatabase, Database, Target},
};

pub(crate) fn migrate(on: &On, args: &MigrateArgs, secrets: &mut Secrets) -> Result<Exit> {
    let target = Target::of(on, secrets)?;
    if let Some(folder) = &args.print {
        return write(&target, folder);
    }
    block_on(target.act_on_database(Migrate))?;
    tell("the tables are there");
    Ok(Exit::Success)
}

struct Migrate;

impl ActOnDatabase for Migrate {
    type Output = ();

    async fn on<DB: Inspect>(self, pool: Pool<DB>) -> Result<()>
    where
        Pool<DB>: LeaseStore,
    {
        Ok(lockkit::migrate(&pool).await?)
    }
}

/// Writes the files, without a connection.
fn write(target: &Target, folder: &PathBuf) -> Result<Exit> {
    match target.kind()? {
        Database::Postgres => write_migrations::<Postgres>(folder),
        Database::MySql => write_migrations::<MySql>(folder),
        Database::Sqlite => write_migrations::<Sqlite>(folder),
    }
    .with_context(|| format!("cannot write the migrations to {}", folder.display()))?;
    print(&folder.display().to_string())?;
    Ok(Exit::Success)
}
