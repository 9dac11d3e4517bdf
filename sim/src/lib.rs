//! lockkit in virtual time: several processes, one store, and faults, all from one seed. See `README.md`.

mod agent;
mod books;
mod clerk;
mod client;
mod driver;
mod judge;
pub mod plan;
mod refusals;
mod run;
mod sessions;
pub mod shrink;
mod store;
mod tables;
mod task;
pub mod trade;
mod world;

pub use self::{
    run::{Outcome, run},
    world::Counts,
};
