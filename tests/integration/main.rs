//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod cancellation;
mod commits;
mod contention;
mod harness;
mod keeper;
mod leases;
mod many;
mod migrations;
mod named;
mod outages;
mod processes;
mod round_trips;
mod rows;
mod runtimes;
mod send;
mod sessions;
mod shutdown;
mod slots;
mod stock;
mod stores;
mod takeover;
mod transactions;
mod versioned;
mod versions;
mod waiting;
