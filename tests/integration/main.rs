//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod cancellation;
mod contention;
mod harness;
mod leases;
mod migrations;
mod named;
mod processes;
mod round_trips;
mod rows;
mod send;
mod stores;
mod transactions;
mod versions;
