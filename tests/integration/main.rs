//! The tests of `lockkit` on real databases, one module for each topic.

mod bad_input;
mod cancellation;
mod contention;
mod depths;
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
mod small_tables;
mod stock;
mod stores;
mod transactions;
mod value_types;
mod version_columns;
mod versioned;
mod versions;
