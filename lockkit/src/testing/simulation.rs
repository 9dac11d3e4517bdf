//! What the simulation of the workspace (`sim/`) needs, and no test of a service: everything random from one seed, what
//! a lease is without changing it, the commit of leases in a transaction of its own, and what a database implements.
//!
//! `fastrand` has a state for each thread, which can be seeded. Besides it, lockkit takes random tokens from the
//! operating system; [`simulate_tokens`] ends that. No code of leases selects at random or iterates over a hash map.

use std::future::Future;

use crate::{
    lease::{Yields, held::Lease, in_transaction, request::MultiLease, store::LeaseStore},
    value::{
        error::{BoxError, Error, Result},
        token::Token,
    },
};

#[cfg(feature = "sql")]
pub use crate::sql::simulated as sql;
pub use crate::{
    body::commits::CommitSent,
    lease::{in_transaction::LeaseTx, life::state::Pin},
    value::token::simulate_tokens,
};

/// The token of the lease.
pub fn token<S: LeaseStore>(lease: &Lease<S>) -> Token {
    lease.token()
}

/// A handle to the same lease, whose drop releases nothing.
pub fn observer<S: LeaseStore>(lease: &Lease<S>) -> Lease<S> {
    lease.borrowed()
}

/// Whether the process trusts the lease. Unlike [`Lease::is_trusted`], this does not end a trust that has run out, so
/// it sees what the process itself would see.
pub fn trusts<S: LeaseStore>(lease: &Lease<S>) -> bool {
    !lease.kept().is_lost()
}

/// As [`Lease::verify`](crate::Lease::verify). `pin` locks the row of the lease, and returns whether it was there.
///
/// # Errors
/// Those of `verify`.
pub async fn verify<S: LeaseStore>(lease: &Lease<S>, pin: impl Future<Output = Result<bool>>) -> Result<()> {
    lease.verify_by(pin).await
}

/// As [`Lease::commit`](crate::Lease::commit).
///
/// # Errors
/// Those of `commit`.
pub async fn commit<S: LeaseStore>(lease: Lease<S>, tx: impl LeaseTx) -> Result<()> {
    in_transaction::commit(std::slice::from_ref(&lease), tx).await
}

/// As [`MultiLease::commit`](crate::MultiLease::commit).
///
/// # Errors
/// Those of `commit`.
pub async fn commit_all<S: LeaseStore>(leases: MultiLease<S>, tx: impl LeaseTx) -> Result<()> {
    in_transaction::commit(leases.leases(), tx).await
}

/// The error of a commit that was sent and not answered.
pub fn outcome_unknown(source: impl Into<BoxError>) -> Error {
    Error::OutcomeUnknown { source: source.into() }
}

/// The error of a statement in a transaction that the store has ended.
pub fn transaction_ended(source: impl Into<BoxError>) -> Error {
    Error::TransactionEnded { source: source.into() }
}

/// Whether tasks of this process take turns to write the row.
#[cfg(feature = "sql")]
pub fn has_turns<DB: crate::sql::VersionOps>(row: &crate::sql::version::VersionedRow<DB>) -> bool {
    crate::retry::turn::Turn::contested(|| row.which()).is_some()
}
