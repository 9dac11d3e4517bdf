//! The store on real servers. Each test starts its own.

mod cancellation;
mod clocks;
mod conformance;
mod failover;
mod foreign;
mod interop;
mod lost_memory;
mod operating;
mod outages;
mod quorum;
mod redisson;
mod releases;
mod secrets;
mod support;
