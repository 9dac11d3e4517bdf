//! What lockkit uses of Tokio, for shuttle.
//!
//! Tasks are those of shuttle, which runs them on one thread and switches between them wherever they could meet: as if
//! the runtime had a worker for each task. `sync` is Tokio's own. Each of its operations is one step; Tokio tests with
//! loom what happens inside. Time stands still until a test calls [`time::advance`], so a wake-up that is lost is a
//! deadlock, which shuttle reports, and no poll makes up for it.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use shuttle::{
    Config, Runner, future,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};

#[doc(hidden)]
pub use original;
pub use original::{join, select, sync};
pub use task::spawn;

pub mod runtime;
pub mod task;
pub mod time;

#[doc(hidden)]
pub use shuttle::thread_local as __thread_local;

/// As in Tokio: a value of the task, within a scope.
#[macro_export]
macro_rules! task_local {
    ($(#[$attribute:meta])* $visibility:vis static $name:ident: $type:ty;) => {
        $(#[$attribute])*
        $visibility static $name: $crate::task::LocalKey<$type> = {
            $crate::__thread_local! {
                static VALUE: ::std::cell::RefCell<::std::option::Option<$type>> = ::std::cell::RefCell::new(None);
            }
            $crate::task::LocalKey(&VALUE)
        };
    };
}

/// How many orders of each kind a scenario runs in.
const ORDERS: usize = 500;

/// Runs `scenario` in 1,000 orders of its tasks: in half of them each step is drawn, in the others a task runs until it
/// waits, but for two preemptions (PCT). They are the same in each run of a test, unless `SHUTTLE_RANDOM_SEED` is set.
///
/// # Panics
/// When a task panics, or some wait for ever. Then shuttle prints the schedule.
pub fn in_many_orders<F: Future<Output = ()> + 'static>(scenario: fn() -> F) {
    const SEED: u64 = 1;
    const PREEMPTIONS: usize = 2;
    time::paused(|| {
        run("random", RandomScheduler::new_from_seed(SEED, ORDERS), scenario);
        run("PCT", PctScheduler::new_from_seed(SEED, PREEMPTIONS + 1, ORDERS), scenario);
    });
}

fn run<F: Future<Output = ()> + 'static>(name: &str, scheduler: impl Scheduler + 'static, scenario: fn() -> F) {
    let begun = Arc::new(AtomicUsize::new(0));
    let _failed = Failed { name, begun: begun.clone() };
    let mut config = Config::new();
    // The default, 32 kB, is too small for what is not optimised.
    config.stack_size = 512 * 1024;
    Runner::new(scheduler, config).run(move || {
        begun.fetch_add(1, Relaxed);
        fastrand::seed(1);
        time::forget();
        future::block_on(scenario());
    });
}

/// Prints which order has failed.
struct Failed<'n> {
    name: &'n str,
    begun: Arc<AtomicUsize>,
}

impl Drop for Failed<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} order {} failed", self.name, self.begun.load(Relaxed));
        }
    }
}
