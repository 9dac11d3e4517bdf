//! The telemetry of lockkit: events and spans by `tracing`, counters, gauges and histograms by `metrics`. Each name is
//! written here and nowhere else.
//!
//! Keys are fields of events. As labels of metrics, keys would be unbounded; only the part before the first `:` or `/`
//! is used, as `prefix`, which is empty for a key without one.

use std::{error::Error as StdError, future::Future, time::Duration};

#[cfg(feature = "sql")]
use std::panic::Location;

use tokio::time::Instant;
use tracing::{Instrument, Span};

use crate::value::{
    error::{LossReason, Result},
    fence::Fence,
    key::Key,
};

/// The target of every span and event, which is not the path of a module.
const TARGET: &str = "lockkit";

/// Which lock it is about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Strategy {
    Lease,
    Named,
    Idempotent,
    Row,
    Session,
}

impl Strategy {
    fn name(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Named => "named",
            Self::Idempotent => "idempotent",
            Self::Row => "row",
            Self::Session => "session",
        }
    }
}

/// The span of waiting for a lock.
pub(crate) fn acquiring(strategy: Strategy, key: &Key) -> Span {
    tracing::debug_span!(target: TARGET, "lockkit.acquire", strategy = strategy.name(), %key)
}

/// The span of a body that runs under a lock.
pub(crate) fn holding(strategy: Strategy, key: &Key) -> Span {
    tracing::debug_span!(target: TARGET, "lockkit.hold", strategy = strategy.name(), %key)
}

/// Takes a lock, and tells of it and of the wait for it.
pub(crate) async fn observed<T>(strategy: Strategy, key: &Key, taking: impl Future<Output = Result<T>>) -> Result<T> {
    let started = Instant::now();
    let taken = {
        let _waiting = Gauged::one_more("lockkit_waiting", strategy, key);
        taking.instrument(acquiring(strategy, key)).await
    };
    match &taken {
        Ok(_) => acquired(strategy, key, started.elapsed()),
        Err(err) if err.is_contended() => contended(strategy, key, started.elapsed()),
        Err(_) => {}
    }
    taken
}

/// A lock was taken.
pub(crate) fn acquired(strategy: Strategy, key: &Key, waited: Duration) {
    tracing::debug!(target: TARGET, strategy = strategy.name(), %key, ?waited, "acquired");
    count("lockkit_acquired_total", strategy, key);
    record("lockkit_wait_seconds", strategy, key, waited);
}

/// The caller has a lease or session lock until the result is dropped.
pub(crate) fn held(strategy: Strategy, key: &Key) -> Gauged {
    Gauged::one_more("lockkit_held", strategy, key)
}

/// Somebody else held the lock to the end of the wait.
pub(crate) fn contended(strategy: Strategy, key: &Key, waited: Duration) {
    tracing::debug!(target: TARGET, strategy = strategy.name(), %key, ?waited, "contended");
    count("lockkit_contended_total", strategy, key);
    record("lockkit_wait_seconds", strategy, key, waited);
}

/// A caller under the lease `other` waits for that of `key`, and another caller of this process the other way round.
pub(crate) fn opposite_order(key: &Key, other: &Key) {
    tracing::warn!(
        target: TARGET, %key, %other,
        "two callers wait for each other's lease: acquire both in one order, or together by `Leases::all`"
    );
}

/// A holder handed its lease over to the next caller of its process.
pub(crate) fn handed_over(strategy: Strategy, key: &Key) {
    count("lockkit_handed_on_total", strategy, key);
}

/// A lease was released.
pub(crate) fn released(strategy: Strategy, key: &Key, fence: Fence, held: Duration) {
    tracing::debug!(target: TARGET, strategy = strategy.name(), %key, %fence, ?held, "released");
    record("lockkit_hold_seconds", strategy, key, held);
}

/// A lease or session lock was lost. Session locks have no fence.
pub(crate) fn lost(strategy: Strategy, key: &Key, fence: Option<Fence>, held: Duration, reason: LossReason) {
    let fence = fence.map(tracing::field::display);
    tracing::warn!(target: TARGET, strategy = strategy.name(), %key, fence, ?held, ?reason, "lost");
    count("lockkit_lost_total", strategy, key);
    record("lockkit_hold_seconds", strategy, key, held);
}

/// Leases were renewed by one statement.
pub(crate) fn renewed(leases: usize, took: Duration) {
    tracing::debug!(target: TARGET, leases, ?took, "renewed");
    renewal("answered", took);
}

/// A statement that renews leases failed, or was not answered in time.
pub(crate) fn renewal_failed(took: Duration) {
    renewal("failed", took);
}

