//! What an operator asks a database about locks: who waits for whom ([`Waits`]), and what harms them ([`Inspect`]). On
//! PostgreSQL, MySQL and MariaDB; SQLite does not say who waits. The command `lockkit` (`explain`, `doctor`) and the
//! page of `lockkit-web` show the answers; a service can ask for itself:
//!
//! ```no_run
//! use lockkit_inspect::Waits;
//!
//! # async fn f(pool: &sqlx::PgPool) -> sqlx::Result<()> {
//! let waits = Waits::of::<sqlx::Postgres>(&mut *pool.acquire().await?, &[]).await?;
//! for line in waits.lines() {
//!     println!("{}{}", line.branches, line.session.map_or("not listed", |it| &it.name));
//! }
//! for session in waits.blockers() {
//!     println!("to end it: {}", session.end_by);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Switch on the feature of each database that you use: `postgres`, `mysql` (also MariaDB), `sqlite`.
#![deny(missing_docs)]

mod causes;
mod finding;
mod sql;
mod waits;

pub use causes::with_causes;
pub use finding::{Finding, Level, Plan};
#[cfg(all(any(test, feature = "_fuzz"), feature = "sqlite"))]
#[doc(hidden)]
pub use sql::check_statement;
pub use sql::{Inspect, SetMost};
pub use waits::{Line, Session, Wait, Waits, waited_for};
