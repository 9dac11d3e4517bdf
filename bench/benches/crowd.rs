//! What a crowd of processes costs that all want one lease, in memory and in paused time: every second is processor
//! time.
//!
//! ```text
//! cargo bench -p lockkit-bench --bench crowd
//! ```

use std::time::{Duration, Instant};

use lockkit::Leases;
use lockkit::testing::{MemoryStore, Operation};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

/// How often each process acquires the lease.
const GRANTS: u32 = 5;

const CLIENTS: [u32; 6] = [5, 10, 20, 40, 80, 160];

fn main() {
    println!("{:>8} {:>12} {:>16}", "clients", "ms", "calls per grant");
    let mut points = Vec::new();
    for clients in CLIENTS {
        let (took, calls) = crowd(clients);
        points.push((f64::from(clients), took.as_secs_f64()));
        println!("{clients:>8} {:>12.1} {calls:>16.1}", took.as_secs_f64() * 1000.0);
    }
    println!("exponent of the time over the clients: {:.2}", exponent(&points));
}

/// The time that so many processes take for their grants, and the calls of the store for each grant.
fn crowd(clients: u32) -> (Duration, f64) {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let store = MemoryStore::new();
    let wait = Duration::from_secs(3600);
    let all: Vec<_> =
        (0..clients).map(|_| Leases::builder(store.client()).wait(wait).build().expect("good settings")).collect();
    let started = Instant::now();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for leases in &all {
            let leases = leases.clone();
            tasks.spawn(async move {
                for _ in 0..GRANTS {
                    let lease = leases.lease("hot").acquire().await.expect("a lease");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    lease.release().await.expect("a held lease");
                }
            });
        }
        tasks.join_all().await;
    });
    let took = started.elapsed();
    let operations = [Operation::Acquire, Operation::Look, Operation::List, Operation::Renew, Operation::Release];
    let calls: u64 = all.iter().flat_map(|it| operations.map(|operation| it.store().faults().calls(operation))).sum();
    let calls = u32::try_from(calls).unwrap_or(u32::MAX);
    (took, f64::from(calls) / f64::from(clients * GRANTS))
}

/// The slope of the line through the logarithms of the points.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let points: Vec<_> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = f64::from(u32::try_from(points.len()).unwrap_or(u32::MAX));
    let (x, y) = points.iter().fold((0.0, 0.0), |sum, it| (sum.0 + it.0 / count, sum.1 + it.1 / count));
    let slope = points
        .iter()
        .fold((0.0, 0.0), |sum, it| ((it.0 - x).mul_add(it.1 - y, sum.0), (it.0 - x).mul_add(it.0 - x, sum.1)));
    slope.0 / slope.1
}
