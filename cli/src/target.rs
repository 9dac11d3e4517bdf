//! The database or the store that the user has named, and what a command does on any of them.

use std::{env, future::Future, time::Duration};

use anyhow::{Context, Error, Result, anyhow};
use lockkit::{Lease, LeaseStore, dialect::Dialect};
use lockkit_etcd::EtcdStore;
use lockkit_inspect::Inspect;
use lockkit_redis::{RedisStore, redis::Client};
use lockkit_zookeeper::ZooKeeperStore;
use sqlx::{ConnectOptions, Connection, MySql, Pool, Postgres, Sqlite, pool::PoolOptions};
use tokio::time::timeout;

use crate::{args::On, dotenv, secret::Secrets};

/// A value on the command line that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadUrl(pub(crate) String);

/// What does not answer.
#[derive(Debug, thiserror::Error)]
#[error("{0} cannot be reached")]
pub(crate) struct Unreachable(String);

/// A server that grants no lease yet.
#[derive(Debug, thiserror::Error)]
#[error("this Redis server is new or was restarted, and may have forgotten leases: it grants none for {0} s more")]
pub(crate) struct Quarantined(u64);

/// How long a connection is tried for. A server that starts refuses for a moment.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection may take that is made to learn why there was none.
const LAST_TRY: Duration = Duration::from_secs(1);

/// A kind of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Database {
    Postgres,
    MySql,
    Sqlite,
}

impl Database {
    fn of(url: &str) -> Option<Self> {
        match url.split_once(':')?.0 {
            "postgres" | "postgresql" => Some(Self::Postgres),
            "mysql" | "mariadb" => Some(Self::MySql),
            "sqlite" => Some(Self::Sqlite),
            _ => None,
        }
    }

    /// The statement that fails in this database if the fence of the lease is out of date.
    pub(crate) fn guard<S: LeaseStore>(self, lease: &Lease<S>) -> lockkit::Result<String> {
        match self {
            Self::Postgres => lease.guard_sql::<Postgres>(),
            Self::MySql => lease.guard_sql::<MySql>(),
            Self::Sqlite => lease.guard_sql::<Sqlite>(),
        }
    }
}

/// Where leases are, and the database that `LOCKKIT_GUARD` is for.
#[derive(Debug)]
pub(crate) struct Target {
    url: String,
    pub(crate) database: Option<Database>,
    /// For how long a lease may stay taken when this machine dies, if the command takes one.
    pub(crate) ttl: Option<Duration>,
}

/// What a command does, on any store.
pub(crate) trait Act {
    type Output;

    fn on<S: LeaseStore>(self, store: S) -> impl Future<Output = Result<Self::Output>>;
}

/// What a command does, on any database.
pub(crate) trait ActOnDatabase {
    type Output;

    fn on<DB: Inspect>(self, pool: Pool<DB>) -> impl Future<Output = Result<Self::Output>>
    where
        Pool<DB>: LeaseStore;
}

impl Target {
    /// What the user has named: by options, by the environment, or by `.env`.
    pub(crate) fn of(on: &On, secrets: &mut Secrets) -> Result<Self> {
        let dotenv = if on.no_dotenv { Ok(()) } else { dotenv::load() };
        let url = on.url.clone().or_else(|| env::var("DATABASE_URL").ok()).filter(|it| !it.is_empty());
        for url in url.iter().chain(&on.store) {
            secrets.add(url);
        }
        let database = url.as_deref().map(|it| {
            Database::of(it).ok_or_else(|| {
                BadUrl(format!(
                    "`{}` is no database: it starts with postgres://, mysql://, mariadb:// or sqlite://",
                    scheme(it)
                ))
            })
        });
        let database = database.transpose()?;
        let missing = || match dotenv {
            Ok(()) => BadUrl("no database is named: give --url, or set DATABASE_URL".to_owned()),
            // The line that is wrong may have named one, or one below it.
            Err(problem) => BadUrl(format!("no database is named, and {problem}")),
        };
        Ok(Self { url: on.store.clone().or(url).ok_or_else(missing)?, database, ttl: None })
    }

    /// The kind of the database that has the tables.
    pub(crate) fn kind(&self) -> Result<Database> {
        let none = || BadUrl(format!("`{}` has no tables: name a database by --url", scheme(&self.url)));
        Ok(Database::of(&self.url).ok_or_else(none)?)
    }

