//! The lease code of lockkit in virtual time: several processes, one store, and faults, all from one seed. See
//! `README.md`.

mod agent;
mod client;
mod judge;
pub mod plan;
mod run;
mod sessions;
pub mod shrink;
mod store;
mod task;
mod world;

pub use self::{
    run::{Outcome, run},
    world::Counts,
};
