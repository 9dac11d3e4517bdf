//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod contention;
mod harness;
mod leases;
mod named;
mod round_trips;
mod rows;
mod transactions;
mod versions;
