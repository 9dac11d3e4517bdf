//! A lease store in memory. Its clock is Tokio's.
//!
//! The rest of lockkit (trust, renewal, waiting) uses Tokio's clock too, so with `start_paused` one clock drives
//! everything, in one order. `step_forward` and `step_back` simulate a clock that differs. Every call yields before and
//! after it, so a test that drops futures meets both "not done" and "done, not answered".

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use crate::{
    lease::store::{
        Acquired, AcquiredAll, Answer, Claim, Grant, LeaseInfo, LeaseRecord, LeaseStore, Previous, Profile, Release,
        Renewal,
    },
    mutex::Mutex,
    testing::faults::{Faults, Operation},
    value::{error::Result, fence::Fence, key::Key, token::Token},
};

/// The start time of every store's clock, 2026-01-01 in UTC, so that a test sees the same fences in every run.
const BEGINNING: Duration = Duration::from_secs(1_767_225_600);

/// How many fences belong to each grant, as in a database.
const FENCES: i64 = 256;

/// A [`LeaseStore`] in memory for tests. It behaves as the databases do, at the speed of memory, and a test controls
/// its clock.
///
/// The clock is that of [`tokio::time`]. Under `#[tokio::test(start_paused = true)]`, time passes only when no task can
/// run, or with `tokio::time::advance`. So expiry and renewal are the same in every run.
///
/// Clones are the same client of the same store. [`client`](Self::client) makes another client, with its own faults:
/// `Leases` on different clients behave as in different processes.
///
/// `Lease::verify` and `Lease::commit` are not available, because they need a database transaction.
///
/// # Example
/// ```
/// use std::time::Duration;
///
/// use lockkit::{Leases, testing::MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit::Result<()> {
/// let leases = Leases::new(MemoryStore::new());
/// let lease = leases.lease("k").acquire().await?;
/// tokio::time::sleep(Duration::from_secs(3600)).await;
/// assert!(lease.is_trusted(), "it is renewed in the background");
///
/// leases.store().steal("k");
/// lease.lost().await;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct MemoryStore {
    server: Arc<Server>,
    faults: Arc<Faults>,
}

#[derive(Debug)]
struct Server {
    started: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The total of all clock steps, in microseconds.
    stepped: i64,
    rows: BTreeMap<Key, Row>,
}

/// One key. It is remembered after its release.
#[derive(Debug)]
struct Row {
    token: Option<Token>,
    holder: Arc<str>,
    fence: i64,
    acquired: i64,
    expires: i64,
    /// The ttl of the last grant or renewal.
    ttl: i64,
    renewals: u64,
}

impl Row {
    /// Cuts an expiry that is further away than the ttl. In that case the row was written at a later time, so the clock
    /// was set back.
    fn cut(&mut self, now: i64) {
        let ahead = self.expires.saturating_sub(self.ttl).saturating_sub(now).max(0);
        self.expires -= ahead;
        self.acquired -= ahead;
    }

    /// Extends the lease to `ttl` from now, unless it lives longer.
    fn extend(&mut self, ttl: Duration, now: i64) {
        let (ttl, expires) = (micros(ttl), now.saturating_add(micros(ttl)));
        if self.expires <= expires {
            (self.expires, self.ttl) = (expires, ttl);
        }
        self.renewals += 1;
    }

    fn is_held(&self, now: i64) -> bool {
        self.token.is_some() && self.expires > now
    }

    fn is_held_by(&self, token: Token, now: i64) -> bool {
        self.token == Some(token) && self.expires > now
    }

    /// The last holder, if the lease has expired and was not released.
    fn expired(&self, now: i64) -> Option<Previous> {
        let expired = self.token.is_some_and(|it| !it.is_nobody()) && self.expires <= now;
        expired.then(|| Previous::new(&*self.holder, fence(self.fence), duration(now - self.expires)))
    }

    fn info(&self, key: &Key, now: i64) -> LeaseInfo {
        LeaseInfo {
            key: key.clone(),
            holder: self.holder.to_string(),
            fence: fence(self.fence),
            acquired_at: SystemTime::UNIX_EPOCH + duration(self.acquired),
            held_for: duration(now - self.acquired),
            expires_in: duration(self.expires - now),
            renewals: self.renewals,
            ttl: Some(duration(self.ttl)),
            is_this_process: false,
            is_released: false,
            flaw: None,
        }
    }
}

impl MemoryStore {
    /// A store without leases.
    pub fn new() -> Self {
        let server = Server { started: Instant::now(), state: Mutex::default() };
        Self { server: Arc::new(server), faults: Arc::new(Faults::new()) }
    }

    /// Another client of the same store, with its own faults. It stands for another process.
    #[must_use]
    pub fn client(&self) -> Self {
        Self { server: self.server.clone(), faults: Arc::new(Faults::new()) }
    }

