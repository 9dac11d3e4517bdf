//! Leases of lockkit in etcd.
#![deny(missing_docs)]

mod acquire;
mod claims;
mod freed;
mod keeper;
mod layout;
mod look;
mod lost;
mod members;
mod options;
mod release;
mod renew;
mod session;
mod sessions;
mod store;

pub use etcd_client;

pub use crate::{
    options::{Options, SetupError, TakeOver},
    store::EtcdStore,
};