/// The first of perhaps many renewals that failed.
pub(crate) fn outage(leases: usize, error: &(dyn StdError + 'static)) {
    tracing::warn!(target: TARGET, leases, error, "cannot renew leases");
}

/// The first renewal that worked again.
pub(crate) fn outage_over() {
    tracing::info!(target: TARGET, "renewing leases again");
}

/// The first of perhaps many requests for the lease of a leader that the store did not answer.
pub(crate) fn cannot_campaign(key: &Key, error: &(dyn StdError + 'static)) {
    tracing::warn!(target: TARGET, %key, error, "cannot ask to lead");
}

/// Old keys were forgotten.
pub(crate) fn swept(keys: u64) {
    tracing::debug!(target: TARGET, keys, "swept");
}

/// What the server is not suited for.
pub(crate) fn caveat(caveat: &'static str) {
    tracing::warn!(target: TARGET, "{caveat}");
}

/// A transaction was committed.
pub(crate) fn committed() {
    tracing::debug!(target: TARGET, "committed");
}

/// An attempt failed for a passing reason, and there will be another.
pub(crate) fn retried(attempt: u32, pause: Duration, error: &dyn std::fmt::Display) {
    tracing::debug!(target: TARGET, attempt, ?pause, %error, "retrying");
    #[cfg(feature = "metrics")]
    metrics::counter!("lockkit_retried_total").increment(1);
}

/// A row lock names a view.
#[cfg(feature = "sql")]
pub(crate) fn names_view(table: &Key) {
    tracing::warn!(target: TARGET, %table, "a row lock names a view");
}

/// A row lock reads the whole table.
#[cfg(feature = "sql")]
pub(crate) fn scans_table(table: &Key, plan: &str) {
    tracing::warn!(target: TARGET, %table, plan, "a row lock scans the whole table");
}

/// A transaction stays open, and others may wait for its locks.
#[cfg(feature = "sql")]
pub(crate) fn open_for_long(locks: &[(&'static str, Key)], begun_at: &Location<'_>, open: Duration) {
    let locks: Vec<_> = locks.iter().map(|(kind, key)| format!("{kind} `{key}`")).collect();
    let locks = locks.join(", ");
    tracing::warn!(target: TARGET, locks, %begun_at, ?open, "a transaction stays open");
}

/// The connection of a dropped transaction is closed, because the rollback took too long.
#[cfg(feature = "sql")]
pub(crate) fn rollback_too_slow() {
    tracing::debug!(target: TARGET, "closing the connection of a transaction that could not be rolled back in time");
}

/// A caller got no connection, because all of the pool were in use.
#[cfg(feature = "sql")]
pub(crate) fn pool_starved() {
    #[cfg(feature = "metrics")]
    metrics::counter!("lockkit_pool_starved_total").increment(1);
}

/// Something went wrong in the background that mends itself.
pub(crate) fn tolerated(doing: &'static str, error: &(dyn StdError + 'static)) {
    tracing::debug!(target: TARGET, doing, error, "failed in the background");
}

/// Adds one to a gauge until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Gauged {
    #[cfg(feature = "metrics")]
    gauge: metrics::Gauge,
}

#[cfg(feature = "metrics")]
impl Gauged {
    fn one_more(name: &'static str, strategy: Strategy, key: &Key) -> Self {
        let gauge = metrics::gauge!(name, "strategy" => strategy.name(), "prefix" => prefix(key).to_owned());
        gauge.increment(1);
        Self { gauge }
    }
}

#[cfg(feature = "metrics")]
impl Drop for Gauged {
    fn drop(&mut self) {
        self.gauge.decrement(1);
    }
}

#[cfg(not(feature = "metrics"))]
impl Gauged {
    fn one_more(_name: &'static str, _strategy: Strategy, _key: &Key) -> Self {
        Self {}
    }
}

#[cfg(feature = "metrics")]
fn renewal(outcome: &'static str, took: Duration) {
    metrics::histogram!("lockkit_renew_seconds", "outcome" => outcome).record(took);
}

#[cfg(feature = "metrics")]
fn count(name: &'static str, strategy: Strategy, key: &Key) {
    metrics::counter!(name, "strategy" => strategy.name(), "prefix" => prefix(key).to_owned()).increment(1);
}

#[cfg(feature = "metrics")]
fn record(name: &'static str, strategy: Strategy, key: &Key, duration: Duration) {
    metrics::histogram!(name, "strategy" => strategy.name(), "prefix" => prefix(key).to_owned()).record(duration);
}

#[cfg(not(feature = "metrics"))]
fn renewal(_outcome: &'static str, _took: Duration) {}

#[cfg(not(feature = "metrics"))]
fn count(_name: &'static str, _strategy: Strategy, _key: &Key) {}

#[cfg(not(feature = "metrics"))]
fn record(_name: &'static str, _strategy: Strategy, _key: &Key, _duration: Duration) {}

/// The part of the key that is the same for many.
#[cfg(feature = "metrics")]
fn prefix(key: &Key) -> &str {
    key.find([':', '/']).map_or("", |end| &key[..end])
}
