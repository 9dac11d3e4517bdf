//! The settings of [`Leases`].

use std::{sync::Arc, time::Duration};

use super::{
    inner::{Inner, ReportsReleases},
    leases::Leases,
};
use crate::{
    body::inline::Inline,
    lease::{
        batch::Calls,
        bounded::{Bounded, check_ttl},
        leftovers::Leftovers,
        life::{
            keeper::{Keeper, Sweep},
            kept::HandOver,
        },
        queue::Queues,
        store::LeaseStore,
    },
    policy::{Wait, check_duration},
    value::{
        error::{Error, Result},
        key::Key,
    },
};

/// How long the store remembers a key after its last holder. A clock that steps back by less than this cannot lower a
/// fence.
const RETENTION: Duration = Duration::from_hours(7 * 24);

/// How long a lease is handed over. Holders who are done in microseconds would otherwise spend most of the time on the
/// store, and no other process gains from their few milliseconds.
const HAND_OVER: HandOver = HandOver { times: 32, at_least: Duration::from_millis(10) };

/// Settings of [`Leases`].
#[derive(Debug, Clone)]
#[must_use = "settings do nothing until `build` is called"]
pub struct LeasesBuilder<S: LeaseStore> {
    pub(crate) store: S,
    /// The store for the leases, if it is not the one that was given.
    pub(crate) own: Option<S>,
    /// Creates the source of release notifications, if it is not the store itself.
    pub(crate) listener: Option<Listener<S>>,
    ttl: Duration,
    wait: Wait,
    renew_every: Option<Duration>,
    hand_over: HandOver,
    sweep: Option<Sweep>,
    holder: Option<String>,
    fence_domain: Option<Key>,
}

/// Creates the source of release notifications.
pub(crate) type Listener<S> = fn(S) -> Arc<dyn ReportsReleases>;

impl<S: LeaseStore> LeasesBuilder<S> {
    pub(super) fn new(store: S) -> Self {
        Self {
            store,
            own: None,
            listener: None,
            ttl: Duration::from_secs(30),
            wait: Wait::DEFAULT,
            renew_every: None,
            hand_over: HAND_OVER,
            sweep: Some(Sweep { every: Duration::from_mins(10), retention: RETENTION }),
            holder: None,
            fence_domain: None,
        }
    }

    /// How long a lease lives without a renewal. Defaults to 30 s; at least 50 ms.
    ///
    /// It bounds how long a lease stays taken after its process dies. A shorter ttl survives only shorter outages
    /// of the store.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long requests for leases wait, unless they set their own wait. Defaults to [`Wait::DEFAULT`], 10 s. Zero
    /// tries once.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// How often to renew a lease. Defaults to a third of its ttl, so two retries fit before expiry. A renewal may
    /// take longer than this: 500 ms, or a third of the ttl if that is less.
    pub fn renew_every(mut self, every: Duration) -> Self {
        self.renew_every = Some(every);
        self
    }

    /// How often in a row a lease is handed to the next caller who waits in this process, when its holder releases it.
    /// Defaults to 32, or more within 10 ms. Zero releases it in the store each time.
    ///
    /// A lease is handed over without asking the store, so a key that many tasks of one process want changes its holder
    /// within microseconds. Each holder has a fence of its own, higher than the one before. Other processes wait
    /// meanwhile: for this many holders, and at most for half of the ttl. A grant has a limited number of fences
    /// ([`Grant::spare_fences`](crate::store::Grant::spare_fences)), which ends a run too.
    ///
    /// A release that hands the lease over does not ask the store, so it does not report that an operator has stolen
    /// the lease. Nobody can commit with a stolen lease all the same.
    ///
    /// A lease is released in the store, and not handed over, if: the next caller wants another ttl or a
    /// [`fair`](crate::LeaseRequest::fair) lease; its `min_hold` is not over; a transaction has verified it; it was
    /// extended to another ttl; it belongs to a semaphore, a reader, a writer or several keys; or the store is a Galera
    /// cluster or a replication group of MySQL
    /// ([`Profile::shows_writes_at_once`](crate::store::Profile::shows_writes_at_once)).
    pub fn hand_over(mut self, times: u32) -> Self {
        self.hand_over = HandOver { times, at_least: Duration::ZERO };
        self
    }

    /// How often to delete keys that had no holder for a week. Defaults to 10 minutes; `None` keeps them, which affects
    /// only the size of the table.
    pub fn sweep_every(mut self, every: impl Into<Option<Duration>>) -> Self {
        self.sweep = every.into().map(|every| Sweep { every, retention: RETENTION });
        self
    }

