//! Applies lockkit's migrations at run time.
//!
//! It reads the history and looks for the newest column of each table:
//!
//! | history | tables | action |
//! |---|---|---|
//! | complete | complete | none; needs no privilege to create |
//! | unreadable | complete | none |
//! | complete | a table or column is missing | delete the rows of the history and run all migrations again; each can be repeated |
//! | marked as cut short | any | remove the mark and run that migration again |

use std::{fs, io, path::Path, time::Duration};

use sqlx::{Pool, migrate::MigrateError};

use crate::{
    body::task::finished,
    lease::{leases::Leases, store::LeaseStore},
    policy::{Backoff, RetryPolicy},
    sql::{Dialect, fault_in_chain},
    value::error::{Error, Fault, Result},
};

/// Creates lockkit's tables, or updates them to the current version.
///
/// Does nothing when they are up to date; a table that was dropped is created again. Any number of processes may call
/// this at once. The history is kept in `_lockkit_migrations`, separate from the application's own migrations. The
/// command `sqlx migrate run` with the files of [`write_migrations`](crate::dialect::write_migrations) writes the same
/// history, so both ways can be mixed.
///
/// On PostgreSQL the tables and their history are in the first schema of the connection's `search_path`
/// (`current_schema()`), whatever the other schemas contain. Services share leases if they have the same first schema.
/// On MySQL and MariaDB this opens one extra connection with the pool's options.
///
/// Altering a table waits for transactions that have used the table. On servers it waits for up to a second at a time
/// and about a minute in all; in between, the lease operations of other processes continue.
///
/// # Errors
/// [`Error::Migration`](crate::Error::Migration), for instance when tables are missing and the user may not create
/// them, or when a transaction that uses a table does not end.
///
/// # Cancel safety
/// Once started, the migration continues in its own task even if this future is dropped. It can be run again at any
/// time.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// lockkit::migrate(&pool).await?;
/// # Ok(()) }
/// ```
pub async fn migrate<DB: Dialect>(pool: &Pool<DB>) -> Result<()> {
    // Concurrent migrations can collide when they write the same history: MariaDB does not support the infinite
    // GET_LOCK that sqlx serialises migrations with, and SQLite has no such lock. The loser retries and finds the work
    // done. A wait for a transaction of the application is retried too.
    let policy = RetryPolicy::new()
        .attempts(50)
        .backoff(Backoff { base: Duration::from_millis(20), cap: Duration::from_millis(200) });
    let collided = |err: &Error| {
        if let Error::Migration { source, .. } = err
            && let Some(MigrateError::Dirty(_)) = source.downcast_ref()
        {
            return true;
        }
        let fault = fault_in_chain(err);
        matches!(fault, Some(Fault::Duplicate | Fault::Contended | Fault::Deadlock | Fault::Serialization))
    };
    let pool = pool.clone();
    // Runs in its own task: if a migration were dropped half-way, its connection would keep sqlx's migration lock.
    let running = tokio::spawn(async move { policy.retry_if(collided, |_| async { DB::migrate(&pool).await }).await });
    finished("migrating", running).await
}

/// The configuration of the sqlx command: lockkit's history in a table of its own.
const SQLX_TOML: &str = include_str!("../../migrations/sqlx.toml");

/// Writes lockkit's migrations for this database into a folder of your project, for the `sqlx` command or for your own
/// migrations: files such as `0001_lockkit.sql`, and `sqlx.toml`, which names the table of their history.
///
/// Creates the folder. Call it in a test: files that are there already are left alone, and a later version of lockkit
/// adds files and changes none.
///
/// `sqlx migrate run --source lockkit-migrations --config lockkit-migrations/sqlx.toml` then does the same as
/// [`migrate`](crate::migrate()). The command needs sqlx-cli with the feature `sqlx-toml`.
///
/// # Errors
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if a file of such a name has another content, which is not changed;
/// those of the file system.
///
/// # Example
/// ```
/// # let folder = std::env::temp_dir().join(format!("lockkit-migrations-{}", std::process::id()));
/// lockkit::dialect::write_migrations::<sqlx::Sqlite>(&folder)?; // "lockkit-migrations", say
/// assert!(folder.join("0001_lockkit.sql").exists() && folder.join("sqlx.toml").exists());
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, std::io::Error>(())
/// ```
pub fn write_migrations<DB: Dialect>(folder: impl AsRef<Path>) -> io::Result<()> {
    let folder = folder.as_ref();
    fs::create_dir_all(folder)?;
    let name = |number, name: &str| format!("{number:04}_{}.sql", name.replace(' ', "_"));
    let migrations = DB::MIGRATIONS.iter().map(|(number, text, sql)| (name(number, text), *sql));
    for (name, text) in migrations.chain([("sqlx.toml".to_owned(), SQLX_TOML)]) {
        let file = folder.join(name);
        match fs::read_to_string(&file) {
            Ok(there) if there == text => {}
            Ok(_) => {
                let reason = format!("{} is there already, with another content", file.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
            }
            Err(err) if err.kind() == io::ErrorKind::NotFound => fs::write(&file, text)?,
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

impl<DB: Dialect> Leases<Pool<DB>>
where
    Pool<DB>: LeaseStore,
{
    /// Creates lockkit's tables, or updates them to the current version. See [`migrate`](crate::migrate()).
    ///
    /// # Errors
    /// [`Error::Migration`].
    ///
    /// # Cancel safety
    /// As [`migrate`](crate::migrate()).
    pub async fn migrate(&self) -> Result<()> {
        migrate(self.store()).await
    }
}
