//! The lease code of lockkit in virtual time: several processes, one store, and faults, all from one seed. See
//! `README.md`.

mod client;
mod judge;
pub mod plan;
mod run;
pub mod shrink;
mod store;
mod task;
mod world;

pub use self::{
    run::{Outcome, run},
    world::Counts,
};
