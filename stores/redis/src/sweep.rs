//! Deletes what is known of leases that were free for long.

use std::time::Duration;

use crate::{answer::read, error::Failure, node::Node};

impl Node {
    pub(crate) async fn sweep(&self, retention: Duration, limit: u32) -> Result<u64, Failure> {
        let retention = u64::try_from(retention.as_micros()).unwrap_or(u64::MAX);
        let call = self.scripts.sweep.call().key("lockkit:names").key("lockkit:times").arg(retention).arg(limit);
        read(call.run(&self.connection).await?)
    }
}
