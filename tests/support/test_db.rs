//! One test's database.

use std::io::{Write, stderr};
use std::marker::PhantomData;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use sqlx::pool::PoolOptions;
use sqlx::{Connection, Database, Pool};
use tokio::runtime;
use url::Url;

use crate::{Backend, Server};

/// A database of a test's own, with `lockkit`'s tables in it, deleted when this is dropped.
#[derive(Debug)]
pub struct TestDb<S: Backend> {
    pub pool: Pool<S::DB>,
    pub url: String,
    server: PhantomData<S>,
}

impl<S: Backend> TestDb<S> {
    /// A fresh database, with a pool of the usual size.
    pub async fn new() -> Self {
        Self::with_connections(S::CONNECTIONS).await
    }

    /// A fresh database, with a pool of at most this many connections.
    pub async fn with_connections(connections: u32) -> Self {
        let db = Self::empty(connections).await;
        lockkit::migrate(&db.pool).await.expect("make lockkit's tables");
        db
    }

    /// A fresh database without `lockkit`'s tables, with a pool of at most this many connections.
    pub async fn empty(connections: u32) -> Self {
        let url = S::create_database().await;
        let pool = pool::<S>(&url, connections).await;
        Self { pool, url, server: PhantomData }
    }

    /// [`TestDb::new`], or `None` and a loud line if the environment says that this server is to be left out.
    pub async fn unless_left_out() -> Option<Self> {
        static SAY: Once = Once::new();

        let Some(reason) = S::left_out() else {
            return Some(Self::new().await);
        };
        SAY.call_once(|| {
            // Not `eprintln!`, whose output the test runner hides when the test passes.
            writeln!(stderr(), "!!! {} IS NOT TESTED: {reason}", S::NAME).expect("write to stderr");
        });
        None
    }

    /// The name of the database on its server.
    ///
    /// # Panics
    /// If it is a file.
    pub fn name(&self) -> String {
        let url = Url::parse(&self.url).expect("a database of a server");
        url.path().trim_start_matches('/').to_owned()
    }

    /// Another pool on the same database, as another process would have.
    pub async fn pool_of(&self, connections: u32) -> Pool<S::DB> {
        pool::<S>(&self.url, connections).await
    }

    /// A connection that belongs to no pool.
    pub async fn connect(&self) -> <S::DB as Database>::Connection {
        <S::DB as Database>::Connection::connect(&self.url)
            .await
            .unwrap_or_else(|err| panic!("connect to {}: {err}", self.url))
    }

    /// Runs the statements and returns the number of rows they changed.
    pub async fn execute(&self, sql: &str) -> u64 {
        let mut conn = self.pool.acquire().await.expect("acquire a connection");
        S::execute(&mut conn, sql).await.unwrap_or_else(|err| panic!("{sql}: {err}"))
    }

    /// The first column of the first row as a number; `None` if it is NULL or there is no row.
    pub async fn fetch_i64(&self, sql: &str) -> Option<i64> {
        let mut conn = self.pool.acquire().await.expect("acquire a connection");
        S::fetch_i64(&mut conn, sql).await.unwrap_or_else(|err| panic!("{sql}: {err}"))
    }

    /// The first column of the first row; `None` if it is NULL or there is no row.
    pub async fn fetch_text(&self, sql: &str) -> Option<String> {
        let mut conn = self.pool.acquire().await.expect("acquire a connection");
        S::fetch_text(&mut conn, sql).await.unwrap_or_else(|err| panic!("{sql}: {err}"))
    }

    /// What sessions still do or hold in this database, one line each.
    pub async fn leftovers(&self) -> Vec<String> {
        let mut conn = self.connect().await;
        S::leftovers(&mut conn).await.expect("ask what is left")
    }

    /// Waits until nothing is left.
    ///
    /// # Panics
    /// If something is left after 5 s, with the list.
    pub async fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let leftovers = self.leftovers().await;
            if leftovers.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left on {} after 5 s:\n{}", S::NAME, leftovers.join("\n"));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl<S: Backend> Drop for TestDb<S> {
    fn drop(&mut self) {
        let url = self.url.clone();
        // Another thread, because this one is within a runtime, where blocking on a future panics.
        let dropping = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(S::drop_database(&url))
        });
        if let Err(err) = dropping.join().expect("drop a database") {
            eprintln!("{} was not deleted: {err}", self.url);
        }
    }
}

async fn pool<S: Server>(url: &str, connections: u32) -> Pool<S::DB> {
    let options = PoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(10));
    options.connect(url).await.unwrap_or_else(|err| panic!("connect to {url}: {err}"))
}
