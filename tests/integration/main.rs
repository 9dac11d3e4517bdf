//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod cancellation;
mod clocks;
mod contention;
mod harness;
mod keeper;
mod leases;
mod many;
mod migrations;
mod named;
mod processes;
mod round_trips;
mod rows;
mod schemas;
mod send;
mod sessions;
mod stock;
mod stores;
mod transactions;
mod versioned;
mod versions;
