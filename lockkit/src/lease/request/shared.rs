//! Several holders of one key: permits, readers and writers. Each holder has its own lease beside the key's lease.
//!
//! Permits, readers, writers and tickets are leases with keys below the requested one (`report/permit/3`,
//! `catalog/reader/17`, `catalog/writer`), so every store supports them, they expire, and operators see them. A reader
//! takes its own lease and then looks for a writer; a writer takes the writer's lease and then looks for readers. The
//! later of the two sees the other. The writer keeps its lease while it waits, so writers do not starve.
//!
//! There are at most 1,024 readers and 10,000 permits, so few rows are left behind. The first number is drawn at
//! random, in one round trip. If it is taken, the numbers in use are read and one of the others is drawn: a request is
//! refused only when no number is free.

use std::{collections::BTreeMap, time::Duration};

use super::{
    LeaseRequest,
    mode::{MAX_PERMITS, Mode},
    pending::Pending,
};
use crate::lease::{held::Lease, leases::Leases};
use crate::{
    lease::{
        bounded::limit_for,
        queue::wait::Outcome,
        store::{LeaseRecord, LeaseStore},
    },
    value::{error::Result, key::Key},
};

/// Maximum number of concurrent readers. It bounds the number of rows that they leave behind.
const READERS: u32 = 1024;

/// How often to try for a number that the store reports as free, if others take it first.
pub(super) const TRIES: u32 = 16;

impl<S: LeaseStore> Leases<S> {
    /// A request for one permit of a semaphore: at most `permits` holders have the key at a time.
    ///
    /// A permit is an ordinary lease named `<key>/permit/<number>`, with a fence that rises per number. All requests
    /// for the key should give the same number of permits, 1 to 10,000. A request that gives fewer uses only the first
    /// ones. [`take`](LeaseRequest::take) requests several permits together.
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
    /// A waiting writer blocks new readers, so writers do not starve. Readers hold leases named
    /// `<key>/reader/<number>`, at most 1,024 at a time. The writer holds a lease named `<key>/writer`. A lease of the
    /// key itself is independent of both.
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
    /// A request for a read lease. Other readers may hold the key at the same time, but no writer.
    pub fn read(self) -> LeaseRequest<S> {
        LeaseRequest::new(self.leases.0, self.key, Mode::Read)
    }

