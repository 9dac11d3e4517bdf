//! A server as the tests see it: a throwaway one, or the one that an environment variable has the URL of.

use std::env;
use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use sqlx::pool::PoolOptions;
use sqlx::{Pool, Result};
use url::Url;

use crate::PlainSql;
use crate::throwaway::rendezvous;

/// One server for the whole test process.
#[derive(Debug)]
pub(crate) struct SharedServer {
    name: &'static str,
    variable: &'static str,
    /// The administrator's URL, or why there is none, so that a server which does not start is tried once.
    found: OnceLock<std::result::Result<Found, String>>,
}

#[derive(Debug)]
struct Found {
    url: Url,
    /// Keeps a throwaway server running until this process ends.
    _users: Option<File>,
}

impl SharedServer {
    /// A throwaway server, unless the environment variable is set.
    pub(crate) const fn new(name: &'static str, variable: &'static str) -> Self {
        Self { name, variable, found: OnceLock::new() }
    }

    /// Makes an empty database and returns its URL.
    pub(crate) async fn create_database<DB: PlainSql>(&self) -> String {
        let (mut url, name) = (self.url().clone(), unique_name());
        self.administer::<DB>(&format!("CREATE DATABASE {name}"))
            .await
            .unwrap_or_else(|err| panic!("make a database on {url}: {err}"));
        url.set_path(&name);
        url.into()
    }

    /// Drops a database of [`SharedServer::create_database`], with the SQL that this makes from its name.
    pub(crate) async fn drop_database<DB: PlainSql>(&self, url: &str, sql: fn(&str) -> String) -> Result<()> {
        let url = Url::parse(url).expect("a URL of create_database");
        self.administer::<DB>(&sql(url.path().trim_start_matches('/'))).await
    }

    async fn administer<DB: PlainSql>(&self, sql: &str) -> Result<()> {
        // A pool, because it keeps trying while a server that listens is not ready yet.
        let options = PoolOptions::new().max_connections(1).acquire_timeout(Duration::from_secs(5));
        let pool: Pool<DB> = options.connect(self.url().as_str()).await?;
        DB::execute(&mut *pool.acquire().await?, sql).await?;
        pool.close().await;
        Ok(())
    }

    /// The administrator's URL.
    pub(crate) fn url(&self) -> &Url {
        let found = self.found.get_or_init(|| match env::var(self.variable) {
            Ok(url) => found(&url, None),
            Err(_) => match rendezvous::meet(self.name) {
                Ok((url, users)) => found(&url, Some(users)),
                Err(err) => Err(err.to_string()),
            },
        });
        match found {
            Ok(found) => &found.url,
            Err(err) => panic!("no {} to test on: {err}", self.name),
        }
    }
}

fn found(url: &str, users: Option<File>) -> std::result::Result<Found, String> {
    let mut url = Url::parse(url).map_err(|err| format!("{url}: {err}"))?;
    if url.scheme().starts_with("postgres") && url.path().trim_start_matches('/').is_empty() {
        url.set_path("postgres"); // Without it, the database would be the one that is named like the user.
    }
    Ok(Found { url, _users: users })
}

/// A name that no other test uses, in this process or another, now or earlier.
fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);

    let now = SystemTime::UNIX_EPOCH.elapsed().expect("a clock past 1970").as_micros();
    format!("lockkit_{now:x}_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}
