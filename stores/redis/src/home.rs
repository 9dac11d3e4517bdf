//! The thread that drives all connections, so that none depends on a runtime of a caller.

use std::sync::LazyLock;

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

/// Never ends: it belongs to the process, as its connections may be used from any of its runtimes.
static HOME: LazyLock<Option<Runtime>> = LazyLock::new(|| {
    let mut home = Builder::new_multi_thread();
    home.worker_threads(1).thread_name("lockkit-redis").enable_all().build().ok()
});

/// Runs the future on the thread. Connections that it opens are driven there. `None` if the system allows no thread.
pub(crate) fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> Option<JoinHandle<T>> {
    HOME.as_ref().map(|it| it.spawn(future))
}
