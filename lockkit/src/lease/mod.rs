//! Leases: locks with an expiry, a fencing token and an owner check, for work that outlives a transaction.
//!
//! One lease of one process goes through these states:
//!
//! ```text
//!            granted                 renewed in time
//!   asking ───────────▶ held, trusted ◀────────────┐
//!     │ │                │   │  └──────────────────┘
//!     │ └── contended    │   └── not renewed, stolen, or the store says gone ──▶ lost   (for ever)
//!     └──── dropped      └────── release, commit, drop ───────────────────────▶ released (for ever)
//! ```
//!
//! A dropped question is answered all the same, by a task of its own, and what it was granted is given back.

pub(crate) mod bounded;
mod close;
mod held;
pub(crate) mod keeper;
pub(crate) mod kept;
mod listen;
mod permits;
mod place;
mod queue;
mod reentry;
mod request;
mod set;
mod shared;
pub(crate) mod store;
pub(crate) mod trust;
pub(crate) mod wait;

use std::{fmt, sync::Arc, time::Duration};

use sqlx::Pool;
use tokio::time::{Instant, sleep};

pub use self::{
    close::Health,
    held::{Lease, Released},
    permits::PermitsRequest,
    request::LeaseRequest,
    set::{MultiLease, MultiRequest},
    shared::ReadWrite,
};
use self::{
    listen::{Ears, Listen, listen},
    request::Mode,
};
use crate::{
    error::{Error, Result},
    fence::Fence,
    key::Key,
    lease::{
        bounded::{Bounded, LIMIT},
        keeper::{Keeper, Sweep},
        store::{BUSY_PAUSE, Held, LeaseInfo, LeaseStore, Release, Scoped},
        wait::Lines,
    },
    policy::{Wait, check_duration},
    sql::{Dialect, LeaseOps, ListenOps, schema::migrate},
};

/// The most leases that [`Leases::list`] returns.
const LIST_LIMIT: u32 = 10_000;

/// How long a key is remembered that nobody holds. A clock that steps back by less cannot lower a fence.
const RETENTION: Duration = Duration::from_hours(7 * 24);

/// Gives out leases that live in one store: the table `lockkit_lease` of a database, or a store of your own.
///
/// Make one per service and clone it freely; clones share their waiting lines and the task that renews.
/// Use it when the work outlives a transaction, calls other services, or must run in one of many processes.
/// For one short transaction [`RowLock`](crate::RowLock) or [`NamedLock`](crate::NamedLock) is simpler and faster.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// let leases = lockkit::Leases::new(pool.clone());
/// leases.migrate().await?;
///
/// let lease = leases.lease("nightly:invoices").acquire().await?;
/// // … long work, as long as lease.is_trusted() …
///
/// // A write that happens only if the lease is still held at the moment of the commit:
/// let mut tx = lockkit::begin(&pool).await?;
/// # sqlx::query("CREATE TABLE invoices (id INTEGER)").execute(&mut *tx).await?;
/// sqlx::query("INSERT INTO invoices VALUES (1)").execute(&mut *tx).await?;
/// lease.commit(tx).await?;
/// # Ok(()) }
/// ```
pub struct Leases<S: LeaseStore>(Arc<Inner<S>>);

struct Inner<S: LeaseStore> {
    /// What the caller gave. Transactions begin here; the keeper's store may have connections of its own.
    given: S,
    keeper: Keeper<S>,
    lines: Lines,
    ears: Option<Ears<S>>,
    ttl: Duration,
    wait: Duration,
    renew_every: Option<Duration>,
}

impl<S: LeaseStore> Inner<S> {
    fn store(&self) -> &Bounded<S> {
        self.keeper.store()
    }
}

impl<S: LeaseStore> Leases<S> {
    /// Leases with the defaults of [`LeasesBuilder`].
    pub fn new(store: S) -> Self {
        Self::builder(store).assemble()
    }

    /// Leases with settings of your own.
    pub fn builder(store: S) -> LeasesBuilder<S> {
        LeasesBuilder {
            store,
            own: None,
            listen: None,
            ttl: Duration::from_secs(30),
            wait: Wait::DEFAULT,
            renew_every: None,
            sweep: Some(Sweep { every: Duration::from_mins(10), retention: RETENTION }),
            holder: None,
        }
    }

    /// The store that the leases live in.
    pub fn store(&self) -> &S {
        &self.0.given
    }

    /// A request for the lease of this key: set what differs from the defaults, then
    /// [`acquire`](LeaseRequest::acquire), [`try_acquire`](LeaseRequest::try_acquire) or [`run`](LeaseRequest::run).
    pub fn lease(&self, key: impl Into<Key>) -> LeaseRequest<S> {
        LeaseRequest::new(self.0.clone(), key.into(), Mode::Exclusive)
    }

