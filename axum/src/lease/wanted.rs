//! Which lease a request needs.

use axum_core::response::{IntoResponse, Response};
use lockkit::{LeaseRequest, LeaseStore};

/// What the function of a [`LeaseLayer`](crate::LeaseLayer) returns: the lease that the request needs; an `Option` of
/// it, where `None` lets the request through without a lease; or a `Result`, whose `Err` is the answer to the request.
pub trait IntoLease {
    /// The store of the lease.
    type Store: LeaseStore;

    /// The lease, if the request needs one.
    ///
    /// # Errors
    /// The answer to a request that is refused.
    #[expect(clippy::result_large_err, reason = "it is made once, and becomes the answer")]
    fn into_lease(self) -> Result<Option<LeaseRequest<Self::Store>>, Response>;
}

impl<S: LeaseStore> IntoLease for LeaseRequest<S> {
    type Store = S;

    fn into_lease(self) -> Result<Option<Self>, Response> {
        Ok(Some(self))
    }
}

impl<L: IntoLease> IntoLease for Option<L> {
    type Store = L::Store;

    fn into_lease(self) -> Result<Option<LeaseRequest<L::Store>>, Response> {
        self.map_or(Ok(None), L::into_lease)
    }
}

impl<L: IntoLease, R: IntoResponse> IntoLease for Result<L, R> {
    type Store = L::Store;

    fn into_lease(self) -> Result<Option<LeaseRequest<L::Store>>, Response> {
        self.map_err(R::into_response)?.into_lease()
    }
}
