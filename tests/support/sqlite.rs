//! `SQLite`: a database is a file in a folder of its own.

use std::fs;
use std::sync::LazyLock;

use lockkit_store_servers::Folder;
use sqlx::{Connection, Result, SqliteConnection};
use url::Url;

use crate::Server;

/// Where this process has its databases. A commit waits for the disk, which a build beside the tests keeps busy for
/// seconds; the servers of the other databases do not wait for it either.
static DATABASES: LazyLock<Folder> = LazyLock::new(Folder::new);

/// Databases in files, in WAL mode and with a busy timeout of 5 s.
#[derive(Clone, Copy, Debug)]
pub struct Sqlite;

impl Server for Sqlite {
    type DB = sqlx::Sqlite;

    const NAME: &'static str = "SQLite";
    const CONNECTIONS: u32 = 8;
    const VERSION: &'static str = "SELECT sqlite_version()";

    async fn create_database() -> String {
        let folder = tempfile::tempdir_in(DATABASES.path()).expect("make a folder for SQLite").keep();
        let url = format!("sqlite://{}?mode=rwc", folder.join("test.db").display());
        let mut conn = SqliteConnection::connect(&url).await.expect("make a SQLite database");
        // The file remembers the journal mode; a busy timeout of 5 s is sqlx's default.
        Self::execute(&mut conn, "PRAGMA journal_mode = WAL").await.expect("set the journal mode");
        conn.close().await.expect("close a SQLite database");
        url
    }

    async fn drop_database(url: &str) -> Result<()> {
        let url = Url::parse(url).expect("a URL made by create_database");
        let folder = std::path::Path::new(url.path()).parent().expect("a file in a folder");
        Ok(fs::remove_dir_all(folder)?)
    }

    async fn leftovers(conn: &mut SqliteConnection) -> Result<Vec<String>> {
        Self::execute(conn, "PRAGMA busy_timeout = 0").await?;
        match Self::execute(conn, "BEGIN IMMEDIATE").await {
            Ok(_) => Self::execute(conn, "ROLLBACK").await.map(|_| Vec::new()),
            Err(err) => Ok(vec![format!("somebody holds the write lock: {err}")]),
        }
    }
}