    /// The holder name that operators see. Defaults to host, process id and a random part; at most 255 bytes.
    pub fn holder(mut self, holder: impl Into<String>) -> Self {
        self.holder = Some(holder.into());
        self
    }

    /// The domain of [`Lease::guard`](crate::Lease::guard): names the source of the fences in the table of the fence
    /// guard, 1 to 64 bytes. Two stores whose leases guard one database need two domains, because their fences cannot
    /// be compared. Defaults to the store's own ([`Profile::fence_domain`](crate::store::Profile::fence_domain)), such
    /// as `redis`.
    pub fn fence_domain(mut self, domain: impl Into<Key>) -> Self {
        self.fence_domain = Some(domain.into());
        self
    }

    /// Checks the settings and returns the [`Leases`].
    ///
    /// # Errors
    /// [`Error::InvalidOption`] names the setting that cannot work.
    pub fn build(self) -> Result<Leases<S>> {
        check_ttl(&Bounded::new(self.store.clone()), self.ttl)?;
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
        if let Some(domain) = &self.fence_domain {
            check_fence_domain(domain)?;
        }
        Ok(self.assemble())
    }

    pub(super) fn assemble(self) -> Leases<S> {
        let Self { store, own, listener, ttl, wait, renew_every, hand_over, sweep, holder, fence_domain } = self;
        let holder = holder.unwrap_or_else(this_process).into();
        let kept_in = own.unwrap_or_else(|| store.clone());
        Leases(Arc::new(Inner {
            fence_domain: fence_domain.unwrap_or_else(|| kept_in.profile().fence_domain.into()),
            listener: listener.map(|it| it(kept_in.clone())),
            keeper: Keeper::new(kept_in, holder, sweep),
            caller_store: store,
            queues: Queues::default(),
            calls: Calls::default(),
            leftovers: Leftovers::default(),
            inline: Inline::default(),
            hand_over,
            ttl,
            wait: wait.limit(),
            renew_every,
        }))
    }
}

/// Refuses a name of a domain that the table of the fence guard cannot store.
pub(crate) fn check_fence_domain(domain: &Key) -> Result<()> {
    const MAX_BYTES: usize = 64;
    if domain.check().is_ok() && domain.len() <= MAX_BYTES {
        return Ok(());
    }
    let reason = format!("must be 1 to {MAX_BYTES} bytes of printable text");
    Err(Error::InvalidOption { option: "fence_domain", reason })
}

/// Host, process id and a random part: enough to find the process.
fn this_process() -> String {
    let host: String = host_name().chars().filter(|it| !it.is_control()).take(50).collect();
    format!("{host}/{}/{:06x}", std::process::id(), fastrand::u32(..1 << 24))
}

/// The kernel's host name on Linux, otherwise the one in the environment. `host` if both are missing.
fn host_name() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let variables = ["HOSTNAME", "COMPUTERNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    let name = kernel.into_iter().chain(variables).map(|it| it.trim().to_owned()).find(|it| !it.is_empty());
    name.unwrap_or_else(|| "host".to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::testing::MemoryStore;

    #[test]
    fn a_process_is_named_by_its_host_its_id_and_something_random() {
        let uname = Command::new("uname").arg("-n").output().unwrap();
        let (host, id) = (String::from_utf8(uname.stdout).unwrap(), std::process::id().to_string());
        let names = [(), ()].map(|()| this_process());
        for name in &names {
            let parts: Vec<_> = name.split('/').collect();
            assert_eq!(parts[..2], [host.trim(), &id], "{name}");
            assert_eq!(parts[2].len(), 6, "{name}");
        }
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn settings_at_their_bounds_are_accepted_and_refused() {
        let build = |change: fn(LeasesBuilder<MemoryStore>) -> LeasesBuilder<MemoryStore>| {
            change(LeasesBuilder::new(MemoryStore::new()).ttl(Duration::from_secs(9))).build().is_ok()
        };
        assert!(build(|it| it.renew_every(Duration::from_millis(8999))));
        assert!(!build(|it| it.renew_every(Duration::from_secs(9))));
        assert!(build(|it| it.fence_domain("x".repeat(64))));
        assert!(!build(|it| it.fence_domain("x".repeat(65))));
        assert!(!build(|it| it.fence_domain("")));
    }
}
