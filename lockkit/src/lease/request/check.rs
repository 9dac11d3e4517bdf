//! What is refused before anything is asked for.

use crate::{
    lease::{
        bounded::check_ttl,
        request::{
            LeaseRequest,
            mode::{MAX_CANDIDATES, MAX_PERMITS, Mode},
        },
        store::LeaseStore,
    },
    policy::check_wait,
    value::{
        error::{Error, Result},
        key::Key,
    },
};

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    pub(super) fn check(&self) -> Result<()> {
        match &self.mode {
            Mode::All(keys) | Mode::Any(keys) => keys.iter().try_for_each(Key::check)?,
            // Refused below. The key may be the combination of several.
            Mode::NoPermits => {}
            _ => self.key.check()?,
        }
        check_ttl(self.inner.store(), self.ttl)?;
        check_wait("wait", self.wait)?;
        check_wait("min_hold", self.min_hold)?;
        self.check_side_leases()?;
        match &self.mode {
            Mode::All(keys) if keys.is_empty() => {
                let reason = "has no keys; give it at least one".to_owned();
                Err(Error::InvalidOption { option: "all", reason })
            }
            Mode::Any(keys) if keys.is_empty() || keys.len() > MAX_CANDIDATES => {
                let reason = format!("has {} keys; give it 1 to {MAX_CANDIDATES}", keys.len());
                Err(Error::InvalidOption { option: "any", reason })
            }
            Mode::NoPermits => {
                let reason = "is for the permits of a semaphore; ask for several keys with `Leases::all`".to_owned();
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Permit(0) | Mode::Permits { of: 0, .. } => {
                let reason = "has no permits; give it at least one".to_owned();
                Err(Error::InvalidOption { option: "semaphore", reason })
            }
            Mode::Permit(permits) | Mode::Permits { of: permits, .. } if *permits > MAX_PERMITS => {
                let reason = format!("has {permits} permits; give it {MAX_PERMITS} at most");
                Err(Error::InvalidOption { option: "semaphore", reason })
            }
            Mode::Permits { take: 0, .. } => {
                let reason = "is zero; take at least one permit".to_owned();
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Permits { of, take } if take > of => {
                let reason = format!("asks for {take} permits, and the semaphore has {of}; take {of} at most");
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Any(_) | Mode::Permit(_) | Mode::Permits { .. } | Mode::Read | Mode::Write if self.fair => {
                let reason =
                    "is for single leases; semaphores, readers and `any` have no queue among processes".to_owned();
                Err(Error::InvalidOption { option: "fair", reason })
            }
            _ => Ok(()),
        }
    }

    /// Refuses what needs leases beside the one that is asked for, if the store does not keep or list them.
    fn check_side_leases(&self) -> Result<()> {
        let option = match self.mode {
            Mode::Any(_) => "any",
            Mode::Permit(_) | Mode::Permits { .. } => "semaphore",
            Mode::Read | Mode::Write => "rw",
            Mode::Exclusive | Mode::All(_) if self.fair => "fair",
            Mode::Exclusive | Mode::All(_) | Mode::NoPermits => return Ok(()),
        };
        if self.inner.store().profile().side_leases {
            return Ok(());
        }
        let reason = "needs to list leases, or to keep further ones beside the key's own, which this store cannot; use \
                      one server of it, or a database";
        Err(Error::InvalidOption { option, reason: reason.to_owned() })
    }

    pub(super) fn check_not_closed(&self) -> Result<()> {
        if self.inner.keeper.is_closed() { Err(Error::Closed { key: self.key.clone() }) } else { Ok(()) }
    }
}
