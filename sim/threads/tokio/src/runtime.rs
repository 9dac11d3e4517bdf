//! The one runtime.

use std::{future::Future, marker::PhantomData};

use crate::task::{JoinHandle, spawn};

/// The runtime.
#[derive(Debug, Clone)]
pub struct Handle(());

/// Identifies the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(());

/// There is none: the code runs on the runtime already.
#[derive(Debug)]
pub struct EnterGuard<'h>(PhantomData<&'h Handle>);

/// The code runs outside of the runtime, as no code does here.
#[derive(Debug)]
pub struct TryCurrentError(());

impl Handle {
    /// As in Tokio.
    pub fn current() -> Self {
        Self(())
    }

    /// As in Tokio.
    ///
    /// # Errors
    /// None.
    pub fn try_current() -> Result<Self, TryCurrentError> {
        Ok(Self(()))
    }

    /// As in Tokio.
    pub fn id(&self) -> Id {
        Id(())
    }

    /// As in Tokio.
    pub fn enter(&self) -> EnterGuard<'_> {
        EnterGuard(PhantomData)
    }

    /// As in Tokio.
    pub fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        spawn(task)
    }
}
