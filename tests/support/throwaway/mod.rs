//! Servers that all test processes of a run share: started by the first, gone some seconds after the last.
//!
//! Each server has a supervisor, a process of its own (`test-servers`). Test processes and supervisor meet in a folder
//! and find each other through lock files, which the operating system lets go of however a process ends:
//!
//! - `users`: every test process shares it for as long as it lives. When the supervisor gets it exclusively and nobody
//!   comes for some seconds, it ends.
//! - `alive`: the supervisor has it for as long as it lives.
//! - `start`: taken to look whether there is a supervisor, and to start one.

mod launch;
mod rendezvous;
mod shared_server;
mod supervisor;

pub use self::launch::{
    GALERA_NODES, GROUP_MEMBERS, Launch, REPLICATOR, forget_its_number, free_ports, make_member, ports, prepare,
};
pub(crate) use self::launch::{free_port, prepare_pgbouncer};
pub(crate) use self::shared_server::SharedServer;
pub use self::supervisor::supervise;
