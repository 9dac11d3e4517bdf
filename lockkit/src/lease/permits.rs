//! Several permits of one semaphore together: all of them or none.
//!
//! Permits that are free at once are taken at once, and nothing is kept otherwise. A request that has waited for long enough to
//! have a ticket takes the lease `<key>/permit/gather`, which one request at a time can have, and from then on keeps what it
//! gets. So requests that take one permit each do not starve it, and two that gather never wait for each other.

use std::{collections::BTreeMap, future::Future, time::Duration};

use super::{
    held::Lease,
    place::Place,
    request::{LeaseRequest, Mode},
    set::{Asked, MultiLease, ask_all},
    shared::{MAX_PERMITS, TRIES},
};
use crate::{
    error::{Error, Result},
    key::Key,
    lease::{
        store::LeaseStore,
        wait::{Turn, observed},
    },
    observe::Strategy,
    policy::{OnLost, Wait},
};

/// A request for several permits of one semaphore, made by [`LeaseRequest::take`].
#[derive(Debug)]
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct PermitsRequest<S: LeaseStore>(LeaseRequest<S>);

impl<S: LeaseStore> PermitsRequest<S> {
    /// The settings are those of the request for one permit.
    pub(super) fn new(mut request: LeaseRequest<S>, take: u32) -> Self {
        if let Mode::Permit(of) = request.mode {
            request.mode = Mode::Permits { of, take };
        }
        Self(request)
    }

    /// How long the permits live without a renewal. At least 50 ms.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) try before they give up; zero tries once. Defaults to the
    /// wait of the [`Leases`](crate::Leases): [`Wait::DEFAULT`], 10 s, unless set there.
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait))
    }

    /// As [`LeaseRequest::min_hold`], for each of the permits.
    pub fn min_hold(self, min_hold: Duration) -> Self {
        Self(self.0.min_hold(min_hold))
    }

    /// What becomes of the body of [`run`](Self::run) when one of the permits is lost. Defaults to [`OnLost::Stop`].
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        Self(self.0.on_lost(on_lost))
    }

    /// The permits, as soon as so many are free.
    ///
    /// Requests of one process are served in the order in which they came, those for one permit too. A request that has
    /// waited for 50 ms and is next keeps the permits that come free until it has enough; one request of a key at a time does
    /// so, and holds the lease `<key>/permit/gather` meanwhile. [`Leases::list`](crate::Leases::list) shows one lease
    /// `<key>/permit/<number>` for each permit.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for no permit, for more than the semaphore has, and for a request that is no semaphore's;
    /// [`Error::Contended`] after the wait, with one of the holders, and with nothing kept; otherwise those of
    /// [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    /// As [`LeaseRequest::acquire`]: what was granted is given back at once.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let permits = leases.semaphore("gpu", 8).take(4).acquire().await?;
    /// assert_eq!(leases.list("gpu/permit/").await?.len(), 4);
    /// permits.release().await?;
    /// # Ok(()) }
    /// ```
    #[must_use = "await it, and bind the leases: `let permits = ….acquire().await?`"]
    pub async fn acquire(self) -> Result<MultiLease<S>> {
        let Self(request) = self;
        check(&request)?;
        request.check_not_reentrant()?;
        let place = Place::default();
        let last = observed(Strategy::Lease, &request.key, Box::pin(request.wait_for_it(&place))).await?;
        Ok(together(&request, &place, last))
    }

    /// The permits if so many are free now; `None` otherwise. Asks once and does not queue.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), without [`Error::Contended`].
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn try_acquire(self) -> Result<Option<MultiLease<S>>> {
        let Self(request) = self;
        check(&request)?;
        let place = Place::default();
        Ok(request.try_in(&place).await?.map(|last| together(&request, &place, last)))
    }

    /// Acquires the permits, runs `body`, and releases them. As [`LeaseRequest::run`], where the loss of one permit is the
    /// loss of all.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and whatever the body returns.
    ///
    /// # Cancel safety
    /// Dropping this future drops the body and releases the permits in the background.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(MultiLease<S>) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let permits = self.acquire().await?;
        let body = body(permits.borrowed());
        permits.end_with(Box::pin(body)).await
    }
}