    /// Who holds the lease now; `None` when it is free or expired. Reads only.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::NotMigrated`], [`Error::Database`].
    pub async fn show(&self, key: impl Into<Key>) -> Result<Option<LeaseInfo>> {
        Ok(self.look(&key.into()).await?.map(|it| self.0.shown(it)))
    }

    async fn look(&self, key: &Key) -> Result<Option<Held>> {
        key.check()?;
        self.0.store().look(key, LIMIT).await
    }

    /// The leases held now whose key starts with `prefix`, in the order of their keys, 10,000 at most. Reads only.
    ///
    /// # Errors
    /// [`Error::NotMigrated`], [`Error::Database`].
    pub async fn list(&self, prefix: &str) -> Result<Vec<LeaseInfo>> {
        let held = self.0.store().list(prefix, LIST_LIMIT).await?;
        Ok(held.into_iter().map(|it| self.0.shown(it)).collect())
    }

    /// Takes the lease from its holder and leaves it free, for operators. Returns what was taken; `None` when there was nothing
    /// to take.
    ///
    /// The old holder is told at its next renewal, and its commits are refused from now on. The next holder gets a
    /// greater fence. Between a look at the holder and the decision to take the lease from it, another may have come: use
    /// [`steal_if`](Self::steal_if) where somebody has looked.
    ///
    /// # Errors
    /// [`Error::Contended`] when a transaction that pins the lease does not end within the default wait;
    /// [`Error::InvalidKey`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The lease is freed or not; repeat it if in doubt.
    pub async fn steal(&self, key: impl Into<Key>) -> Result<Option<LeaseInfo>> {
        let key = key.into();
        match self.look(&key).await? {
            Some(held) => self.take_from(key, held).await,
            None => Ok(None),
        }
    }

    /// As [`steal`](Self::steal), but only from the holder with this fence, as [`show`](Self::show) has told. `None` when that
    /// one no longer holds the lease: nobody was harmed then, whoever holds it now.
    ///
    /// # Errors
    /// As [`steal`](Self::steal).
    ///
    /// # Cancel safety
    /// As [`steal`](Self::steal).
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// # let hung = leases.lease("nightly").acquire().await?;
    /// if let Some(held) = leases.show("nightly").await? {
    ///     // … "Take it from {held.holder}?" … "yes" …
    ///     match leases.steal_if("nightly", held.fence).await? {
    ///         Some(taken) => println!("taken from {}", taken.holder),
    ///         None => println!("{} does not hold it any more", held.holder),
    ///     }
    /// }
    /// # assert_eq!(leases.show("nightly").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn steal_if(&self, key: impl Into<Key>, fence: Fence) -> Result<Option<LeaseInfo>> {
        let key = key.into();
        match self.look(&key).await? {
            Some(held) if held.info.fence == fence => self.take_from(key, held).await,
            _ => Ok(None),
        }
    }

    /// A token has one fence, so the release by its token takes the lease from this holder and no other.
    async fn take_from(&self, key: Key, held: Held) -> Result<Option<LeaseInfo>> {
        let started = Instant::now();
        let release = Release { key: key.clone(), token: held.token, min_hold: Duration::ZERO };
        while started.elapsed() <= self.0.wait {
            match self.0.store().release(&release, LIMIT).await? {
                Scoped::Done => {
                    self.0.lines.freed(&key);
                    return Ok(Some(self.0.shown(held)));
                }
                Scoped::Gone => return Ok(None),
                Scoped::Busy => sleep(BUSY_PAUSE).await,
            }
        }
        Err(Error::Contended { key, waited: started.elapsed(), holder: Some(Box::new(self.0.shown(held).into())) })
    }
}

impl<DB: Dialect> Leases<Pool<DB>>
where
    Pool<DB>: LeaseStore,
{
    /// Creates lockkit's tables, or brings them up to date. See [`migrate`](crate::sql::schema()).
    ///
    /// # Errors
    /// [`Error::Migration`].
    pub async fn migrate(&self) -> Result<()> {
        migrate(self.store()).await
    }
}

impl<S: LeaseStore> Clone for Leases<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: LeaseStore> fmt::Debug for Leases<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<S: LeaseStore> fmt::Debug for Inner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("holder", self.keeper.holder())
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .field("keeper", &self.keeper)
            .finish_non_exhaustive()
    }
}

/// Settings of [`Leases`].
#[derive(Debug, Clone)]
#[must_use = "settings do nothing until `build` is called"]
pub struct LeasesBuilder<S: LeaseStore> {
    store: S,
    own: Option<S>,
    listen: Option<Listen<S>>,
    ttl: Duration,
    wait: Wait,
    renew_every: Option<Duration>,
    sweep: Option<Sweep>,
    holder: Option<String>,
}

