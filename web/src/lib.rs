//! A page that shows the leases of a service as they change, for an axum 0.8 service to nest. An operator sees who
//! holds what, for how long, who waits, whose holder died, and what happened in the last ten minutes, and can take a
//! lease from a holder that hangs. The leases may live in any store of [lockkit].
//!
//! ```
//! use axum::Router;
//! use lockkit::{Leases, LeaseStore};
//! use lockkit_web::{Access, Inspector};
//!
//! /// Inserted by the service's own authentication, in a layer around all routes.
//! #[derive(Clone)]
//! struct User { name: String, is_operator: bool }
//!
//! fn app<S: LeaseStore>(leases: Leases<S>) -> Router {
//!     let inspector = Inspector::new(leases).access(|parts| match parts.extensions.get::<User>() {
//!         Some(user) if user.is_operator => Access::Steal { by: user.name.clone() },
//!         Some(_) => Access::ReadOnly,
//!         None => Access::None,
//!     });
//!     Router::new().nest("/locks", inspector.router())
//! }
//! ```
//!
//! # Who may look
//!
//! Nobody, until the application says so by [`Inspector::access`]: every request gets 403, with the line to write. No
//! address counts as local, because behind a proxy all clients have the proxy's.
//!
//! # What the page does to the database
//!
//! A viewer's request reads the leases if the last read is a second old: those that are held ([`Leases::list`]) and
//! those whose holder died ([`Leases::expired`]). So any number of viewers cost one read a second, a page that nobody
//! looks at costs none, and there is no task in the background. What happened to a lease is known from these reads: it
//! is kept in memory for ten minutes, and only while somebody looks. A lease that was held for less than a second may
//! not appear. A theft by other means than this page is shown as a release.
//!
//! With [`Inspector::database`] the read also asks who waits for whom, on a connection of that pool, for at most 2 s.
//!
//! At most 10,000 leases of each kind are read. 200 keys are shown, and the 50 whose holder died last; the filter of
//! the page selects among those that were read.
//!
//! # What a browser may do
//!
//! The page is HTML, CSS and a script, 20 KB together, which come from the service itself. The header
//! `Content-Security-Policy` forbids everything else, and that another page frames this one. Keys and holders are only
//! ever text. Without JavaScript the page is a table.
//!
//! Only `POST /steal` changes anything. It needs `Sec-Fetch-Site: same-origin` (or, where the browser does not send
//! that, an `Origin` that is the `Host`), `X-Lockkit: 1` and JSON, so a page of another origin cannot forge it, even
//! with the operator's cookies. The body has the fence that the page showed: a lease that another holder got since
//! stays with that holder.
//!
//! # Paths
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page |
//! | `/leases.json` | the same as JSON; `?contains=` selects by key or holder |
//! | `/events` | the same every second, as server-sent events, for 10 s; the page then connects again |
//! | `POST /steal` | `{"key": "nightly", "fence": "1763740102881332"}`: 200, or 409 if that holder does not have the lease |
//!
//! Access is asked for at each request, so access that is withdrawn ends within 10 s. A graceful shutdown of axum waits
//! for open connections, here for 10 s at most.
#![deny(missing_docs)]

mod access;
mod history;
mod looks;
mod origin;
mod page;
mod routes;
mod sessions;

use std::{fmt, sync::Arc};

use axum::{Router, http::request::Parts};
use lockkit::{LeaseStore, Leases};
use lockkit_inspect::Inspect;
use sqlx::Pool;

pub use self::access::Access;
use self::{access::Gate, looks::Looks, sessions::Database};

/// Makes the routes of the page.
#[must_use = "nest its router: `.nest(\"/locks\", inspector.router())`"]
pub struct Inspector<S: LeaseStore> {
    leases: Leases<S>,
    database: Option<Database>,
    gate: Gate,
}

impl<S: LeaseStore> Inspector<S> {
    /// A page about these leases, closed to all until [`access`](Self::access) opens it.
    pub fn new(leases: Leases<S>) -> Self {
        Self { leases, database: None, gate: Gate::Closed }
    }

    /// Also shows which sessions of this database wait for which, with the row, the statement, and the statement that
    /// ends the first. That needs the feature of this crate for the database: `postgres` or `mysql` (also MariaDB).
    ///
    /// All who may look see statements of all applications of the database, with the values that are written in them,
    /// as far as the user of the pool may see them: on PostgreSQL with `pg_monitor`, on MySQL and MariaDB with
    /// `PROCESS`.
    pub fn database<DB: Inspect>(mut self, pool: Pool<DB>) -> Self {
        self.database = Some(Database::of(pool));
        self
    }

    /// Who may look, and who may steal. The function is called for each request with its head: the headers, and the
    /// extensions that layers around the router have inserted, such as the user of a session. Do what needs I/O in such
    /// a layer.
    ///
    /// Behind an address that only the operators reach, such as a loopback address, also compare the header `Host`: a
    /// web site whose name is made to point to that address is of the same origin as the page.
    pub fn access(mut self, may: impl Fn(&Parts) -> Access + Send + Sync + 'static) -> Self {
        self.gate = Gate::Asks(Arc::new(may));
        self
    }

    /// The routes, to nest under a path or to serve alone. Its viewers share their reads of the leases.
    pub fn router<T: Clone + Send + Sync + 'static>(self) -> Router<T> {
        routes::router(Arc::new(Looks::at(self.leases, self.database)), self.gate)
    }
}

impl<S: LeaseStore> fmt::Debug for Inspector<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector").field("leases", &self.leases).field("gate", &self.gate).finish_non_exhaustive()
    }
}
