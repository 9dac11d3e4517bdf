//! Named locks for a transaction: for what has no row to lock yet.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    dialect::{AsConnection, NamedOps, depth, failed_on_own_table},
    error::{Error, Fault, Result},
    key::Key,
    observe::Strategy,
    policy::Wait,
    section::until,
    wait::observed,
};

/// How much longer than the bound a server may take. MySQL ends waits once a second.
const BACKSTOP: Duration = Duration::from_secs(2);

/// Locks a name for the rest of a transaction.
///
/// Use it where there is no row to lock yet, as in "one order per user": lock the user's name, look, insert, commit. For
/// rows that exist use [`RowLock`](crate::RowLock); for work that outlives a transaction a [lease](crate::Leases).
///
/// | database | what is locked |
/// |---|---|
/// | PostgreSQL | an advisory lock on 64 bits of SHA-256 of the key. Two different names among a million share one with a chance of 3 in 10^8, and then only wait for each other. Needs no table |
/// | MySQL, MariaDB | a row of `lockkit_named` with the whole name. It is kept, so the table grows with the number of different names |
/// | SQLite | the write lock of the database: all names are one lock |
///
/// One round trip; two for a wait of less than a second on MySQL or MariaDB when the name is new. MySQL and MariaDB count longer
/// waits in whole seconds. When two transactions use a new name for the first time in the same instant and wait for less than a
/// second, the loser on MySQL is refused up to two seconds late, and its connection is closed.
///
/// Lock first, then read, in a transaction from [`begin`](crate::begin): it is READ COMMITTED, so that reads after the
/// lock see what the last holder committed. In a REPEATABLE READ transaction that has read already they would not.
///
/// # Example
/// ```
/// use lockkit::NamedLock;
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// # sqlx::query("CREATE TABLE orders (user_id INTEGER)").execute(&pool).await?;
/// let user_id = 42;
/// let mut tx = lockkit::begin(&pool).await?;
/// NamedLock::new(format!("order:{user_id}")).wait(Duration::from_secs(2)).lock(&mut *tx).await?;
/// let ordered: i64 =
///     sqlx::query_scalar("SELECT count(*) FROM orders WHERE user_id = ?").bind(user_id).fetch_one(&mut *tx).await?;
/// if ordered == 0 {
///     sqlx::query("INSERT INTO orders VALUES (?)").bind(user_id).execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a named lock does nothing until `lock` is awaited"]
pub struct NamedLock {
    key: Key,
    wait: Option<Wait>,
}

impl NamedLock {
    /// The lock of this name.
    pub fn new(key: impl Into<Key>) -> Self {
        Self { key: key.into(), wait: None }
    }

    /// How long to wait for another holder. Defaults to [`Wait::DEFAULT`], 10 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = Some(wait.into());
        self
    }

    /// This lock, with its wait cut to what is left until a deadline.
    pub(crate) fn until(mut self, deadline: Option<Instant>) -> Self {
        self.wait = Some(Wait::within(self.wait, deadline.map(|it| it.saturating_duration_since(Instant::now()))));
        self
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn bound(&self) -> Option<Wait> {
        self.wait
    }

    /// Takes the lock; it is given back when the transaction ends. Taking it again in the same transaction is free.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait; [`Error::InvalidKey`]; [`Error::InvalidOption`], also outside a
    /// transaction; [`Error::NotMigrated`] on MySQL, MariaDB and SQLite; [`Error::Database`]. Roll the transaction back
    /// after an error.
    ///
    /// # Cancel safety
    /// The name may or may not be locked, until the transaction ends; roll it back.
    pub async fn lock<DB: NamedOps>(self, conn: &mut impl AsConnection<DB>) -> Result<()> {
        let conn = conn.as_connection();
        let wait = self.wait.unwrap_or_default();
        self.key.check()?;
        wait.check()?;
        if depth::<DB>(conn).await? == 0 {
            let reason = "needs a transaction: outside of one the name would be unlocked at once".to_owned();
            return Err(Error::InvalidOption { option: "named lock", reason });
        }
        let started = Instant::now();
        let contended = || Error::Contended { key: self.key.clone(), waited: started.elapsed(), holder: None };
        // The server keeps the bound; this is for the one statement that MySQL cannot bound.
        let backstop = wait.millis().map(|it| started + Duration::from_millis(it) + BACKSTOP);
        let taking = async {
            match until(backstop, DB::named_lock(conn, &self.key, wait)).await {
                Some(Ok(true)) => Ok(()),
                None | Some(Ok(false)) => Err(contended()),
                Some(Err(err)) if DB::fault(&err) == Fault::Contended => Err(contended()),
                Some(Err(err)) => Err(failed_on_own_table::<DB>("taking named lock", Some(&self.key), err)),
            }
        };
        observed(Strategy::Named, &self.key, taking).await
    }
}
