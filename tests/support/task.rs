//! Tasks of the tests. Tokio is compiled anew for each type of future that is spawned, and the tests spawn hundreds. In
//! a box they are one type for each output.

use std::{
    ops::{Deref, DerefMut},
    pin::Pin,
};

use tokio::task::{self, AbortHandle, JoinHandle};

/// Like [`tokio::spawn`].
pub fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(boxed(future))
}

/// Like [`tokio::task::JoinSet`].
#[derive(Debug)]
pub struct JoinSet<T>(task::JoinSet<T>);

impl<T: Send + 'static> JoinSet<T> {
    #[must_use]
    #[expect(clippy::new_without_default, reason = "tests need none")]
    pub fn new() -> Self {
        Self(task::JoinSet::new())
    }

    pub fn spawn(&mut self, future: impl Future<Output = T> + Send + 'static) -> AbortHandle {
        self.0.spawn(boxed(future))
    }

    pub async fn join_all(self) -> Vec<T> {
        self.0.join_all().await
    }
}

impl<T> Deref for JoinSet<T> {
    type Target = task::JoinSet<T>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T> DerefMut for JoinSet<T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

fn boxed<T>(future: impl Future<Output = T> + Send + 'static) -> Pin<Box<dyn Future<Output = T> + Send>> {
    Box::pin(future)
}
