//! What lockkit costs in memory alone: keys, policies, the queue of a process, and the attribute, all without a
//! database.
//!
//! ```text
//! cargo bench -p lockkit-bench
//! ```

use std::hint::black_box;
use std::time::Duration;

use divan::{Bencher, counter::ItemsCount};
use lockkit::testing::MemoryStore;
use lockkit::{Backoff, Key, Leases, RetryPolicy, with_lock};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

fn main() {
    divan::main();
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A checked key out of a template, as the attribute builds it.
#[divan::bench]
fn key() -> Key {
    Key::new(format!("order:{}:{}", black_box(42), black_box("item"))).expect("a good key")
}

/// One attempt that succeeds.
#[divan::bench]
fn retry_policy(bencher: Bencher) {
    let runtime = runtime();
    let policy = RetryPolicy::new().attempts(3).backoff(Backoff::new());
    bencher.bench_local(|| {
        let attempt = |number| async move { Ok::<_, lockkit::Error>(black_box(number)) };
        runtime.block_on(policy.retry(attempt)).expect("an attempt that succeeds")
    });
}

/// One lease that nobody else wants: acquired and released.
#[divan::bench]
fn lease(bencher: Bencher) {
    let runtime = runtime();
    let leases = Leases::new(MemoryStore::new());
    bencher.bench_local(|| {
        runtime.block_on(async {
            let lease = leases.lease("one").acquire().await.expect("a free lease");
            lease.release().await.expect("a held lease");
        });
    });
}

const ROUNDS: u32 = 20;

/// One lease that so many tasks of the process want, 20 times each. Items are grants.
#[divan::bench(args = [2, 32, 256])]
fn hand_over(bencher: Bencher, tasks: u32) {
    hot(bencher, tasks, 32);
}

/// The same, released in the store each time.
#[divan::bench(args = [2, 32, 256])]
fn without_hand_over(bencher: Bencher, tasks: u32) {
    hot(bencher, tasks, 0);
}

fn hot(bencher: Bencher, tasks: u32, times: u32) {
    let runtime = runtime();
    let leases = Leases::builder(MemoryStore::new())
        .hand_over(times)
        .wait(Duration::from_secs(60))
        .build()
        .expect("good settings");
    bencher.counter(ItemsCount::new(tasks * ROUNDS)).bench_local(|| {
        runtime.block_on(async {
            let mut all = JoinSet::new();
            for _ in 0..tasks {
                let leases = leases.clone();
                all.spawn(async move {
                    for _ in 0..ROUNDS {
                        let lease = leases.lease("hot").acquire().await.expect("a lease");
                        lease.release().await.expect("a held lease");
                    }
                });
            }
            all.join_all().await
        });
    });
}

#[with_lock(lease, on = leases, key = "user:{user_id}")]
async fn under_the_attribute(leases: &Leases<MemoryStore>, user_id: u64) -> lockkit::Result<u64> {
    Ok(black_box(user_id))
}

/// A function under `#[with_lock(lease, …)]`; compare with `by_hand`.
#[divan::bench]
fn attribute(bencher: Bencher) {
    let runtime = runtime();
    let leases = Leases::new(MemoryStore::new());
    bencher.bench_local(|| runtime.block_on(under_the_attribute(&leases, black_box(7))).expect("a free lease"));
}

/// What it expands to.
#[divan::bench]
fn by_hand(bencher: Bencher) {
    let runtime = runtime();
    let leases = Leases::new(MemoryStore::new());
    bencher.bench_local(|| {
        let user_id = black_box(7_u64);
        let body = |_lease| async move { Ok::<_, lockkit::Error>(black_box(user_id)) };
        runtime.block_on(leases.lease(format!("user:{user_id}")).run(body)).expect("a free lease")
    });
}
