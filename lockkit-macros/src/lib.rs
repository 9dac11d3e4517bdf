//! The `#[with_lock]` attribute and the `Versioned` derive of lockkit. Use them through `lockkit`.
#![deny(missing_docs)]

mod diagnostics;
#[cfg(test)]
mod fuzz;
mod key;
mod krate;
mod names;
mod versioned;
mod with_lock;

use proc_macro::TokenStream;

/// Runs an `async fn` under a lock: takes the lock, runs the body, commits, and releases the lock.
///
/// The function returns `Result<_, E>` where `E: From<lockkit::Error>`. The attribute does not change its signature.
/// The body never runs without the lock. An error, a panic and a dropped future all roll the transaction back and free
/// the lock.
///
/// The first argument is the kind of lock. The others follow in any order:
///
/// ```
/// use lockkit::{Leases, with_lock};
/// use sqlx::SqlitePool;
///
/// #[derive(Debug, thiserror::Error)]
/// enum OrderError {
///     #[error(transparent)]
///     Lock(#[from] lockkit::Error),
///     #[error(transparent)]
///     Database(#[from] sqlx::Error),
///     #[error("sold out")]
///     SoldOut,
/// }
///
/// struct Orders {
///     db: SqlitePool,
///     leases: Leases<SqlitePool>,
/// }
///
/// impl Orders {
///     /// Locks the row of the item while it is read and written.
///     #[with_lock(row, on = &self.db, table = "t_items", by(item_id = item_id), wait = "500ms", tx = tx)]
///     async fn sell(&self, item_id: i64) -> Result<i64, OrderError> {
///         let stock: i64 = sqlx::query_scalar("SELECT stock FROM t_items WHERE item_id = ?")
///             .bind(item_id)
///             .fetch_one(&mut *tx)
///             .await?;
///         if stock == 0 {
///             return Err(OrderError::SoldOut);
///         }
///         let sql = "UPDATE t_items SET stock = stock - 1 WHERE item_id = ?";
///         sqlx::query(sql).bind(item_id).execute(&mut *tx).await?;
///         Ok(stock - 1)
///     }
///
///     /// Locks a name, because the order has no row yet: at most three orders per user.
///     #[with_lock(named, on = &self.db, key = "order:{user_id}", wait = "2s", tx = tx)]
///     async fn order(&self, user_id: i64) -> Result<bool, OrderError> {
///         let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM t_orders WHERE user_id = ?")
///             .bind(user_id)
///             .fetch_one(&mut *tx)
///             .await?;
///         if orders < 3 {
///             sqlx::query("INSERT INTO t_orders VALUES (?)").bind(user_id).execute(&mut *tx).await?;
///         }
///         Ok(orders < 3)
///     }
///
///     /// Holds a lease, because it takes long; another process that comes at the same time does nothing.
///     #[with_lock(
///         lease, on = &self.leases, key = "nightly", ttl = "30s", wait = "0s", as = lease, on_busy = Ok(None)
///     )]
///     async fn nightly(&self) -> Result<Option<u64>, OrderError> {
///         // … long work, which is stopped when the lease is lost …
///         Ok(Some(lease.fence().get()))
///     }
///
///     /// Locks nothing, and runs again when another writer changed the row first.
///     #[with_lock(version, attempts = 3, deadline = "100ms")]
///     async fn restock(&self, item_id: i64, count: i64) -> Result<(), OrderError> {
///         use lockkit::OrConflict;
///         let (stock, version): (i64, i64) = sqlx::query_as("SELECT stock, version FROM t_items WHERE item_id = ?")
///             .bind(item_id)
///             .fetch_one(&self.db)
///             .await?;
///         sqlx::query("UPDATE t_items SET stock = ?, version = version + 1 WHERE item_id = ? AND version = ?")
///             .bind(stock + count)
///             .bind(item_id)
///             .bind(version)
///             .execute(&self.db)
///             .await?
///             .or_conflict()?;
///         Ok(())
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&db).await?;
/// # let sql = "CREATE TABLE t_items (item_id INTEGER PRIMARY KEY, stock INTEGER, version INTEGER)";
/// # sqlx::query(sql).execute(&db).await?;
/// # sqlx::query("CREATE TABLE t_orders (user_id INTEGER)").execute(&db).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 1, 1)").execute(&db).await?;
/// let orders = Orders { leases: Leases::new(db.clone()), db };
/// assert_eq!(orders.sell(7).await?, 0);
/// assert!(matches!(orders.sell(7).await, Err(OrderError::SoldOut)));
/// for _ in 0..3 {
///     assert!(orders.order(42).await?);
/// }
/// assert!(!orders.order(42).await?);
/// assert!(orders.nightly().await?.is_some());
/// orders.restock(7, 5).await?;
/// assert_eq!(orders.sell(7).await?, 4);
/// # Ok(()) }
/// ```
///
/// # Arguments
///
#[doc = include_str!("with_lock/arguments/table.md")]
///
/// **Durations** are text (`"30s"`, `"1.5s"`, `"500ms"`, `"100us"`, `"2m"`, `"1h"`), checked at compile time, or an
/// expression of type `Duration`.
///
/// **Keys** are a template that captures variables as `format!` does, `"order:{user_id}:{kind:?}"`, also their fields
/// and calls without arguments, `"order:{user.id}:{item.number()}"`; or an expression that is `Into<Key>`. Two
/// different sets of captured values never make the same key of one template. For this, two neighbouring captures need
/// a character between them that is not a letter, a digit or `%`; this separator, `%` and control characters are
/// percent-encoded in the captured values. [`lockkit::key!`](../lockkit/macro.key.html) makes the same key by hand, and
/// says the whole rule. The key is made once, before the body and before any second attempt.
///
/// A key that captures nothing, while the function has arguments that no attribute mentions, is a warning: all calls
/// share the lock. `key = const "nightly"` says that this is meant. A `const` key is plain text, and no template.
///
/// **Several keys** are an array of templates and expressions, `keys = ["account:{from}", "account:{to}"]`, or any
/// other expression that is an `IntoIterator` of `Into<Key>`. Strings are templates only in an array that is written in
/// the attribute; a captured `{name}` in the strings of a `vec![…]` is an error. The order of the keys does not matter,
/// and a key that is given twice is taken once, as with `Leases::all`:
///
/// ```
/// # use lockkit::{Leases, with_lock};
/// # use sqlx::SqlitePool;
/// #[with_lock(lease, on = leases, keys = ["account:{from}", "account:{to}"], as = accounts, tx = tx)]
/// async fn transfer(leases: &Leases<SqlitePool>, from: i64, to: i64) -> Result<(), lockkit::Error> {
///     accounts.verify(&mut tx).await?; // from here on nobody else gets either of them
///     // … what it moves, on `&mut *tx` …
///     Ok(()) // committed if both are still held
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # let leases = Leases::new(db); leases.migrate().await?;
/// transfer(&leases, 7, 3).await?;
/// # Ok(()) }
/// ```
///
/// **One row.** `row = item: Item` gives the body the one row that matches. More than one are `Error::InvalidOption`,
/// none is `Error::NoSuchRow`.
///
/// **Several rows.** `by_any(item_id = ids)` locks the rows of all these values, in their order, and fails with
/// `Error::NoSuchRow` when one is missing. With `limit` or `skip_locked` the attribute may lock fewer rows than match,
/// so the body needs `rows` to know which ones it got. When `skip_locked` gets no row, because others have locked all
/// matching rows or because no row matches, the lock counts as held by others: the function returns `on_busy`, or
/// `Err(Error::Contended)`. `order_by`, `limit` and `skip_locked` together need no `by`. A queue of jobs for several
/// consumers:
///
/// ```
/// # use lockkit::with_lock;
/// # use sqlx::SqlitePool;
/// #[derive(sqlx::FromRow)]
/// struct Job {
///     id: i64,
///     payload: String,
/// }
///
/// /// Runs the next job. `None` when no job is available.
/// #[with_lock(row, on = db, table = "t_jobs", by(state = "ready"), order_by(id), limit = 1, skip_locked,
///     rows = jobs: Vec<Job>, tx = tx, on_busy = Ok(None))]
/// async fn run_next(db: &SqlitePool) -> anyhow::Result<Option<String>> {
///     let Some(job) = jobs.into_iter().next() else { return Ok(None) };
///     // … what the job does …
///     sqlx::query("UPDATE t_jobs SET state = 'done' WHERE id = ?").bind(job.id).execute(&mut *tx).await?;
///     Ok(Some(job.payload))
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_jobs (id INTEGER PRIMARY KEY, state TEXT, payload TEXT)").execute(&db).await?;
/// # sqlx::query("CREATE INDEX t_jobs_state ON t_jobs (state, id)").execute(&db).await?;
/// # sqlx::query("INSERT INTO t_jobs VALUES (1, 'ready', 'mail')").execute(&db).await?;
/// assert_eq!(run_next(&db).await?.as_deref(), Some("mail"));
/// assert_eq!(run_next(&db).await?, None);
/// # Ok(()) }
/// ```
///
/// **A session lock** is for a role that only one of many processes has: `#[with_lock(session, on = &self.db, key =
/// "leader", wait = "2s")]`. When lockkit finds the lock lost, it drops the body at its next await point. If the lock
/// was lost before the body returned `Ok`, the function returns `Err(Error::SessionLost)`; what the body wrote stays
/// written. PostgreSQL, MySQL and MariaDB have session locks, SQLite has none.
///
/// **An answer that is stored** (feature `idempotent`). The first request with a key does the work, and its answer is
/// committed with it. Every later request with that key returns the same answer, and the body does not run; see
/// [`Idempotent`](../lockkit/struct.Idempotent.html) for what is stored, and for how long. An `Err` is not stored:
///
/// ```
/// # use lockkit::with_lock;
/// # use sqlx::SqlitePool;
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Receipt {
///     payment: i64,
/// }
///
/// #[with_lock(idempotent, on = db, key = "pay:{user_id}:{request_id}", request = &cents, keep = "48h", tx = tx)]
/// async fn pay(db: &SqlitePool, user_id: i64, request_id: &str, cents: i64) -> anyhow::Result<Receipt> {
///     let paid = sqlx::query("INSERT INTO t_payments (cents) VALUES (?)").bind(cents).execute(&mut *tx).await?;
///     Ok(Receipt { payment: paid.last_insert_rowid() })
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&db).await?;
/// # sqlx::query("CREATE TABLE t_payments (id INTEGER PRIMARY KEY, cents INTEGER)").execute(&db).await?;
/// let first = pay(&db, 7, "8e03978e", 1999).await?;
/// let again = pay(&db, 7, "8e03978e", 1999).await?;
/// assert_eq!(first.payment, again.payment);
/// assert!(pay(&db, 7, "8e03978e", 5).await.is_err()); // `Error::Mismatch`: the key is that of another request
/// # Ok(()) }
/// ```
///
/// **Attempts.** With `attempts` or `deadline`, `row` and `named` run the whole transaction again after a deadlock, a
/// serialization failure or a conflict. `version` always does. After the last attempt the function returns
/// `Error::RetriesExhausted`. A body that may run again borrows its arguments: clone a value that it has to move. The
/// function is `Send` only if these arguments are `Sync`. A body that runs once owns them, and they need only be
/// `Send`. Without `retry_if`, `E` must be a `std::error::Error`, which `anyhow::Error` is not:
///
/// ```
/// # use lockkit::with_lock;
/// #[with_lock(version, attempts = 3, retry_if = |err: &anyhow::Error| lockkit::is_retryable(err.as_ref()))]
/// async fn rename(name: String) -> anyhow::Result<()> {
/// #   drop(name.clone());
///     // …
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() { rename(String::new()).await.unwrap() }
/// ```
///
/// **A lease with `tx`** cannot be renewed on SQLite while the transaction lasts, because the transaction has the only
/// write lock. Keep the transaction shorter than the ttl there.
///
/// # The transaction
/// The body gets the transaction as a variable of type [`Tx`](../lockkit/struct.Tx.html), under the name that `tx =`
/// gives. Only statements on this variable are in the transaction. A statement on the pool waits for the lock that its
/// own function holds, or its write stays even if the function fails.
///
/// | to pass it to | write |
/// |---|---|
/// | `execute`, `fetch_one` and the others of sqlx | `&mut *tx` |
/// | a function that takes `&mut PgConnection`, `&mut MySqlConnection` or `&mut SqliteConnection` | `&mut tx` |
/// | a function that takes `&mut Tx<DB>` | `&mut tx`, and there `&mut **tx` for sqlx |
/// | a function that takes `&mut sqlx::Transaction<'_, DB>` | not possible; let that function take `&mut PgConnection`, which a `Transaction` also derefs to |
///
/// The attribute ends the transaction and releases the lock. `tx.commit()`, `tx.rollback()`, `lease.release()` and a
/// moved `tx` are errors in the body: return `Ok` to commit and `Err` to roll back. A spawned task needs a transaction
/// of its own.
///
/// If the body does not use its transaction, rows, lease or attempt number, the compiler warns of an unused variable.
/// To silence it for a transaction, write `tx = _tx`; leave out `rows = …` and `as = …`.
///
/// # The error type
/// The function's error must be `From<lockkit::Error>`. `lockkit::Error` and `anyhow::Error` are. `sqlx::Error` and
/// `String` cannot be; replace them with an error type of your own, such as `OrderError` in the first example.
///
/// For an error type of another crate, such as `tonic::Status` in a handler, `map_err` converts the errors of lockkit:
///
/// ```
/// # use lockkit::{Leases, testing::MemoryStore, with_lock};
/// # #[derive(Debug)] struct Status(String);
/// # impl Status { fn unavailable(text: String) -> Self { Self(text) } }
/// fn to_status(err: lockkit::Error) -> Status {
///     Status::unavailable(err.to_string())
/// }
///
/// #[with_lock(lease, on = leases, key = "order:{id}", map_err = to_status)]
/// async fn order(leases: &Leases<MemoryStore>, id: i64) -> Result<i64, Status> {
///     Ok(id)
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # order(&Leases::new(MemoryStore::new()), 7).await.unwrap(); }
/// ```
///
/// # Generic functions
/// A function may be generic over its database. Its bound is the trait of the lock: `DB: lockkit::dialect::RowOps` for
/// `row`, `NamedOps` for `named`, `SessionOps` for `session`, `LeaseOps` for a `lease` in a `Leases<Pool<DB>>`,
/// `Dialect` for `version` with `tx`, `IdempotentOps` for `idempotent`. A `Leases<S>` of any store needs `S:
/// lockkit::LeaseStore`. The statements on `tx` and the values of `by` need sqlx's own bounds:
///
/// ```
/// # use lockkit::{dialect::NamedOps, with_lock};
/// use sqlx::{Executor, IntoArguments, Pool};
///
/// #[with_lock(named, on = pool, key = "report", tx = tx)]
/// async fn report<DB: NamedOps>(pool: &Pool<DB>) -> anyhow::Result<()>
/// where
///     for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
///     DB::Arguments: IntoArguments<DB>,
/// {
///     sqlx::query("DELETE FROM t_report").execute(&mut *tx).await?;
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&db).await?;
/// # sqlx::query("CREATE TABLE t_report (n INTEGER)").execute(&db).await?;
/// report(&db).await?;
/// # Ok(()) }
/// ```
///
/// `sqlx::Any` has no locks, because it does not say which database it is connected to.
///
/// # Where it goes
/// On functions and methods, also in implementations of traits, under `#[async_trait]`, and together with
/// `#[tracing::instrument]` in either order; the span is around the lock.
///
/// The body owns its arguments, and they are dropped in the order of the function: those that the body uses before the
/// lock is released, the others after it. Temporaries of its last expression are dropped by the rule of your edition.
///
/// **Several** `#[with_lock]` on one function nest as they are written. The upper lock is taken first. It is released
/// last, after the lower one has committed and was released:
///
/// ```
/// # use lockkit::{Leases, with_lock};
/// # use sqlx::SqlitePool;
/// #[with_lock(lease, on = leases, key = "import", as = lease)]
/// #[with_lock(row, on = leases.store(), table = "t_items", by(item_id = item_id), tx = tx)]
/// async fn import(leases: &Leases<SqlitePool>, item_id: i64) -> Result<u64, lockkit::Error> {
///     // … on `&mut *tx` …
/// #   let _ = &mut tx;
///     Ok(lease.fence().get()) // the row is committed, then the lease is released
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let db = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # let leases = Leases::new(db); leases.migrate().await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER PRIMARY KEY)").execute(leases.store()).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7)").execute(leases.store()).await?;
/// import(&leases, 7).await?;
/// # Ok(()) }
/// ```
///
/// - Each attribute has its own names, transaction, `wait` and `on_busy`. The arguments of the lower one can use the
///   names that the upper one gives.
/// - Two transactions are two connections: neither can write a row that the other has locked. On SQLite the second
///   transaction cannot begin, and no lease can be taken in the same file; put the lease above.
/// - `version` without its own transaction cannot be below a `tx`, because all attempts would write into that
///   transaction.
/// - The attributes find each other by the name `with_lock`, also in a `cfg_attr`. Under another name, the second one
///   is an error.
///
/// The attribute does not go on functions without a body, nor on `const`, `unsafe` or `extern` functions.
///
/// # Cancel safety
/// Dropping the function's future rolls its transaction back and frees the lock, both in the background. If the future
/// is dropped during the commit, the transaction may or may not be committed.
#[proc_macro_attribute]
pub fn with_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    with_lock::with_lock(args.into(), &item.into()).into()
}

