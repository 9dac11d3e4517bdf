//! lockkit in many orders of its threads. Time stands still: a wake-up that is lost is a deadlock.

mod batches;
mod close;
mod queue;
mod renewals;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use lockkit_sim_threads::{
    Lease, LeaseRequest, LeaseStore, Leases,
    lease::LeasesBuilder,
    testing::{MemoryStore, simulation::simulate_tokens},
};
use tokio::{
    in_many_orders, select, spawn,
    sync::Notify,
    task::{JoinHandle, yield_now},
};

const SECOND: Duration = Duration::from_secs(1);

/// A process with one key, `k`, in a store that no other process uses.
#[derive(Clone)]
struct Process {
    leases: Leases<MemoryStore>,
    used: Arc<Used>,
}

/// What the holders of `k` have seen.
#[derive(Default)]
struct Used {
    holders: AtomicU32,
    fence: AtomicU64,
    times: AtomicU32,
}

impl Process {
    fn new() -> Self {
        Self::with(|leases| leases)
    }

    fn with(options: impl FnOnce(LeasesBuilder<MemoryStore>) -> LeasesBuilder<MemoryStore>) -> Self {
        simulate_tokens();
        let leases = options(Leases::builder(MemoryStore::new()).wait(60 * SECOND)).build().unwrap();
        Self { leases, used: Arc::default() }
    }

    fn lease(&self) -> LeaseRequest<MemoryStore> {
        self.leases.lease("k")
    }

    async fn acquire(&self) -> Lease<MemoryStore> {
        self.lease().acquire().await.unwrap()
    }

    /// Uses the lease of `k`, alone and under a higher fence than all before.
    async fn uses(&self, lease: &Lease<MemoryStore>) {
        let Used { holders, fence, times } = &*self.used;
        assert_eq!(holders.fetch_add(1, Relaxed), 0, "two holders");
        assert!(fence.swap(lease.fence().get(), Relaxed) < lease.fence().get(), "fences rise");
        times.fetch_add(1, Relaxed);
        yield_now().await;
        assert!(lease.is_trusted());
        holders.fetch_sub(1, Relaxed);
    }

    /// Acquires the lease, uses it, and drops or releases it.
    fn works(&self, releases: bool) -> JoinHandle<()> {
        let process = self.clone();
        spawn(async move {
            let lease = process.acquire().await;
            process.uses(&lease).await;
            if releases {
                lease.release().await.unwrap();
            }
        })
    }

    /// Closes the leases, which ends what is in flight, and checks that nothing is left.
    async fn ends(self) {
        self.leases.close().await.unwrap();
        assert_eq!(self.leases.store().lease_list("", 100).await.unwrap().len(), 0, "rows are left");
        assert_eq!(self.leases.health().held, 0, "a lease is still renewed");
    }
}

/// Runs the task until `leaves` is notified.
fn until<T: Send + 'static>(
    leaves: &Arc<Notify>,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<Option<T>> {
    let leaves = leaves.clone();
    spawn(async move {
        select! {
            biased;
            () = leaves.notified() => None,
            done = task => Some(done),
        }
    })
}

/// Lets the other tasks run, in most orders until all of them wait.
async fn others_run() {
    for _ in 0..20 {
        // Unlike that of Tokio, this one stands back.
        shuttle::future::yield_now().await;
    }
}
