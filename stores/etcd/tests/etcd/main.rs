//! Tests on real servers: one member that most tests share, and clusters of their own for those that harm them.

mod conformance;
mod server;
