//! Where a run takes place: a toy Redis and a file of SQLite, or servers that the reader has named.

use std::{
    fmt,
    path::PathBuf,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context, Result, bail, ensure};
use sqlx::{
    Connection, MySql, MySqlConnection, PgConnection, Postgres, mysql::MySqlConnectOptions, postgres::PgConnectOptions,
};
use tempfile::TempDir;

use super::Sql;

/// A kind of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
    MySql,
    MariaDb,
}

impl Kind {
    /// As its makers write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "SQLite",
            Self::Postgres => "PostgreSQL",
            Self::MySql => "MySQL",
            Self::MariaDb => "MariaDB",
        }
    }
}

/// A server that answers.
#[derive(Debug, Clone)]
pub(crate) struct Found<K> {
    pub(crate) kind: K,
    pub(crate) url: String,
    pub(crate) version: String,
}

/// The servers that the reader has named.
#[derive(Debug, Clone, Default)]
pub(crate) struct Servers {
    pub(crate) database: Option<Found<Kind>>,
    pub(crate) redis: Option<Found<()>>,
}

impl Servers {
    /// Asks each server for its version.
    ///
    /// # Errors
    /// One does not answer, or the Redis database is not empty.
    pub(crate) async fn find(database: Option<&str>, redis: Option<&str>) -> Result<Self> {
        let mut found = Self::default();
        if let Some(url) = database {
            found.database = Some(find_database(url).await.with_context(|| format!("connect to {}", shown(url)))?);
        }
        if let Some(url) = redis {
            found.redis = Some(find_redis(url).with_context(|| format!("connect to {}", shown(url)))?);
        }
        Ok(found)
    }

    pub(crate) fn kind(&self) -> Kind {
        self.database.as_ref().map_or(Kind::Sqlite, |it| it.kind)
    }

    /// The name of the database, with the version of a server.
    pub(crate) fn database_name(&self) -> String {
        let name = self.kind().name();
        self.database.as_ref().map_or_else(|| name.to_owned(), |it| format!("{name} {}", it.version))
    }

    pub(crate) fn redis_name(&self) -> String {
        self.redis.as_ref().map_or_else(|| "a toy Redis".to_owned(), |it| format!("Redis {}", it.version))
    }
}

/// Without the user and the password.
fn shown(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, it)| it)
}

async fn find_database(url: &str) -> Result<Found<Kind>> {
    let (kind, version) = match url.split(':').next() {
        Some("postgres" | "postgresql") => {
            let mut conn = PgConnection::connect(url).await?;
            (Kind::Postgres, Postgres::text(&mut conn, "SHOW server_version").await?)
        }
        Some("mysql" | "mariadb") => {
            let mut conn = MySqlConnection::connect(url).await?;
            let version = MySql::text(&mut conn, "SELECT VERSION()").await?;
            (if version.contains("MariaDB") { Kind::MariaDb } else { Kind::MySql }, version)
        }
        _ => bail!("a URL begins with postgres:// or mysql://"),
    };
    Ok(Found { kind, url: url.to_owned(), version: number_of(&version) })
}

fn find_redis(url: &str) -> Result<Found<()>> {
    let mut conn = redis::Client::open(url)?.get_connection()?;
    let keys: u64 = redis::cmd("DBSIZE").query(&mut conn)?;
    ensure!(keys == 0, "the database is not empty, and the museum deletes what is in it: name another one, as in /9");
    let info: String = redis::cmd("INFO").arg("server").query(&mut conn)?;
    let version = info.lines().find_map(|it| it.strip_prefix("redis_version:")).unwrap_or_default();
    Ok(Found { kind: (), url: url.to_owned(), version: version.to_owned() })
}

/// `10.11.14-MariaDB-0+deb12u2` without what follows the number.
fn number_of(version: &str) -> String {
    version.split(['-', ' ']).next().unwrap_or_default().to_owned()
}

/// Where one run takes place. Its databases are its own.
#[derive(Clone)]
pub(crate) struct Place(Arc<Inner>);

struct Inner {
    servers: Servers,
    folder: TempDir,
    /// On the server.
    databases: Mutex<Vec<String>>,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("servers", &self.0.servers).finish_non_exhaustive()
    }
}

impl Place {
    pub(crate) fn new(servers: Servers) -> Result<Self> {
        Ok(Self(Arc::new(Inner { servers, folder: tempfile::tempdir()?, databases: Mutex::default() })))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.0.servers.kind()
    }

    /// The URL of the Redis server, if there is one.
    pub(crate) fn redis(&self) -> Option<&str> {
        self.0.servers.redis.as_ref().map(|it| &*it.url)
    }

    /// A file for SQLite.
    pub(crate) fn file(&self) -> PathBuf {
        self.0.folder.path().join("shop.db")
    }

    /// Makes a database on the server.
    pub(crate) async fn postgres(&self) -> Result<PgConnectOptions> {
        let url = self.url()?;
        let name = self.name();
        Postgres::execute(&mut PgConnection::connect(url).await?, &format!("CREATE DATABASE {name}")).await?;
        Ok(PgConnectOptions::from_str(url)?.database(&name))
    }

    /// As [`postgres`](Self::postgres).
    pub(crate) async fn mysql(&self) -> Result<MySqlConnectOptions> {
        let url = self.url()?;
        let name = self.name();
        MySql::execute(&mut MySqlConnection::connect(url).await?, &format!("CREATE DATABASE {name}")).await?;
        Ok(MySqlConnectOptions::from_str(url)?.database(&name))
    }

    fn url(&self) -> Result<&str> {
        Ok(&self.0.servers.database.as_ref().context("no server was named")?.url)
    }

    fn name(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);

        let name = format!("lockkit_museum_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        self.0.databases.lock().unwrap_or_else(PoisonError::into_inner).push(name.clone());
        name
    }

    /// Deletes what the run has left on the servers. All its connections must be closed.
    pub(crate) async fn clear(self) -> Result<()> {
        let names = std::mem::take(&mut *self.0.databases.lock().unwrap_or_else(PoisonError::into_inner));
        for name in names {
            match self.kind() {
                Kind::Sqlite => {}
                Kind::Postgres => {
                    let drop = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                    Postgres::execute(&mut PgConnection::connect(self.url()?).await?, &drop).await?;
                }
                Kind::MySql | Kind::MariaDb => {
                    let drop = format!("DROP DATABASE IF EXISTS {name}");
                    MySql::execute(&mut MySqlConnection::connect(self.url()?).await?, &drop).await?;
                }
            }
        }
        if let Some(url) = self.redis() {
            redis::cmd("FLUSHDB").exec(&mut redis::Client::open(url)?.get_connection()?)?;
        }
        Ok(())
    }
}