    /// The faults between this client and the store.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Frees the lease at once, as an operator does. The holder is not notified. Returns the former holder.
    pub fn steal(&self, key: impl Into<Key>) -> Option<LeaseInfo> {
        let key = key.into();
        self.act(|rows, now| {
            let row = row(rows, &key, now).filter(|it| it.is_held(now))?;
            let info = row.info(&key, now);
            (row.token, row.expires) = (None, 0);
            Some(info)
        })
    }

    /// Makes the lease expire now, as if its holder had not renewed it. The next holder gets the former one as
    /// [`previous`](crate::Lease::previous). Returns the former holder.
    pub fn expire(&self, key: impl Into<Key>) -> Option<LeaseInfo> {
        let key = key.into();
        self.act(|rows, now| {
            let row = row(rows, &key, now).filter(|it| it.is_held(now))?;
            let info = row.info(&key, now);
            row.expires = now;
            Some(info)
        })
    }

    /// Steps the store's clock forward, in addition to the time that passes. Leases expire early; no lease algorithm
    /// can prevent that. Fences still rise.
    pub fn step_forward(&self, by: Duration) {
        let mut state = self.server.state.lock();
        state.stepped = state.stepped.saturating_add(micros(by));
    }

    /// Steps the store's clock back. A lease then lives longer than its ttl, but at most its ttl from the first request
    /// after the step that touches it. Fences still rise.
    pub fn step_back(&self, by: Duration) {
        let mut state = self.server.state.lock();
        state.stepped = state.stepped.saturating_sub(micros(by));
    }

    /// The current time of the store's clock.
    pub fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + duration(self.server.now(&self.server.state.lock()))
    }

    /// Runs one atomic operation at one instant.
    fn act<T>(&self, act: impl FnOnce(&mut BTreeMap<Key, Row>, i64) -> T) -> T {
        let mut state = self.server.state.lock();
        let now = self.server.now(&state);
        act(&mut state.rows, now)
    }
}

impl Server {
    fn now(&self, state: &State) -> i64 {
        micros(BEGINNING + self.started.elapsed()).saturating_add(state.stepped)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl LeaseStore for MemoryStore {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let act = || {
            self.act(|rows, now| match in_the_way(rows, claim, now) {
                Some(free_in) => Acquired::Held { free_in: Some(free_in) },
                None => Acquired::Granted(grant(rows, claim, now)),
            })
        };
        self.faults.call(Operation::Acquire, Some(&claim.key), act).await
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let act = || {
            self.act(|rows, now| {
                let held = claims.iter().find_map(|claim| Some((claim, in_the_way(rows, claim, now)?)));
                match held {
                    Some((claim, free_in)) => AcquiredAll::Held { key: claim.key.clone(), free_in: Some(free_in) },
                    None => AcquiredAll::Granted(claims.iter().map(|claim| grant(rows, claim, now)).collect()),
                }
            })
        };
        self.faults.call(Operation::Acquire, claims.first().map(|it| &it.key), act).await
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        let act = || {
            self.act(|rows, now| {
                let answer = |claim: &Claim| match in_the_way(rows, claim, now) {
                    Some(free_in) => Some(Acquired::Held { free_in: Some(free_in) }),
                    None => Some(Acquired::Granted(grant(rows, claim, now))),
                };
                claims.iter().map(answer).collect()
            })
        };
        self.faults.call(Operation::Acquire, claims.first().map(|it| &it.key), act).await
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        let act = || {
            self.act(|rows, now| {
                let row = row(rows, key, now).filter(|it| it.is_held(now))?;
                Some(LeaseRecord::new(row.token?, row.info(key, now)))
            })
        };
        self.faults.call(Operation::Look, Some(key), act).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let act = || {
            self.act(|rows, now| {
                let renew = |Renewal { key, token, ttl }: &Renewal| {
                    let Some(row) = row(rows, key, now).filter(|it| it.is_held_by(*token, now)) else {
                        return Answer::Gone;
                    };
                    row.extend(*ttl, now);
                    Answer::Done
                };
                renewals.iter().map(renew).collect()
            })
        };
        self.faults.call(Operation::Renew, renewals.first().map(|it| &it.key), act).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let release = Release { key: key.clone(), token, min_hold };
        let act = || self.act(|rows, now| released(rows, &release, now));
        self.faults.call(Operation::Release, Some(key), act).await
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let act = || self.act(|rows, now| releases.iter().map(|it| released(rows, it, now)).collect());
        self.faults.call(Operation::Release, releases.first().map(|it| &it.key), act).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let act = || {
            self.act(|rows, now| {
                let rows = rows.range_mut(Key::from(prefix)..).take_while(|(key, _)| key.starts_with(prefix));
                let held = rows.filter_map(|(key, row)| {
                    row.cut(now);
                    row.is_held(now).then_some(LeaseRecord::new(row.token?, row.info(key, now)))
                });
                held.take(limit as usize).collect()
            })
        };
        self.faults.call(Operation::List, None, act).await
    }

    async fn lease_expired(&self, prefix: &str, limit: u32) -> Result<Vec<(Key, Previous)>> {
        let act = || {
            self.act(|rows, now| {
                let rows = rows.range(Key::from(prefix)..).take_while(|(key, _)| key.starts_with(prefix));
                let expired = rows.filter_map(|(key, row)| Some((key.clone(), row.expired(now)?)));
                expired.take(limit as usize).collect()
            })
        };
        self.faults.call(Operation::List, None, act).await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        let act = || {
            self.act(|rows, now| {
                let then = now.saturating_sub(micros(retention));
                // A key whose fences are above the clock must be kept, because the next fence of a deleted key is made
                // from the clock.
                let old = rows.iter().filter(|(_, it)| it.expires < then && it.fence < then - FENCES);
                let old: Vec<_> = old.take(limit as usize).map(|(key, _)| key.clone()).collect();
                old.iter().filter_map(|it| rows.remove(it)).count() as u64
            })
        };
        self.faults.call(Operation::Sweep, None, act).await
    }

    fn profile(&self) -> Profile {
        Profile { batches: true, ..Profile::default() }
    }
}

/// The row of the key. If the clock was set back, the expiry is cut to count from now.
fn row<'a>(rows: &'a mut BTreeMap<Key, Row>, key: &Key, now: i64) -> Option<&'a mut Row> {
    let row = rows.get_mut(key)?;
    row.cut(now);
    Some(row)
}

