//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod cancellation;
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
mod send;
mod sessions;
mod slots;
mod stock;
mod stores;
mod takeover;
mod transactions;
mod versioned;
mod versions;
mod waiting;