/// Gives a struct `load`, `save` and `delete` guarded by a version: a save or delete after another writer's save is
/// refused.
///
/// ```
/// #[derive(sqlx::FromRow, lockkit::Versioned)]
/// #[versioned(table = "t_items", key = "item_id", version = "version")]
/// struct Item {
///     item_id: i64,
///     stock: i64,
///     version: i64,
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockkit::Error> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
/// # let sql = "CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)";
/// # sqlx::query(sql).execute(&pool).await.unwrap();
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1)").execute(&pool).await.unwrap();
/// let mut item = Item::load(&pool, 7).await?;
/// let mut stale = Item::load(&pool, 7).await?;
/// item.stock -= 1;
/// item.save(&pool).await?; // one statement, which writes all columns and adds one to the version
/// assert_eq!((item.stock, item.version), (4, 2));
///
/// stale.stock -= 1;
/// let conflict = stale.save(&pool).await.unwrap_err(); // somebody else was faster
/// assert!(conflict.is_conflict());
/// # Ok(()) }
/// ```
///
/// After a conflict, load, change and save again.
/// [`RetryPolicy::retry`](../lockkit/struct.RetryPolicy.html#method.retry) and [`#[with_lock(version,
/// …)]`](macro@with_lock) do this up to the given number of attempts:
///
/// ```
/// # #[derive(sqlx::FromRow, lockkit::Versioned)]
/// # #[versioned(table = "t_items", key = "item_id")]
/// # struct Item { item_id: i64, stock: i64, version: i64 }
/// #[lockkit::with_lock(version, attempts = 5, deadline = "300ms")]
/// async fn sell(pool: &sqlx::SqlitePool, item_id: i64) -> Result<i64, lockkit::Error> {
///     let mut item = Item::load(pool, item_id).await?;
///     item.stock -= 1;
///     item.save(pool).await?;
///     Ok(item.stock)
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockkit::Error> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
/// # let sql = "CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)";
/// # sqlx::query(sql).execute(&pool).await.unwrap();
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1)").execute(&pool).await.unwrap();
/// # assert_eq!(sell(&pool, 7).await?, 4);
/// let policy = lockkit::RetryPolicy::new().attempts(5);
/// let sold = policy.retry(async |_attempt| {
///     let mut item = Item::load(&pool, 7).await?;
///     item.stock -= 1;
///     item.save(&pool).await?;
///     Ok::<_, lockkit::Error>(item.stock)
/// });
/// assert_eq!(sold.await?, 3);
/// # Ok(()) }
/// ```
///
/// # In a transaction
/// `save(&mut *tx)` does not change the version in the struct. If the transaction or a savepoint rolls back, another
/// writer will reach the same version number with other content, so the struct must not expect it. To give the struct
/// its new version, commit through the value that `save` returns: `item.save(&mut *tx).await?.commit(tx).await?`. The
/// struct changes if and only if the commit succeeds. See [`Saved`](../lockkit/version/struct.Saved.html). If the
/// transaction is committed elsewhere, as under `#[with_lock(…, tx = tx)]`, and the struct is not used afterwards,
/// write `let _ = item.save(&mut *tx).await?;`.
///
/// `delete(&mut *tx)` does not change the struct: after a rollback it can be saved or deleted as before.
///
/// # What it writes
/// - `load(on, key)`: `on` is `&pool` or `&mut *tx`. There is one argument for each column of the key, of any type that
///   is `Into` the field's type. The struct must be `sqlx::FromRow`.
/// - `save(&mut self, on)`: writes every field except the key. On `&pool` it returns `()`, on a connection a `Saved`.
/// - `delete(&self, on)`: deletes the row, by key and version.
/// - `impl lockkit::VersionedStruct`, which `load`, `save` and `delete` use. It can also be written by hand.
///
/// # Options
///
/// | on the struct | what it is |
/// |---|---|
/// | `table = "…"` | the table: letters, digits and `_`; with its schema if that is not the connection's, `"app.items"` |
/// | `key = "…"`, `key("…", "…")` | the columns that identify the row |
/// | `version = "…"` | the column of the version: its field is an `i16`, `i32` or `i64`. Defaults to `version` |
/// | `crate = path` | the path of lockkit, if it is not `::lockkit` |
///
/// | on a field | what it is |
/// |---|---|
/// | `rename = "…"` | the name of its column. Defaults to that of `#[sqlx(rename = "…")]`, or of the field |
/// | `skip` | the field is read but not written, for columns that the database computes. `#[sqlx(skip)]` has the same effect |
///
/// The struct may be generic, also over lifetimes. Of sqlx's own options, `rename`, `rename_all`, `skip`, `default`,
/// `json` and `json(nullable)` apply to reads and writes. `flatten` and `try_from` are refused, because a save could
/// not undo them.
#[proc_macro_derive(Versioned, attributes(versioned))]
pub fn versioned(input: TokenStream) -> TokenStream {
    versioned::derive(input.into()).into()
}

/// What `lockkit::key!` expands to.
#[doc(hidden)]
#[proc_macro]
pub fn key_template(tokens: TokenStream) -> TokenStream {
    key::key(tokens.into()).into()
}

/// The editions of users, as tests of the documentation: all others have the edition of this package.
#[cfg(doctest)]
#[doc = include_str!("../../tests/macros/editions.md")]
struct Editions;
