//! The store on real servers.

mod cancellation;
mod ensemble;
mod faults;
mod foreign;
mod herd;
mod interop;
mod processes;
mod promises;
mod proxy;
mod queues;
mod support;
mod watches;
