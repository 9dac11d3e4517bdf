//! Deletes what is known of leases that were free for long.

use std::time::Duration;

use crate::{answer::read, error::Failure, node::Node};

impl Node {
    /// Each call looks at as many keys as may be deleted. Keys in use are among them, so it may take several.
    pub(crate) async fn sweep(&self, retention: Duration, limit: u32) -> Result<u64, Failure> {
        let retention = u64::try_from(retention.as_micros()).unwrap_or(u64::MAX);
        let mut left = limit;
        while left > 0 {
            let answered = self.scripts.sweep.run(&self.connection, |call, _| {
                call.arg(0).arg(retention).arg(left);
            });
            let (forgotten, seen): (u32, u32) = read(answered.await?)?;
            let all_seen = seen < left;
            left = left.saturating_sub(forgotten);
            if all_seen {
                break;
            }
        }
        Ok(u64::from(limit - left))
    }
}