fn check<S: LeaseStore>(request: &LeaseRequest<S>) -> Result<()> {
    if !matches!(request.mode, Mode::Permits { .. }) {
        let reason = "is for the permits of a semaphore; ask for several keys with `Leases::all`".to_owned();
        return Err(Error::InvalidOption { option: "take", reason });
    }
    request.check()
}

/// What was granted last, and before.
fn together<S: LeaseStore>(request: &LeaseRequest<S>, place: &Place<S>, last: Lease<S>) -> MultiLease<S> {
    let mut leases = place.take_gathered();
    leases.push(last);
    MultiLease::new(leases, request.on_lost).handed_out()
}

impl<S: LeaseStore> LeaseRequest<S> {
    /// All of the permits, of which the answer is the last one and the place has the others.
    pub(super) async fn ask_for_permits(&self, place: &Place<S>, of: u32, take: u32) -> Result<Turn<Lease<S>>> {
        let turn = self.ask_for_missing(place, of, take).await?;
        // Who gathers next would wait for what is kept here, and this request for what that one keeps.
        if !matches!(turn, Turn::Done(_)) && !place.has_gate() {
            drop(place.take_gathered());
        }
        Ok(turn)
    }

    async fn ask_for_missing(&self, place: &Place<S>, of: u32, take: u32) -> Result<Turn<Lease<S>>> {
        let prefix = format!("{}/permit/", self.key);
        for _ in 0..TRIES {
            let missing = take.saturating_sub(place.gathered());
            let held = self.inner.store().list(&prefix, MAX_PERMITS).await?;
            let number = |key: &Key| key.strip_prefix(&*prefix)?.parse().ok().filter(|it| *it < of);
            let taken: BTreeMap<u32, Duration> =
                held.iter().filter_map(|it| Some((number(&it.info.key)?, it.info.expires_in))).collect();
            let mut free: Vec<u32> = (0..of).filter(|it| !taken.contains_key(it)).collect();
            let is_enough = free.len() >= usize::try_from(missing).unwrap_or(usize::MAX);
            let free_in = taken.into_values().min();
            if !is_enough && !place.has_gate() {
                let gather = Key::from(format!("{prefix}gather"));
                if place.ticket().is_none() || gather.check().is_err() {
                    return Ok(Turn::Held { free_in });
                }
                match self.ask_for(&gather, true).await? {
                    Turn::Done(gate) => place.set_gate(gate),
                    turn => return Ok(turn),
                }
            }
            fastrand::shuffle(&mut free);
            free.truncate(usize::try_from(missing).unwrap_or(usize::MAX));
            if free.is_empty() {
                return Ok(Turn::Held { free_in });
            }
            let mut keys: Vec<Key> = free.iter().map(|it| format!("{prefix}{it}").into()).collect();
            keys.sort_unstable();
            keys.iter().try_for_each(Key::check)?;
            let claims = keys.iter().map(|it| self.claim(it)).collect();
            match ask_all(self.inner.clone(), claims, |_| self.terms()).await? {
                Asked::Granted(leases) if is_enough => {
                    let mut leases = leases.into_iter();
                    let last = leases.next().expect("BUG: at least one was asked for");
                    place.gather(leases);
                    // One that was gathered before may be lost by now.
                    if place.gathered() + 1 == take {
                        return Ok(Turn::Done(last));
                    }
                    place.gather([last]);
                }
                Asked::Granted(leases) => place.gather(leases),
                // Others were faster.
                Asked::Held { .. } => {}
                Asked::Silent => return Ok(Turn::Silent),
            }
        }
        Ok(Turn::Held { free_in: None })
    }
}