/// Releases a lease that the token still holds.
fn released(rows: &mut BTreeMap<Key, Row>, Release { key, token, min_hold }: &Release, now: i64) -> Answer {
    let Some(row) = row(rows, key, now).filter(|it| it.is_held_by(*token, now)) else {
        return Answer::Gone;
    };
    let left = micros(*min_hold) - (now - row.acquired).max(0);
    (row.token, row.expires, row.ttl) = if left > 0 { (Some(Token::nobody()), now + left, left) } else { (None, 0, 0) };
    Answer::Done
}

/// How long another holder has the claimed lease. `None` if there is no other holder.
fn in_the_way(rows: &mut BTreeMap<Key, Row>, claim: &Claim, now: i64) -> Option<Duration> {
    let row = row(rows, &claim.key, now).filter(|it| it.is_held(now) && it.token != Some(claim.token))?;
    Some(duration(row.expires - now))
}

/// Grants a lease that no other holder has.
fn grant(rows: &mut BTreeMap<Key, Row>, claim: &Claim, now: i64) -> Grant {
    let Claim { key, token, holder, ttl, queue: _ } = claim;
    if let Some(row) = rows.get_mut(key).filter(|it| it.token == Some(*token)) {
        row.extend(*ttl, now);
        return granted(row.fence);
    }
    let (ttl, expires) = (micros(*ttl), now.saturating_add(micros(*ttl)));
    let before = rows.remove(key);
    let number = before.as_ref().map_or(now, |it| now.max(it.fence + FENCES));
    let (token, holder) = (Some(*token), holder.clone());
    let row = Row { token, holder, fence: number, acquired: now, expires, ttl, renewals: 0 };
    rows.insert(key.clone(), row);
    granted(number).after(before.and_then(|it| it.expired(now)))
}

fn granted(number: i64) -> Grant {
    let mut grant = Grant::from(fence(number));
    grant.spare_fences = FENCES.unsigned_abs() - 1;
    grant
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn fence(number: i64) -> Fence {
    Fence::from(u64::try_from(number).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::Leases;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn when_the_clock_is_set_back_the_dead_are_replaced_and_the_living_keep_their_leases() {
        let store = MemoryStore::new();
        let dead = Claim::new("dead", Token::random(), "dead", SECOND * 5);
        store.lease_acquire(&dead).await.expect("no faults were scripted");
        let leases = Leases::builder(store.client()).ttl(SECOND * 5).build().expect("a ttl that can be");
        let lease = leases.lease("living").acquire().await.expect("it is free");
        sleep(SECOND).await;
        store.step_back(SECOND * 600);

        let started = Instant::now();
        let others = Leases::builder(store.client()).wait(SECOND * 30).build().expect("a wait that can be");
        drop(others.lease("dead").acquire().await.expect("free after its ttl"));
        assert!(started.elapsed() <= SECOND * 6, "{:?}", started.elapsed());
        assert!(others.lease("living").acquire().await.is_err_and(|err| err.is_contended()));
        assert!(lease.is_trusted());
        let info = others.show("living").await.expect("no faults were scripted").expect("it is held");
        assert!(info.expires_in <= SECOND * 5 && info.held_for >= SECOND * 30, "{info:?}");
    }
}
