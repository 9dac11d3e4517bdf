//! A body of the caller's that runs under locks: its guards, what its task holds, and work in the background.

pub(crate) mod batch;
pub(crate) mod commits;
pub(crate) mod guard;
pub(crate) mod inline;
pub(crate) mod per_runtime;
pub(crate) mod scope;
pub(crate) mod task;
pub(crate) mod watch;
