//! The thread that drives all connections, so that none depends on a runtime of a caller.
//!
//! A connection that a caller's runtime drives stops with that runtime: one that was not driven for 8 s cost other
//! runtimes a lease of 4 s. One connection for each runtime would not be enough, because the client of the Sentinels is
//! shared.

use std::{
    io,
    sync::{Mutex, OnceLock, PoisonError},
};

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

/// Never ends: it belongs to the process, as its connections may be used from any of its runtimes.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Held while the thread is started.
static STARTING: Mutex<()> = Mutex::new(());

/// Runs the future on the thread. Connections that it opens are driven there. Fails if the system allows no thread now.
pub(crate) fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> io::Result<JoinHandle<T>> {
    Ok(runtime()?.spawn(future))
}

fn runtime() -> io::Result<&'static Runtime> {
    let _starting = match RUNTIME.get() {
        Some(runtime) => return Ok(runtime),
        None => STARTING.lock().unwrap_or_else(PoisonError::into_inner),
    };
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("lockkit-redis").enable_all().build()?;
    Ok(RUNTIME.get_or_init(|| runtime))
}
