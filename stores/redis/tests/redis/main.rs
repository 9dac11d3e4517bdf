//! The store on real servers. Each test starts its own.

mod conformance;
mod support;