    /// The command, on a database. Refused on any other store.
    pub(crate) async fn act_on_database<A: ActOnDatabase>(&self, act: A) -> Result<A::Output> {
        match self.kind()? {
            Database::Postgres => act.on::<Postgres>(self.pool().await?).await,
            Database::MySql => act.on::<MySql>(self.pool().await?).await,
            Database::Sqlite => act.on::<Sqlite>(self.pool().await?).await,
        }
    }

    /// The command, on this store.
    pub(crate) async fn act<A: Act>(&self, act: A) -> Result<A::Output> {
        match Database::of(&self.url) {
            Some(Database::Postgres) => return act.on(self.pool::<Postgres>().await?).await,
            Some(Database::MySql) => return act.on(self.pool::<MySql>().await?).await,
            Some(Database::Sqlite) => return act.on(self.pool::<Sqlite>().await?).await,
            None => {}
        }
        let (scheme, rest) = self.url.split_once("://").unwrap_or((&self.url, ""));
        match scheme {
            "redis" | "rediss" => {
                // Another part of the program may have chosen one; then that one serves.
                _ = rustls::crypto::ring::default_provider().install_default();
                let store = RedisStore::connect(self.redis()?).await.context(Unreachable("Redis".to_owned()))?;
                let acted = act.on(store.clone()).await;
                match acted {
                    Err(err) if err.downcast_ref::<lockkit::Error>().is_some_and(lockkit::Error::is_contended) => {
                        let left = store.quarantined_for().await?;
                        Err(if left.is_zero() { err } else { Quarantined(left.as_secs() + 1).into() })
                    }
                    acted => acted,
                }
            }
            "zookeeper" => {
                let (hosts, root) = rest.split_once('/').unwrap_or((rest, "locks"));
                let mut store = ZooKeeperStore::builder(hosts).root(format!("/{root}"));
                if let Some(ttl) = self.ttl {
                    // The servers keep a lease for so long, whatever its ttl.
                    store = store.session_timeout(ttl);
                }
                act.on(store.connect().await.context(Unreachable("ZooKeeper".to_owned()))?).await
            }
            "etcd" => {
                let store = EtcdStore::connect(rest.split(',')).await;
                act.on(store.context(Unreachable("etcd".to_owned()))?).await
            }
            _ => Err(BadUrl(format!(
                "`{scheme}` is no store: it starts with redis://, rediss://, zookeeper:// or etcd://"
            ))
            .into()),
        }
    }

    async fn pool<DB: Dialect>(&self) -> Result<Pool<DB>> {
        let options = self.options::<DB>()?;
        // A lease keeps a connection for a moment; a second one renews meanwhile.
        let pool = PoolOptions::new().max_connections(2).acquire_timeout(PATIENCE);
        let connected = pool.connect_with(options.clone()).await;
        let Err(sqlx::Error::PoolTimedOut) = connected else { return connected.map_err(no_connection) };
        // The pool has tried again and again, and does not say what went wrong.
        match timeout(LAST_TRY, options.connect()).await {
            Ok(Err(err)) => Err(no_connection(err)),
            _ => Err(anyhow!("no connection was made within {PATIENCE:?}").context(database_unreachable())),
        }
    }

    /// What the URL of a database says.
    pub(crate) fn options<DB: Dialect>(&self) -> Result<<DB::Connection as Connection>::Options> {
        let url = match self.url.strip_prefix("mariadb:") {
            Some(rest) => format!("mysql:{rest}"),
            None => self.url.clone(),
        };
        url.parse().map_err(no_connection)
    }

    /// What the URL of Redis says.
    pub(crate) fn redis(&self) -> Result<Client> {
        let client = Client::open(self.url.as_str());
        client.map_err(|err| BadUrl(format!("the URL of Redis is not understood: {err}")).into())
    }
}

fn no_connection(err: sqlx::Error) -> Error {
    match err {
        sqlx::Error::Configuration(why) => BadUrl(format!("the URL is not understood: {why}")).into(),
        err => Error::new(err).context(database_unreachable()),
    }
}

fn database_unreachable() -> Unreachable {
    Unreachable("the database".to_owned())
}

fn scheme(url: &str) -> &str {
    url.split_once(':').map_or(url, |it| it.0)
}
