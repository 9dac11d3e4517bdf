//! Leases of [lockkit](lockkit) in Redis or Valkey.
#![deny(missing_docs)]

mod builder;
mod fit;
mod layout;
mod link;
mod node;
mod releases;
mod script;
mod server;
mod store;
mod trouble;

pub use redis;

pub use crate::{
    builder::{ConnectError, RedisStoreBuilder},
    fit::Unfit,
    layout::Layout,
    server::Server,
    store::RedisStore,
};
