//! The life of a lease in this process: how long it is trusted, who may end it, and how.
//!
//! [`state`] decides. [`Kept`] holds one lease and its state, [`keeper`] renews all of them, and [`ending`] carries out
//! how they end.
#![doc = include_str!("table.md")]

pub(crate) mod ending;
pub(crate) mod keeper;
mod kept;
mod state;

#[cfg(feature = "testing")]
pub(crate) use self::state::Life;
#[cfg(feature = "sql")]
pub(crate) use self::state::Step;
pub(crate) use self::{
    keeper::{Keeper, Unfinished},
    kept::{HandOver, Kept, Terms, Wants, release_failed},
    state::{Effect, Event, Pin},
};
