//! The layer, the key and the errors in axum services on loopback, with an HTTP client.

mod errors;
mod idempotency;
mod leases;
mod server;
mod tower_services;
