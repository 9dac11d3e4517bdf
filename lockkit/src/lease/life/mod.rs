//! The life of a lease in this process: how long it is trusted, who may end it, and how.
//!
//! [`state`] decides. [`Kept`](kept::Kept) holds one lease and its state, [`keeper`] renews all of them. [`calls`] are
//! those that may have its row locked.
//! [`ending`](super::ending) carries out how they end.
#![doc = include_str!("table.md")]

pub(crate) mod calls;
pub(crate) mod keeper;
pub(crate) mod kept;
pub(crate) mod state;
