//! What a request yields: one lease, or several.

use std::{future::Future, iter::once_with};

use crate::{
    body::{scope::Record, watch::Watch},
    lease::{
        held::{Lease, Owner},
        life::kept::release_failed,
        store::LeaseStore,
    },
    policy::OnLost,
    value::error::{Error, Result},
};

/// The type that a request yields: a [`Lease`] or a [`MultiLease`](crate::MultiLease).
pub trait Yields: Sized + sealed::Sealed {
    /// The store of the leases.
    type Store: LeaseStore;

    #[doc(hidden)]
    fn of(leases: Vec<Lease<Self::Store>>, on_lost: OnLost) -> Self;

    /// Handles to the same leases for a body that runs under them.
    #[doc(hidden)]
    #[must_use]
    fn borrowed(&self) -> Self;

    /// Handles to the same leases for the body of a function under the attribute. The body cannot release them.
    #[doc(hidden)]
    #[must_use]
    fn lent(&self) -> Self;

    /// The watch that runs a body under the leases, and the record of its locks.
    #[doc(hidden)]
    fn watched(&self) -> (Watch<'_>, Record);

    /// Releases the leases after their body. A failed release does not change the result of the body.
    #[doc(hidden)]
    fn end_after_body(self) -> impl Future<Output = ()>;

    /// Runs `body` under the leases, and drops it when a lease is lost.
    #[doc(hidden)]
    fn run_body<T, E: From<Error>>(
        &self,
        body: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>> {
        let (watch, record) = self.watched();
        watch.run(record.run(body))
    }
}

pub(super) mod sealed {
    pub trait Sealed {}
}

impl<S: LeaseStore> sealed::Sealed for Lease<S> {}

impl<S: LeaseStore> Yields for Lease<S> {
    type Store = S;

    fn of(leases: Vec<Self>, _on_lost: OnLost) -> Self {
        leases.into_iter().next().expect("BUG: one lease was asked for")
    }

    fn borrowed(&self) -> Self {
        self.owned_by(Owner::Request)
    }

    fn lent(&self) -> Self {
        self.owned_by(Owner::Attribute)
    }

    fn watched(&self) -> (Watch<'_>, Record) {
        (self.watch(), Record::new(once_with(|| self.lock())))
    }

    async fn end_after_body(self) {
        if self.kept.lost().is_none() {
            release_failed(self.release().await);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Leases, testing::MemoryStore, value::key::Key};

    #[tokio::test(start_paused = true)]
    async fn what_a_body_ran_under_is_free_when_its_result_is_returned() {
        let store = MemoryStore::new();
        let leases = Leases::new(store.client());
        leases.store().faults().slow(Duration::from_millis(5));
        let is_free = async |key| store.lease_look(&Key::from(key)).await.unwrap().is_none();
        leases.lease("a").run(async |_| Ok::<_, Error>(())).await.unwrap();
        assert!(is_free("a").await);
        leases.all(["a", "b"]).run(async |_| Ok::<_, Error>(())).await.unwrap();
        assert!(is_free("a").await && is_free("b").await);
    }
}