impl<S: LeaseStore> LeasesBuilder<S> {
    /// How long a lease lives without a renewal. Defaults to 30 s; at least 50 ms.
    ///
    /// It bounds how long a lease stays taken after its process dies. Short ones survive fewer hiccups.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long requests for leases try before they give up, unless they are told otherwise. Defaults to [`Wait::DEFAULT`],
    /// 10 s; zero tries once.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// How often to renew a lease. Defaults to a third of its ttl, which leaves time for two more tries.
    pub fn renew_every(mut self, every: Duration) -> Self {
        self.renew_every = Some(every);
        self
    }

    /// How often to delete keys that nobody has held for a week. Defaults to 10 minutes.
    pub fn sweep_every(mut self, every: Duration) -> Self {
        self.sweep = Some(Sweep { every, retention: RETENTION });
        self
    }

    /// Never delete old keys. Nothing depends on it but the size of the table.
    pub fn never_sweep(mut self) -> Self {
        self.sweep = None;
        self
    }

    /// What operators see as the holder. Defaults to host, process id and a random part; 255 bytes at most.
    pub fn holder(mut self, holder: impl Into<String>) -> Self {
        self.holder = Some(holder.into());
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] names the setting that cannot work.
    pub fn build(self) -> Result<Leases<S>> {
        check_ttl(self.ttl)?;
        self.wait.check()?;
        if let Some(every) = self.renew_every {
            check_duration("renew_every", every)?;
            if every >= self.ttl {
                let reason = format!("is {every:?}, not shorter than the ttl of {:?}; use a third of it", self.ttl);
                return Err(Error::InvalidOption { option: "renew_every", reason });
            }
        }
        if let Some(sweep) = self.sweep {
            check_duration("sweep_every", sweep.every)?;
        }
        if let Some(holder) = &self.holder {
            Key::new(holder).map_err(|_| Error::InvalidOption {
                option: "holder",
                reason: "must be 1 to 255 bytes of printable text".to_owned(),
            })?;
        }
        Ok(self.assemble())
    }

    fn assemble(self) -> Leases<S> {
        let Self { store, own, listen, ttl, wait, renew_every, sweep, holder } = self;
        let holder = holder.unwrap_or_else(this_process).into();
        Leases(Arc::new(Inner {
            keeper: Keeper::new(own.unwrap_or_else(|| store.clone()), holder, sweep),
            given: store,
            lines: Lines::default(),
            ears: listen.map(Ears::new),
            ttl,
            wait: wait.limit(),
            renew_every,
        }))
    }
}

impl<DB: LeaseOps> LeasesBuilder<Pool<DB>> {
    /// Gives the leases this many connections of their own, opened when needed, with the options of the pool.
    ///
    /// Without it they share the pool with the service, and renewals wait when all of its connections are in use. A
    /// service whose transactions acquire leases needs it, or a pool that is larger than the number of such transactions:
    /// see [`Error::PoolStarved`]. Two are enough for most. Transactions still begin in the pool that was given.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn own_connections(mut self, connections: u32) -> Self {
        let options = self.store.options().clone().min_connections(0).max_connections(connections.max(1));
        self.own = Some(options.connect_lazy_with((*self.store.connect_options()).clone()));
        self
    }
}

impl<DB: ListenOps> LeasesBuilder<Pool<DB>> {
    /// Wakes those who wait for a lease when another process gives it back, instead of at their next question (every
    /// 250 ms at most). PostgreSQL only: `LISTEN` and `NOTIFY`, on a connection of its own that is opened with the first
    /// wait and kept. A notification that is missed costs one question. Permits, readers and writers still ask.
    ///
    /// It is for those who wait to decide; releases notify by themselves where somebody listens, and only there, because
    /// `NOTIFY` makes all commits of the server that notify wait for each other.
    ///
    /// Not behind a pooler in transaction mode, which hands on no notifications.
    pub fn listen(mut self) -> Self {
        self.listen = Some(listen::<DB>);
        self
    }
}

/// A ttl must leave room for its margin and a few renewals.
fn check_ttl(ttl: Duration) -> Result<()> {
    check_duration("ttl", ttl)?;
    if ttl < Duration::from_millis(50) {
        let reason = format!("is {ttl:?}, too short to be renewed in time; use 50 ms or more");
        return Err(Error::InvalidOption { option: "ttl", reason });
    }
    Ok(())
}

/// Host, process id and a random part: enough for people to find the process.
fn this_process() -> String {
    let host: String = host_name().chars().filter(|it| !it.is_control()).take(50).collect();
    format!("{host}/{}/{:06x}", std::process::id(), fastrand::u32(..1 << 24))
}

/// The name from the kernel on Linux, elsewhere from the environment; `host` if neither has one.
fn host_name() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let variables = ["HOSTNAME", "COMPUTERNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    let name = kernel.into_iter().chain(variables).map(|it| it.trim().to_owned()).find(|it| !it.is_empty());
    name.unwrap_or_else(|| "host".to_owned())
}
