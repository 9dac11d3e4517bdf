//! Tests on real servers: one member that most tests share, and clusters of their own for those that harm them.

mod cluster;
mod conformance;
mod dropping;
mod etcdctl;
mod foreign;
mod holding;
mod late;
mod process;
mod server;
mod setup;
mod space;
mod traffic;
