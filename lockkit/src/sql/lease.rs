//! The part of leases that all databases share: how rows are read, renewals are sent, and several leases are taken one
//! after the other.
//!
//! There is no index on the expiry, because each renewal would have to write it. So a statement that looks for unused
//! leases reads the used ones before them, and a sweep goes through the table in pages of keys.
//!
//! The fence is no counter: a counter goes back when its row is swept, its table is restored or a standby is promoted.
//! `greatest(previous + 1, clock in µs)` still rises then, if the clock has passed the fences that were lost. A sweep
//! deletes only rows that were free for a week and whose fence is a week below the clock, so a clock that steps back by
//! less cannot repeat a number.

use std::{
    future::Future,
    sync::atomic::{AtomicU8, Ordering},
    time::{Duration, SystemTime},
};

use tokio::time::{Instant, sleep};

use crate::{
    lease::{
        life::state::Pin,
        store::{
            Acquired, AcquiredAll, Answer, BUSY_PAUSE, Claim, Grant, LeaseInfo, LeaseRecord, Previous, Release, Renewal,
        },
    },
    mutex::Mutex,
    sql::{
        Dialect, Driver,
        units::{duration, fence, micros},
    },
    value::{error::Fault, fence::Fence, key::Key, token::Token},
};

/// How many fences belong to each grant. A fence is made from a clock in microseconds, so the clock is past them soon
/// after the answer arrives. Until then the next fence is made from the last one.
pub(super) const FENCES: u64 = 256;

/// No fence is as great.
const END_OF_FENCES: i64 = 1 << 62;

/// The last day of the year 9999, in microseconds since 1970.
const LAST_US: i64 = 253_402_214_400_000_000;

/// The grant of a lease whose first fence is this, before its last holder is known.
pub(super) fn granted(fence: Fence) -> Grant {
    let mut grant = Grant::from(fence);
    grant.spare_fences = FENCES - 1;
    grant
}

/// Leases in the table `lockkit_lease`.
#[diagnostic::on_unimplemented(
    message = "lockkit has no leases in the database `{Self}`",
    label = "leases need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::LeaseOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::LeaseOps`"
)]
pub trait LeaseOps: Dialect + LeaseStatements {}

/// The statements of leases. Hidden from the docs: users call the strategy.
pub trait LeaseStatements: Driver {
    /// Whether [`lease_acquire_each`](Self::lease_acquire_each) also takes leases that have no row yet. If not, claims
    /// are sent together while the last ones found released leases.
    const BATCHES_NEW: bool;

    /// See [`LeaseStore::lease_acquire`](crate::LeaseStore::lease_acquire).
    fn lease_acquire(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        claim: &Claim,
        last: &LastClaims,
    ) -> impl Future<Output = sqlx::Result<Acquired>> + Send;

    /// See [`LeaseStore::lease_acquire_all`](crate::LeaseStore::lease_acquire_all).
    fn lease_acquire_all(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        claims: &[Claim],
    ) -> impl Future<Output = sqlx::Result<AcquiredAll>> + Send;

    /// See [`LeaseStore::lease_acquire_each`](crate::LeaseStore::lease_acquire_each).
    fn lease_acquire_each(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        claims: &[Claim],
    ) -> impl Future<Output = sqlx::Result<Vec<Option<Acquired>>>> + Send;