    /// A request for the write lease. No reader and no other writer holds the key at the same time.
    pub fn write(self) -> LeaseRequest<S> {
        LeaseRequest::new(self.leases.0, self.key, Mode::Write)
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// A reader first takes its lease and then looks for a writer. A writer first takes its lease and then looks for
    /// readers. So the second of the two always sees the first.
    pub(super) async fn try_read(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        let writer = self.writer();
        // The read lease of this task already blocks writers. A writer that waits now would wait for this lease too.
        let passes_writer = self.reads_already();
        if !passes_writer
            && !likely_free
            && let Some(held) = self.inner.store().look(&writer, limit_for(self.ttl)).await?
        {
            return Ok(Outcome::Held { free_in: Some(held.info.expires_in) });
        }
        let leases = match self.try_slot(pending, &self.readers(), READERS, true).await? {
            Outcome::Done(leases) => leases,
            held => return Ok(held),
        };
        match self.inner.store().look(&writer, limit_for(self.ttl)).await? {
            None => Ok(Outcome::Done(leases)),
            // Checked after this lease was granted, so the writer must wait for one of the two read leases.
            Some(_) if passes_writer && self.still_reads().await? => Ok(Outcome::Done(leases)),
            Some(held) => {
                for lease in leases {
                    lease.back_out().await?;
                }
                Ok(Outcome::Held { free_in: Some(held.info.expires_in) })
            }
        }
    }

    /// See [`try_read`](Self::try_read). The writer keeps its lease while it waits for the earlier readers.
    pub(super) async fn try_write(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        if !pending.has_gate() {
            match self.try_keys(pending, &[self.writer()], likely_free).await? {
                Outcome::Done(writer) => writer.into_iter().for_each(|it| pending.set_gate(it)),
                held => return Ok(held),
            }
        }
        let readers = self.list(&self.readers(), READERS).await?;
        match (readers.iter().map(|it| it.info.expires_in).max(), pending.take_gate()) {
            (None, Some(writer)) => Ok(Outcome::Done(vec![writer])),
            (last, Some(writer)) => {
                pending.set_gate(writer);
                Ok(Outcome::Held { free_in: last })
            }
            // The trust of the writer's lease ended in the meantime.
            (None, None) => Ok(Outcome::Silent),
            (last, None) => Ok(Outcome::Held { free_in: last }),
        }
    }

    /// Tries to take a lease whose key is `prefix` and a number below `slots`. If a random number is likely to be free,
    /// tries one first, then a number that the store reports as free. Refused if none is free, or if others were faster
    /// [`TRIES`] times.
    pub(super) async fn try_slot(
        &self,
        pending: &Pending<S>,
        prefix: &str,
        slots: u32,
        likely_free: bool,
    ) -> Result<Outcome<Vec<Lease<S>>>> {
        let mut number = likely_free.then(|| fastrand::u32(..slots));
        for _ in 0..TRIES {
            if let Some(number) = number {
                match self.try_keys(pending, &[Key::from(format!("{prefix}{number}"))], true).await? {
                    Outcome::Held { .. } => {}
                    outcome => return Ok(outcome),
                }
            }
            let held = self.list(prefix, MAX_PERMITS).await?;
            let taken = taken(&held, prefix, slots);
            let free = slots.saturating_sub(u32::try_from(taken.len()).unwrap_or(slots));
            if free == 0 {
                return Ok(Outcome::Held { free_in: taken.into_values().min() });
            }
            number = Some(nth_free(taken.into_keys(), fastrand::u32(..free)));
        }
        // Other requests were faster each time.
        Ok(Outcome::Held { free_in: None })
    }

    pub(super) fn writer(&self) -> Key {
        format!("{}/writer", self.key).into()
    }

    /// What the keys of the readers start with.
    pub(super) fn readers(&self) -> String {
        format!("{}/reader/", self.key)
    }

    /// What the keys of the permits start with.
    pub(super) fn permits(&self) -> String {
        format!("{}/permit/", self.key)
    }
}

/// The number of a lease whose key is `prefix` and a number below `slots`.
pub(super) fn number(key: &Key, prefix: &str, slots: u32) -> Option<u32> {
    key.strip_prefix(prefix)?.parse().ok().filter(|it| *it < slots)
}

/// The numbers below `slots` that are taken, and for how long.
pub(super) fn taken(held: &[LeaseRecord], prefix: &str, slots: u32) -> BTreeMap<u32, Duration> {
    held.iter().filter_map(|it| Some((number(&it.info.key, prefix, slots)?, it.info.expires_in))).collect()
}

/// The `nth` number that is not taken, counted from 0.
fn nth_free(taken: impl Iterator<Item = u32>, nth: u32) -> u32 {
    taken.fold(nth, |number, it| if it <= number { number + 1 } else { number })
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::{
        testing::{Failure, MemoryStore, Operation},
        value::error::Error,
    };

    #[test]
    fn the_nth_free_number_is_found_among_those_that_are_taken() {
        assert_eq!(nth_free([].into_iter(), 3), 3);
        let free = |nth| nth_free([0, 1, 4, 6].into_iter(), nth);
        assert_eq!([free(0), free(1), free(2), free(3)], [2, 3, 5, 7]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_lease_that_is_lost_while_the_writer_is_looked_for_is_not_returned() {
        let ttl = Duration::from_millis(300);
        let leases = Leases::builder(MemoryStore::new()).ttl(ttl).build().unwrap();
        leases.store().faults().script(Operation::Look, [Failure::Slow(ttl + ttl / 3)]);
        leases.store().faults().script(Operation::Renew, [Failure::Refused; 20]);
        let lease = leases.rw("k").read().acquire().await.unwrap();
        assert!(lease.is_trusted());
        // A single attempt does not return a lost one either.
        leases.store().faults().heal();
        leases.store().faults().script(Operation::Look, [Failure::Slow(ttl + ttl / 3)]);
        leases.store().faults().script(Operation::Renew, [Failure::Refused; 20]);
        assert!(leases.rw("k").read().try_acquire().await.is_err_and(|err| !err.is_contended()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_reads_may_read_again_before_a_writer_that_waits_for_it_and_not_beside_one() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let read = || here.rw("k").read().try_acquire();
        let body = async |reader: Lease<_>| {
            let writing = tokio::spawn(there.rw("k").write().acquire());
            sleep(Duration::from_secs(1)).await;
            drop(read().await?.expect("the writer waits for the body"));
            // This process does not know of the theft yet.
            store.steal(reader.key().clone()).unwrap();
            let writer = writing.await.unwrap()?;
            assert!(reader.is_trusted() && read().await?.is_none());
            drop(writer);
            Ok::<_, Error>(())
        };
        here.rw("k").read().run(body).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_reads_reads_again_in_the_time_of_a_first_answer_however_short_its_wait() {
        let leases = Leases::new(MemoryStore::new());
        let body = async |_| {
            let writing = tokio::spawn(leases.rw("k").write().acquire());
            sleep(Duration::from_secs(1)).await;
            leases.store().faults().slow(Duration::from_millis(60));
            drop(leases.rw("k").read().wait(Duration::from_millis(100)).acquire().await?);
            writing.abort();
            Ok::<_, Error>(())
        };
        leases.rw("k").read().run(body).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_single_attempt_took_on_the_way_is_released_when_it_returns() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let reader = there.rw("k").read().acquire().await.unwrap();
        here.store().faults().slow(Duration::from_millis(60));
        assert!(here.rw("k").write().try_acquire().await.unwrap().is_none());
        let left = there.list("k").await.unwrap();
        assert!(matches!(&*left, [left] if left.key == *reader.key()), "{left:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_under_another_lease_does_not_read_beside_a_writer() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let _writer = there.rw("k").write().acquire().await.unwrap();
        let reading = here.lease("other").run(async |_| here.rw("k").read().try_acquire().await);
        assert!(reading.await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_beyond_those_of_a_smaller_semaphore_is_not_counted() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let first = there.lease("k/permit/0").acquire().await.unwrap();
        let _beyond = there.lease("k/permit/1").acquire().await.unwrap();
        let waiting = tokio::spawn(here.semaphore("k", 1).wait(Duration::from_secs(5)).acquire());
        sleep(Duration::from_secs(1)).await;
        first.release().await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().key(), "k/permit/0");
    }
}
