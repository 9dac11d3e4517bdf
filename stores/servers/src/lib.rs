//! Throwaway servers for the tests of the stores: started on free ports of the loopback interface, and gone with the
//! test.
//!
//! - [`Program`] is one server process: it can be killed, stopped, continued and started again on the same data.
//! - `redis`, `zookeeper` and `etcd` say how each server is set up, alone and as a cluster.
//!
//! A server that a test leaves behind dies with the thread that started it, however that ends.
//!
//! The tests do not use servers that somebody else has started, because they kill, stop and restart them.

pub mod etcd;
mod folder;
mod program;
pub mod redis;
pub mod zookeeper;

pub use crate::{
    folder::{Folder, folder_for_data},
    program::{Program, free_port, is_free},
};