    /// See [`LeaseStore::lease_look`](crate::LeaseStore::lease_look).
    fn lease_look(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LeaseRecord>>> + Send;

    /// Cuts the expiry of a lease to its ttl from now, if the row still has this expiry and ttl and expires later
    /// than that. Does not wait for the row.
    ///
    /// The expiry and ttl come from an earlier read because a statement's clock may be older than the row that it
    /// finds. A row that an earlier statement read cannot be written later than now, unless the clock was set back.
    fn lease_cut(
        conn: &mut Self::Connection,
        key: &Key,
        expires_us: i64,
        ttl_us: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// See [`LeaseStore::lease_renew`](crate::LeaseStore::lease_renew).
    fn lease_renew(
        conn: &mut Self::Connection,
        renewals: &[Renewal],
    ) -> impl Future<Output = sqlx::Result<Vec<Answer>>> + Send;

    /// See [`LeaseStore::lease_release`](crate::LeaseStore::lease_release).
    fn lease_release(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> impl Future<Output = sqlx::Result<Answer>> + Send;

    /// See [`LeaseStore::lease_release_unpinned`](crate::LeaseStore::lease_release_unpinned).
    fn lease_release_unpinned(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        key: &Key,
        token: Token,
    ) -> impl Future<Output = sqlx::Result<Answer>> + Send;

    /// See [`LeaseStore::lease_release_all`](crate::LeaseStore::lease_release_all).
    fn lease_release_all(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        releases: &[Release],
        pin: Pin,
    ) -> impl Future<Output = sqlx::Result<Vec<Answer>>> + Send;

    /// Inside a transaction: prevents others from taking the lease until the transaction ends. In READ COMMITTED on
    /// PostgreSQL, MySQL and MariaDB its holder can still renew it. `false` when the token no longer holds it.
    fn lease_pin(
        conn: &mut Self::Connection,
        key: &Key,
        token: Token,
        ttl: Duration,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Inside a transaction: releases the lease as part of it. `false` when the token no longer holds it. With
    /// [`Pin::Certain`], an expired lease is released too: the pin prevented others from taking it. Without
    /// [`Pin::No`], another transaction may have pinned it, and still be open after this one.
    fn lease_release_in_tx(
        conn: &mut Self::Connection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pin: Pin,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// See [`LeaseStore::lease_list`](crate::LeaseStore::lease_list).
    fn lease_list(
        conn: &mut Self::Connection,
        prefix: &str,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<Vec<LeaseRecord>>> + Send;

    /// See [`LeaseStore::lease_expired`](crate::LeaseStore::lease_expired).
    fn lease_expired(
        conn: &mut Self::Connection,
        prefix: &str,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<Vec<(Key, Previous)>>> + Send;

    /// Among the first [`PAGE`] leases whose key is greater than `after`, deletes up to `limit` that had no holder for
    /// `retention`, and returns how many were deleted.
    fn lease_sweep(
        conn: &mut Self::Connection,
        retention: Duration,
        limit: u32,
        after: &str,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Deletes stored answers that have expired, at most `limit`, and returns how many. Waits for no request.
    fn answers_sweep(conn: &mut Self::Connection, limit: u32) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// The last key of those that [`lease_sweep`](Self::lease_sweep) looks at. `None` if there are fewer than [`PAGE`].
    fn lease_page_end(
        conn: &mut Self::Connection,
        after: &str,
    ) -> impl Future<Output = sqlx::Result<Option<String>>> + Send;
}

/// How many leases one statement of a sweep looks at. A statement that looked for unused leases in the whole table
/// would read all of the used ones.
pub(super) const PAGE: u32 = 1000;

/// How long one sweep may take.
const SWEEP_TIME: Duration = Duration::from_secs(2);

/// Where the last sweep through a pool ended, if it did not reach the last key in time. A sweep of a large table goes
/// on there the next time.
#[derive(Default)]
pub(super) struct SweptTo(Mutex<Option<String>>);

/// See [`LeaseStore::lease_sweep`](crate::LeaseStore::lease_sweep).
pub(super) async fn lease_sweep<DB: LeaseOps>(
    conn: &mut DB::Connection,
    swept_to: &SweptTo,
    retention: Duration,
    limit: u32,
) -> sqlx::Result<u64> {
    let started = Instant::now();
    let mut after = swept_to.0.lock().clone().unwrap_or_default();
    let mut swept = 0;
    loop {
        // Before the sweep, which makes the page shorter.
        let end = DB::lease_page_end(conn, &after).await?;
        swept += DB::lease_sweep(conn, retention, limit - u32::try_from(swept).unwrap_or(limit), &after).await?;
        if swept >= limit.into() {
            // There may be more in this page.
            return Ok(swept);
        }
        let Some(end) = end.filter(|it| *it != after) else {
            *swept_to.0.lock() = None;
            return Ok(swept);
        };
        after = end;
        // Kept at each step: the time of a call may end in the middle.
        *swept_to.0.lock() = Some(after.clone());
        if started.elapsed() >= SWEEP_TIME {
            return Ok(swept);
        }
    }
}

/// Deletes stored answers that have expired.
pub(super) async fn answers_sweep<DB: LeaseOps>(conn: &mut DB::Connection, limit: u32) -> sqlx::Result<()> {
    let started = Instant::now();
    while limit > 0 && started.elapsed() < SWEEP_TIME / 2 {
        match DB::answers_sweep(conn, limit).await {
            Ok(swept) if swept >= limit.into() => {}
            Ok(_) => break,
            // Its migration has not been applied, or the user has no right to it: leases do not need it.
            Err(err) if DB::fault(&err) == Fault::NoTable || DB::is_denied(&err) => break,
            // The next sweep tries again.
            Err(err) if DB::fault(&err).is_of_the_moment() => break,
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

/// Whether the last claims through a pool were of leases that had been released. Then the next one is sent as a
/// statement that takes released leases only, on SQLite also new ones, which costs least. A lease that has no row yet
/// or has expired would need a second statement then, as does on PostgreSQL and SQLite one that is held; so after one
/// of these, claims are sent as the statement for all of them.
#[derive(Debug, Default)]
pub struct LastClaims(AtomicU8);

impl LastClaims {
    /// How many of them decide.
    const ENOUGH: u8 = 3;

    pub(super) fn were_of_released(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= Self::ENOUGH
    }

    /// Records whether a claim found a released lease.
    pub(super) fn note(&self, was_released: bool) {
        let before = self.0.load(Ordering::Relaxed);
        let after = if was_released { (before + 1).min(Self::ENOUGH) } else { 0 };
        if after != before {
            self.0.store(after, Ordering::Relaxed);
        }
    }
}

/// Takes leases one after the other, where the database has no statement for all of them. After an error that is no
/// refusal, the claims release in the background what was granted.
pub(super) async fn lease_acquire_in_order<DB: LeaseOps>(
    conn: &mut DB::Connection,
    grammar: DB::Grammar,
    claims: &[Claim],
) -> sqlx::Result<AcquiredAll> {
    let mut grants = Vec::with_capacity(claims.len());
    for claim in claims {
        let free_in = match DB::lease_acquire(conn, grammar, claim, &LastClaims::default()).await {
            Ok(Acquired::Granted(grant)) => {
                grants.push(grant);
                continue;
            }
            Ok(Acquired::Held { free_in }) => free_in,
            // The error concerns the whole database; the caller interprets it.
            Err(err) if !DB::fault(&err).is_of_the_moment() || !DB::IS_REMOTE && grants.is_empty() => return Err(err),
            Err(_) => None,
        };
        lease_release_granted::<DB>(conn, grammar, &claims[..grants.len()]).await?;
        return Ok(AcquiredAll::Held { key: claim.key.clone(), free_in });
    }
    Ok(AcquiredAll::Granted(grants))
}

/// Releases leases that were granted a moment ago. Another claim may lock the row briefly, so this retries.
pub(super) async fn lease_release_granted<DB: LeaseOps>(
    conn: &mut DB::Connection,
    grammar: DB::Grammar,
    claims: &[Claim],
) -> sqlx::Result<()> {
    for Claim { key, token, .. } in claims {
        loop {
            match DB::lease_release_unpinned(conn, grammar, key, *token).await {
                Ok(Answer::Done | Answer::Gone) => break,
                Ok(Answer::Busy) => {}
                Err(err) if DB::fault(&err).is_of_the_moment() => {}
                Err(err) => return Err(err),
            }
            sleep(BUSY_PAUSE).await;
        }
    }
    Ok(())
}

/// The columns of a lease's row, the same on every database.
#[derive(Debug, Clone)]
pub(super) struct HeldRow<'a> {
    /// Text, which need not be UTF-8 if lockkit has not written it.
    pub(super) name: &'a [u8],
    pub(super) token: Vec<u8>,
    /// Text, as `name`.
    pub(super) holder: &'a [u8],
    pub(super) fence: i64,
    pub(super) acquired_us: i64,
    pub(super) now_us: i64,
    pub(super) expires_us: i64,
    pub(super) ttl_us: Option<i64>,
    pub(super) renewals: i64,
}

/// A held lease, as read from its row.
pub(super) struct Found {
    held: LeaseRecord,
    /// The expiry and the ttl of a row that was written at a later time than now: the clock was set back since.
    ahead: Option<(i64, i64)>,
}

impl HeldRow<'_> {
    /// The lease, also of a row that lockkit cannot have written: it must not hide the others.
    pub(super) fn found(self) -> Found {
        let flaw = self.flaw();
        let Self { name, token, holder, fence: number, acquired_us, now_us, expires_us, ttl_us, renewals } = self;
        // The token of a flawed row may be that of no row.
        let token = <[u8; 16]>::try_from(token).map_or_else(|_| Token::random(), Token::from_bytes);
        let ahead = ttl_us.filter(|ttl_us| flaw.is_none() && is_ahead(expires_us, *ttl_us, now_us));
        let ahead = ahead.map(|ttl_us| (expires_us, ttl_us));
        // Saturating: an operator may have written any number.
        let cut_us = ahead.map_or(0, |(expires_us, ttl_us)| expires_us.saturating_sub(ttl_us).saturating_sub(now_us));
        let acquired_us = acquired_us.saturating_sub(cut_us);
        let info = LeaseInfo {
            key: Key::from(&*String::from_utf8_lossy(name)),
            holder: String::from_utf8_lossy(holder).into_owned(),
            fence: fence(number),
            acquired_at: SystemTime::UNIX_EPOCH + duration(acquired_us.min(LAST_US)),
            held_for: duration(now_us.saturating_sub(acquired_us)),
            expires_in: duration(expires_us.saturating_sub(cut_us).saturating_sub(now_us)),
            renewals: u64::try_from(renewals).unwrap_or(0),
            ttl: ttl_us.map(duration),
            is_this_process: false,
            is_released: false,
            flaw,
        };
        Found { held: LeaseRecord { token, info }, ahead }
    }

    /// The last holder, of a row that has expired.
    pub(super) fn expired(self) -> (Key, Previous) {
        let Self { name, holder, fence: number, now_us, expires_us, .. } = self;
        let holder = String::from_utf8_lossy(holder);
        let expired_for = duration(now_us.saturating_sub(expires_us));
        (Key::from(&*String::from_utf8_lossy(name)), Previous::new(holder, fence(number), expired_for))
    }

    /// Why lockkit cannot have written the row.
    fn flaw(&self) -> Option<&'static str> {
        let is_key = str::from_utf8(self.name).is_ok_and(|it| Key::new(it).is_ok());
        let flaws = [
            (!is_key, "its name is not a key"),
            (self.token.len() != 16, "its token does not have 16 bytes"),
            (!(1..END_OF_FENCES).contains(&self.fence), "its fence is not between 1 and 2^62"),
            (!(0..=LAST_US).contains(&self.acquired_us), "it was acquired before 1970 or after 9999"),
            (self.ttl_us.is_some_and(|it| it < 0), "its ttl is negative"),
            (self.renewals < 0, "its number of renewals is negative"),
        ];
        flaws.into_iter().find_map(|(is_so, flaw)| is_so.then_some(flaw))
    }
}

/// Whether a row was granted or renewed at a later time than now.
pub(super) fn is_ahead(expires_us: i64, ttl_us: i64, now_us: i64) -> bool {
    expires_us.saturating_sub(ttl_us) > now_us
}

/// The held leases. If the clock was set back, their expiries are cut in the store too.
pub(super) async fn leases_found<DB: LeaseOps>(
    conn: &mut DB::Connection,
    found: impl Iterator<Item = sqlx::Result<Found>>,
) -> sqlx::Result<Vec<LeaseRecord>> {
    let found = found.collect::<sqlx::Result<Vec<_>>>()?;
    let mut leases = Vec::with_capacity(found.len());
    for Found { held, ahead } in found {
        if let Some((expires_us, ttl_us)) = ahead {
            lease_cut::<DB>(conn, &held.info.key, expires_us, ttl_us).await?;
        }
        leases.push(held);
    }
    Ok(leases)
}

/// Cuts the expiry. Ignores a transient fault and a read-only server: the next look tries again.
pub(super) async fn lease_cut<DB: LeaseOps>(
    conn: &mut DB::Connection,
    key: &Key,
    expires_us: i64,
    ttl_us: i64,
) -> sqlx::Result<()> {
    match DB::lease_cut(conn, key, expires_us, ttl_us).await {
        Err(err) if DB::fault(&err).is_of_the_moment() || DB::fault(&err) == Fault::ReadOnly => Ok(()),
        done => done,
    }
}

/// The previous holder, from the row before the claim. `None` when the lease had been released.
pub(super) fn previous(holder: String, number: i64, token: Option<&[u8]>, expired_us: i64) -> Option<Previous> {
    let token = Token::from_bytes(token?.try_into().ok()?);
    (!token.is_nobody()).then(|| Previous { holder, fence: fence(number), expired_for: duration(expired_us) })
}

/// Claims or renewals as one parameter: JSON rows of name and token in hexadecimal digits, and ttl.
pub(super) fn ttls_json<'k>(leases: impl Iterator<Item = (&'k Key, &'k Token, Duration)>) -> String {
    let row = |(key, token, ttl): (&Key, &Token, _)| {
        format!(r#"["{}","{}",{}]"#, hex(key.as_bytes()), hex(token.as_bytes()), micros(ttl))
    };
    format!("[{}]", leases.map(row).collect::<Vec<_>>().join(","))
}

/// Releases as one parameter: as [`ttls_json`], with the `min_hold`, and the token that stays in the row until
/// `min_hold` has passed.
pub(super) fn releases_json(releases: &[Release]) -> String {
    let row = |Release { key, token, min_hold }: &Release| {
        let (name, token, nobody) = (hex(key.as_bytes()), hex(token.as_bytes()), hex(Token::nobody().as_bytes()));
        format!(r#"["{name}","{token}",{},"{nobody}"]"#, micros(*min_hold))
    };
    format!("[{}]", releases.iter().map(row).collect::<Vec<_>>().join(","))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02X}"))
}

/// The smallest text that is greater than every text that starts with `prefix`. Without this bound, a list of the
/// leases with a prefix would read all rows after them.
pub(super) fn prefix_end(prefix: &str) -> String {
    let end = prefix.char_indices().rev().find_map(|(at, last)| {
        let next = (last..=char::MAX).nth(1)?;
        Some(format!("{}{next}", &prefix[..at]))
    });
    // Greater than every key: keys have 255 bytes at most.
    end.unwrap_or_else(|| char::MAX.to_string().repeat(64))
}

/// A row of a lease is read whatever is in it, and what lockkit cannot have written is called a flaw. The numbers are
/// the fence, the times of the grant, of now and of the expiry, and the renewals. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_lease_row(name: &[u8], token: &[u8], numbers: [i64; 5], ttl_us: Option<i64>) {
    let [fence, acquired_us, now_us, expires_us, renewals] = numbers;
    let (token, length) = (token.to_vec(), token.len());
    let row = HeldRow { name, token, holder: name, fence, acquired_us, now_us, expires_us, ttl_us, renewals };
    row.clone().expired();
    let Found { held, ahead } = row.found();
    assert!(held.info.flaw.is_some() || length == 16);
    assert!(held.info.flaw.is_none() || ahead.is_none(), "it is left as it is");
}

/// All keys that start with a prefix are below its end. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_prefix(prefix: &str, rest: &str) {
    let name = [prefix, rest].concat();
    if name.len() <= Key::MAX_BYTES {
        let end = prefix_end(prefix);
        assert!(*prefix <= *name && *name < *end, "{name:?} {end:?}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_row_with_any_numbers_is_read(
            numbers in proptest::array::uniform5(prop_oneof![any::<i64>(), Just(i64::MAX), Just(i64::MIN), 0..9_i64]),
            ttl_us in proptest::option::of(any::<i64>()),
            token in proptest::collection::vec(any::<u8>(), 15..18),
            name in proptest::collection::vec(any::<u8>(), 0..4),
        ) {
            check_lease_row(&name, &token, numbers, ttl_us);
        }

        #[test]
        fn any_key_is_below_the_end_of_its_prefix(prefix in "(\u{10ffff}|\u{d7ff}|\\PC){0,9}", rest in "\\PC{0,9}") {
            check_prefix(&prefix, &rest);
        }
    }

    #[test]
    fn a_row_that_lockkit_cannot_have_written_says_why() {
        let row = HeldRow {
            name: b"k",
            token: vec![7; 16],
            holder: b"host",
            fence: 1,
            acquired_us: 1,
            now_us: 2,
            expires_us: 3,
            ttl_us: Some(2),
            renewals: 0,
        };
        let flaw = |row: HeldRow<'_>| row.found().held.info.flaw.unwrap_or("none");
        assert_eq!(flaw(row.clone()), "none");
        for (row, expected) in [
            (HeldRow { name: b"\xff", ..row.clone() }, "its name is not a key"),
            (HeldRow { name: b"", ..row.clone() }, "its name is not a key"),
            (HeldRow { token: vec![7; 15], ..row.clone() }, "its token does not have 16 bytes"),
            (HeldRow { fence: 0, ..row.clone() }, "its fence is not between 1 and 2^62"),
            (HeldRow { fence: 1 << 62, ..row.clone() }, "its fence is not between 1 and 2^62"),
            (HeldRow { acquired_us: -1, ..row.clone() }, "it was acquired before 1970 or after 9999"),
            (HeldRow { acquired_us: i64::MAX, ..row.clone() }, "it was acquired before 1970 or after 9999"),
            (HeldRow { ttl_us: Some(-1), ..row.clone() }, "its ttl is negative"),
            (HeldRow { renewals: -1, ..row.clone() }, "its number of renewals is negative"),
        ] {
            assert_eq!(flaw(row), expected);
        }
    }

    #[test]
    fn the_end_of_a_prefix_is_greater_than_all_that_starts_with_it_and_no_more() {
        assert_eq!(prefix_end("k/queue/"), "k/queue0");
        assert_eq!(prefix_end("k\u{d7ff}"), "k\u{e000}");
        assert_eq!(prefix_end("k\u{10ffff}"), "l");
        assert!(*prefix_end("") > *char::MAX.to_string().repeat(63));
    }
}
