//! Detects requests that would wait for their own task, and describes holders of the same process.
//!
//! A lease is not re-entrant: "the same caller" has no meaning among tasks. Two tasks of one process would both be
//! admitted, and the first of two releases would free the lease under the other. `Lease::share` states in code that two
//! parts hold one lease together. Where other `Leases` refuse a request for the same key, the holder's token decides
//! whether the store is the same.

use std::time::Duration;

use super::{LeaseRequest, mode::Mode};
use crate::lease::inner::Inner;
use crate::{
    body::scope::{Realm, count, is_under, leases},
    lease::{bounded::limit_for, store::LeaseStore},
    value::{
        error::{Error, Result},
        key::Key,
        token::Token,
    },
};

const LEASE: &str = "lease";
const SHARE: &str = "hand the lease that it has to the code that needs it (`lease.share()`; `as = lease` names it \
                     under `#[with_lock]`), and take the lock in one place";
const SHARE_PERMIT: &str = "hand the permit that it has to the code that needs it (`lease.share()`), or give the \
                            semaphore more permits";
const SHARE_WRITER: &str = "a writer may read, so hand the write lease that it has to the code that needs it \
                            (`lease.share()`)";
const WRITE_FIRST: &str =
    "a writer waits for all readers, so ask to write from the start, or give the read lease back before";

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Refuses a request that would wait for a lock of the body that makes it.
    pub(super) fn check_not_reentrant(&self) -> Result<()> {
        let realm = self.inner.realm();
        let held = |is_it: &dyn Fn(&Key) -> bool| count(|it| it.realm == realm && is_it(&it.key));
        let writes = || {
            let writer = self.writer();
            held(&|it| *it == writer) > 0
        };
        let keeps_too_many = |of: u32, take: u32| {
            // A held permit with a number of `of` or more blocks none of the requested ones.
            let held = held(&|it| self.number_of("permit", it).is_some_and(|it| it < of));
            let held = u32::try_from(held).unwrap_or(u32::MAX);
            held.saturating_add(take) > of
        };
        if let Mode::All(keys) = &self.mode {
            let held = keys.iter().find(|key| held(&|it| it == *key) > 0);
            return held.map_or(Ok(()), |key| Err(Error::Reentrant { lock: LEASE, key: key.clone(), hint: SHARE }));
        }
        let (waits_for_itself, lock, hint) = match &self.mode {
            Mode::All(_) | Mode::NoPermits => (false, LEASE, SHARE),
            Mode::Any(keys) => (keys.iter().all(|key| held(&|it| it == key) > 0), LEASE, SHARE),
            Mode::Exclusive => (held(&|it| *it == self.key) > 0, LEASE, SHARE),
            Mode::Permit(of) => (keeps_too_many(*of, 1), "semaphore", SHARE_PERMIT),
            Mode::Permits { of, take } => (keeps_too_many(*of, *take), "semaphore", SHARE_PERMIT),
            Mode::Read => (writes(), "write lease", SHARE_WRITER),
            Mode::Write if writes() => (true, "write lease", SHARE),
            Mode::Write => (held(&|it| self.number_of("reader", it).is_some()) > 0, "read lease", WRITE_FIRST),
        };
        if waits_for_itself { Err(Error::Reentrant { lock, key: self.key.clone(), hint }) } else { Ok(()) }
    }

    /// The leases that the body which makes this request runs under. None for a request for any of several keys, which
    /// waits for no particular one.
    pub(super) fn under(&self) -> Vec<Key> {
        if matches!(self.mode, Mode::Any(_)) {
            return Vec::new();
        }
        let realm = self.inner.realm();
        leases(|it| it.realm == realm).into_iter().map(|(key, _)| key).collect()
    }

    /// Whether this is a read request from a body that holds a read lease of the same key.
    pub(super) fn reads_already(&self) -> bool {
        !self.reading().is_empty()
    }

    /// Whether the store still has one of the body's read leases. A stolen read lease does not block a writer.
    pub(super) async fn still_reads(&self) -> Result<bool> {
        for (key, token) in self.reading() {
            let held = self.inner.store().look(&key, limit_for(self.ttl)).await?;
            if held.is_some_and(|it| it.token == token) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The read leases of this key that the body runs under.
    fn reading(&self) -> Vec<(Key, Token)> {
        if self.mode != Mode::Read {
            return Vec::new();
        }
        let realm = self.inner.realm();
        leases(|it| it.realm == realm && self.number_of("reader", &it.key).is_some())
    }

    /// The number of a permit or read lease of this request's key.
    fn number_of(&self, role: &str, key: &Key) -> Option<u32> {
        let number = key.strip_prefix(self.key.as_str())?.strip_prefix('/')?.strip_prefix(role)?.strip_prefix('/')?;
        number.parse().ok()
    }
}

impl<S: LeaseStore> Inner<S> {
    /// Refuses the request if the body runs under the very lease that blocks it, acquired through other `Leases`. Asks
    /// the store, because the other `Leases` may be in a different store.
    pub(super) async fn check_other_leases(&self, key: &Key, ttl: Duration) -> Result<()> {
        if !is_under(|it| matches!(it.realm, Realm::Leases(_)) && it.key == *key) {
            return Ok(());
        }
        let held = self.store().look(key, limit_for(ttl)).await?;
        if held.is_some_and(|held| is_under(|it| it.token == Some(held.token))) {
            return Err(Error::Reentrant { lock: LEASE, key: key.clone(), hint: SHARE });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Fault, Leases,
        lease::store::Profile,
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
    };

    #[tokio::test(start_paused = true)]
    async fn a_body_gets_several_other_leases_and_is_refused_its_own_at_once() {
        let leases = Leases::new(MemoryStore::new());
        let body = async |_| {
            drop(leases.all(["a", "b"]).acquire().await?);
            let before = leases.store().faults().calls(Operation::Acquire);
            let (alone, among) = (leases.lease("own").acquire().await, leases.all(["a", "own"]).acquire().await);
            for refused in [alone.err(), among.err()] {
                assert!(matches!(&refused, Some(Error::Reentrant { key, .. }) if key == "own"), "{refused:?}");
            }
            assert_eq!(leases.store().faults().calls(Operation::Acquire), before);
            Ok::<_, Error>(())
        };
        leases.lease("own").run(body).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_refused_its_own_by_other_leases_once_the_store_has_said_that_they_are_the_same() {
        let here = Leases::new(Scripted::new(Profile::default()));
        let there = Leases::new(here.store().clone());
        let store = there.store();
        let of_this_moment = || store.fail(Call::Look, [failed(Fault::Serialization)]);
        let silent = || store.store.faults().script(Operation::Look, [Failure::Silent]);
        for look in [&|| (), &of_this_moment as &dyn Fn(), &silent] {
            let body = async |_| {
                look();
                there.lease("own").acquire().await.map(drop)
            };
            let refused = here.lease("own").run(body).await;
            assert!(matches!(&refused, Err(Error::Reentrant { key, .. }) if key == "own"), "{refused:?}");
        }
        let body = async |_| {
            store.fail(Call::Look, [failed(Fault::Other)]);
            there.lease("own").acquire().await.map(drop)
        };
        let failed = here.lease("own").run(body).await;
        assert!(matches!(&failed, Err(Error::Database { fault: Fault::Other, .. })), "{failed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_beyond_those_of_a_smaller_semaphore_is_in_nobodys_way() {
        let leases = Leases::new(MemoryStore::new());
        let first = leases.lease("k/permit/0").acquire().await.unwrap();
        let body = async |second: crate::Lease<_>| {
            assert_eq!(second.key(), "k/permit/1");
            first.release().await?;
            leases.semaphore("k", 1).acquire().await.map(drop)
        };
        leases.semaphore("k", 2).run(body).await.unwrap();
    }
}
