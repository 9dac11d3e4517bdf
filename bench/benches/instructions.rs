//! How many instructions lockkit executes in memory alone. The counts are the same in each run, so a change shows where
//! times are lost in noise. Counted by callgrind; see `bench/README.md` for what to install.
//!
//! ```text
//! cargo bench -p lockkit-bench --bench instructions
//! ```

#![allow(unused_qualifications, reason = "the macros write the path of each benchmark")]

use std::hint::black_box;
use std::time::Duration;

use gungraun::{Dhat, DhatMetric, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};
use lockkit::testing::MemoryStore;
use lockkit::{Backoff, Key, Lease, Leases, RetryPolicy, with_lock};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// What a lease that nobody else wants may cost at most, in blocks and bytes of the heap, and in bytes of its two
/// futures. `tests/integration/allocations.rs` compares a lease in a database with its statements by hand.
const LEASE_BLOCKS: u64 = 12;
const LEASE_BYTES: u64 = 8 * 1_024;
const LEASE_FUTURES: usize = 1_024;

/// What a benchmark works with. Made outside of what is counted.
struct Bench {
    runtime: Runtime,
    leases: Leases<MemoryStore>,
}

/// After one operation, so that what is made at first use is there.
fn ready() -> Bench {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let leases = Leases::builder(MemoryStore::new()).wait(Duration::from_secs(60)).build().expect("good settings");
    let bench = Bench { runtime, leases };
    bench.runtime.block_on(async {
        bench.leases.lease("first").acquire().await.expect("a free lease").release().await.expect("a held lease");
    });
    bench
}

// A checked key out of a template, as the attribute builds it.
#[library_benchmark]
fn key() -> Key {
    Key::new(format!("order:{}:{}", black_box(42), black_box("item"))).expect("a good key")
}

// One attempt that succeeds.
#[library_benchmark(setup = ready)]
fn retry_policy(bench: Bench) -> Bench {
    let policy = RetryPolicy::new().attempts(3).backoff(Backoff::new());
    let attempt = |number| async move { Ok::<_, lockkit::Error>(black_box(number)) };
    black_box(bench.runtime.block_on(policy.retry(attempt)).expect("an attempt that succeeds"));
    bench
}

/// Fails the benchmark of a lease if it allocates more.
fn frugal() -> LibraryBenchmarkConfig {
    let limits = [(DhatMetric::TotalBlocks, LEASE_BLOCKS), (DhatMetric::TotalBytes, LEASE_BYTES)];
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(Dhat::default().hard_limits(limits));
    config
}

/// Fails the benchmark of a lease if its futures are larger.
fn ready_with_small_futures() -> Bench {
    let bench = ready();
    bench.runtime.block_on(async {
        let acquire = bench.leases.lease("first").acquire();
        let of_acquire = size_of_val(&acquire);
        let release = acquire.await.expect("a free lease").release();
        let bytes = of_acquire + size_of_val(&release);
        release.await.expect("a held lease");
        assert!(bytes <= LEASE_FUTURES, "the futures of a lease have {bytes} bytes, more than {LEASE_FUTURES}");
    });
    bench
}

// One lease that nobody else wants: acquired and released.
#[library_benchmark(setup = ready_with_small_futures, config = frugal())]
fn lease(bench: Bench) -> Bench {
    bench.runtime.block_on(async {
        let lease = bench.leases.lease("one").acquire().await.expect("a free lease");
        lease.release().await.expect("a held lease");
    });
    bench
}

/// A holder, and a task that waits for its lease.
struct Hot {
    bench: Bench,
    held: Lease<MemoryStore>,
    heir: JoinHandle<Lease<MemoryStore>>,
}

fn waited_for() -> Hot {
    let bench = ready();
    let (held, heir) = bench.runtime.block_on(async {
        let held = bench.leases.lease("hot").acquire().await.expect("a free lease");
        let leases = bench.leases.clone();
        let heir = tokio::spawn(async move { leases.lease("hot").acquire().await.expect("a lease") });
        // It takes its place in the queue.
        tokio::task::yield_now().await;
        (held, heir)
    });
    Hot { bench, held, heir }
}

// One lease that is handed to the next task of the process.
#[library_benchmark(setup = waited_for)]
fn hand_over(Hot { bench, held, heir }: Hot) -> (Bench, Lease<MemoryStore>) {
    let next = bench.runtime.block_on(async {
        held.release().await.expect("a held lease");
        heir.await.expect("an heir")
    });
    (bench, next)
}

#[with_lock(lease, on = leases, key = "user:{user_id}")]
async fn under_the_attribute(leases: &Leases<MemoryStore>, user_id: u64) -> lockkit::Result<u64> {
    Ok(black_box(user_id))
}

// A function under `#[with_lock(lease, …)]`; compare with `by_hand`.
#[library_benchmark(setup = ready)]
fn attribute(bench: Bench) -> Bench {
    black_box(bench.runtime.block_on(under_the_attribute(&bench.leases, black_box(7))).expect("a free lease"));
    bench
}

// What it expands to.
#[library_benchmark(setup = ready)]
fn by_hand(bench: Bench) -> Bench {
    let user_id = black_box(7_u64);
    let body = |_lease| async move { Ok::<_, lockkit::Error>(black_box(user_id)) };
    let run = bench.leases.lease(format!("user:{user_id}")).run(body);
    black_box(bench.runtime.block_on(run).expect("a free lease"));
    bench
}

library_benchmark_group!(name = costs, benchmarks = [key, retry_policy, lease, hand_over, attribute, by_hand]);

main!(library_benchmark_groups = costs);
