//! Several holders of one key: permits, readers and writers. Each of them has a lease of its own beside the key's.

use std::{collections::HashSet, time::Duration};

use super::{
    Leases,
    held::Lease,
    request::{LeaseRequest, Mode, Place},
};
use crate::{bounded::limit_for, error::Result, key::Key, store::LeaseStore, wait::Turn};

/// How many readers there may be at once, so that the rows they leave behind stay few.
const READERS: u32 = 1024;

impl<S: LeaseStore> Leases<S> {
    /// A request for one of `permits` leases that the key stands for: at most so many hold one at a time.
    ///
    /// A permit is a lease like any other, named `<key>/permit/<number>`, with a fence that rises for that number. All
    /// who use the key should ask for the same number of permits; who asks for fewer uses the first ones only.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let first = leases.semaphore("report", 2).acquire().await?;
    /// let second = leases.semaphore("report", 2).acquire().await?;
    /// assert!(leases.semaphore("report", 2).try_acquire().await?.is_none());
    /// # drop((first, second)); Ok(()) }
    /// ```
    pub fn semaphore(&self, key: impl Into<Key>, permits: u32) -> LeaseRequest<S> {
        LeaseRequest::new(self.0.clone(), key.into(), Mode::Permit(permits))
    }

    /// Read and write leases of the key: many readers, or one writer.
    ///
    /// A writer that waits keeps new readers out, so writers do not starve. Readers hold leases named
    /// `<key>/reader/<number>`, 1,024 at most at a time, the writer one named `<key>/writer`; a lease of the key itself has
    /// nothing to do with them.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let first = leases.rw("catalog").read().acquire().await?;
    /// let second = leases.rw("catalog").read().acquire().await?;
    /// assert!(leases.rw("catalog").write().try_acquire().await?.is_none());
    /// # drop((first, second)); Ok(()) }
    /// ```
    pub fn rw(&self, key: impl Into<Key>) -> ReadWrite<S> {
        ReadWrite { leases: self.clone(), key: key.into() }
    }
}

/// Read and write leases of one key, made by [`Leases::rw`].
#[derive(Debug)]
#[must_use = "choose `read` or `write`"]
pub struct ReadWrite<S: LeaseStore> {
    leases: Leases<S>,
    key: Key,
}

impl<S: LeaseStore> ReadWrite<S> {
    /// A request for a lease that other readers may hold at the same time, and no writer.
    pub fn read(self) -> LeaseRequest<S> {
        LeaseRequest::new(self.leases.0, self.key, Mode::Read)
    }

    /// A request for a lease that nobody else holds at the same time, neither reader nor writer.
    pub fn write(self) -> LeaseRequest<S> {
        LeaseRequest::new(self.leases.0, self.key, Mode::Write)
    }
}

impl<S: LeaseStore> LeaseRequest<S> {
    /// One of the permits: any at first, then one that is free.
    pub(super) async fn ask_for_permit(&self, permits: u32, likely_free: bool) -> Result<Turn<Lease<S>>> {
        let named = |number| Key::from(format!("{}/permit/{number}", self.key));
        let mut key = likely_free.then(|| named(fastrand::u32(..permits)));
        loop {
            if let Some(key) = key
                && let Turn::Done(lease) = self.ask_for(&key, true).await?
            {
                return Ok(Turn::Done(lease));
            }
            let held = self.inner.store().list(&format!("{}/permit/", self.key), permits).await?;
            let taken: HashSet<_> = held.iter().map(|it| &it.info.key).collect();
            let free: Vec<_> = (0..permits).map(named).filter(|it| !taken.contains(it)).collect();
            key = fastrand::choice(free);
            if key.is_none() {
                return Ok(Turn::Held { free_in: held.iter().map(|it| it.info.expires_in).min() });
            }
        }
    }

    /// A reader first says that it reads and then looks for a writer; a writer first says that it writes and then looks
    /// for readers. Whoever comes second sees the other.
    pub(super) async fn ask_to_read(&self, likely_free: bool) -> Result<Turn<Lease<S>>> {
        let writer = self.writer();
        if !likely_free && let Some(held) = self.inner.store().look(&writer, limit_for(self.ttl)).await? {
            return Ok(Turn::Held { free_in: Some(held.info.expires_in) });
        }
        let Turn::Done(lease) = self.ask_for_number("reader", READERS).await? else {
            return Ok(Turn::Held { free_in: Some(Duration::ZERO) });
        };
        match self.inner.store().look(&writer, limit_for(self.ttl)).await? {
            None => Ok(Turn::Done(lease)),
            Some(held) => {
                lease.back_out().await?;
                Ok(Turn::Held { free_in: Some(held.info.expires_in) })
            }
        }
    }

    /// See [`ask_to_read`](Self::ask_to_read). The writer keeps its lease while it waits for the readers before it.
    pub(super) async fn ask_to_write(&self, place: &Place<S>, likely_free: bool) -> Result<Turn<Lease<S>>> {
        let writer = match place.take() {
            Some(writer) => writer,
            None => match self.ask_for(&self.writer(), likely_free).await? {
                Turn::Done(writer) => writer,
                held => return Ok(held),
            },
        };
        let readers = self.inner.store().list(&format!("{}/reader/", self.key), READERS).await?;
        let Some(last) = readers.iter().map(|it| it.info.expires_in).max() else {
            return Ok(Turn::Done(writer));
        };
        place.put(writer);
        Ok(Turn::Held { free_in: Some(last) })
    }

    /// A lease of the key's whose number does not matter.
    pub(super) async fn ask_for_number(&self, role: &str, numbers: u32) -> Result<Turn<Lease<S>>> {
        for _ in 0..8 {
            let key = Key::from(format!("{}/{role}/{}", self.key, fastrand::u32(..numbers)));
            if let Turn::Done(lease) = self.ask_for(&key, true).await? {
                return Ok(Turn::Done(lease));
            }
        }
        Ok(Turn::Held { free_in: None })
    }

    fn writer(&self) -> Key {
        format!("{}/writer", self.key).into()
    }
}
