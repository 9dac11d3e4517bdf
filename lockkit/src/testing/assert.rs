//! Assertions that code runs under the lock that it needs.
//!
//! The locks are those of the scope that also detects a task that would wait for itself. Row and named locks taken by
//! hand have none: they live on the caller's connection, whose end lockkit does not see.

use std::future::Future;

use crate::{
    body::scope::{Lock, Realm, Record, is_locked},
    value::key::Key,
};

/// The implementation of [`assert_locked!`](crate::assert_locked).
///
/// # Panics
/// If the running code is not under the lock of this key.
#[track_caller]
pub fn assert_locked(key: impl Into<Key>) {
    let key = key.into();
    if let Err(instead) = is_locked(&key) {
        panic!("not under the lock of `{key}`: {instead}");
    }
}

/// Runs `body` as if it were under the lock of this key, so that code with [`assert_locked!`](crate::assert_locked) can
/// be tested on its own. Locks nothing.
///
/// # Cancel safety
/// That of `body`, which is dropped with this.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// async fn write_invoice() {
///     lockkit::assert_locked!("invoices");
/// }
///
/// lockkit::testing::under("invoices", write_invoice()).await;
/// # }
/// ```
pub async fn under<F: Future>(key: impl Into<Key>, body: F) -> F::Output {
    Record::new([Lock::of(Realm::Elsewhere, key.into())]).run(body).await
}

#[cfg(test)]
mod tests {
    use std::{panic::AssertUnwindSafe, time::Duration};

    use super::*;
    use crate::{
        lease::{held::Lease, leases::Leases},
        policy::OnLost,
        testing::MemoryStore,
        value::error::Error,
    };

    fn is_under(key: &str) -> bool {
        std::panic::catch_unwind(AssertUnwindSafe(|| assert_locked(key))).is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_under_the_locks_around_it_and_no_others() {
        assert!(!is_under("a"));
        let leases = Leases::new(MemoryStore::new());
        let body = |_: Lease<MemoryStore>| async {
            assert!(is_under("a") && !is_under("b"));
            let inner = leases.lease("b").run(|_| async {
                assert!(is_under("a") && is_under("b"));
                Ok::<_, Error>(())
            });
            inner.await?;
            assert!(is_under("a") && !is_under("b"));
            assert!(!tokio::spawn(async { is_under("a") }).await.unwrap(), "a task of its own may outlive the lease");
            Ok::<_, Error>(())
        };
        leases.lease("a").run(body).await.unwrap();
        assert!(!is_under("a"));
        let all = leases.all(["c", "d"]).run(|_| async { Ok::<_, Error>(is_under("c") && is_under("d")) });
        assert!(all.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_lost_or_released_counts_no_more() {
        let store = MemoryStore::new();
        let leases = Leases::new(store.clone());
        let body = |lease: Lease<MemoryStore>| async move {
            assert!(is_under("k"));
            store.steal("k");
            lease.lost().await;
            assert!(!is_under("k"));
            Ok::<_, Error>(())
        };
        let ended = leases.lease("k").on_lost(OnLost::Continue).run(body).await;
        assert!(ended.unwrap_err().is_lost());

        let released = |lease: Lease<MemoryStore>| async move {
            lease.release().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok::<_, Error>(is_under("k"))
        };
        assert!(!leases.lease("k").run(released).await.unwrap());
    }
}
