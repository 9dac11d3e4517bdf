//! One server: its connection, its settings and its quarantine. Each operation of leases is one call of a script, in
//! the file of the operation. Knows nothing of quorums.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::{
    answer::read,
    connection::Connection,
    error::Failure,
    layout::Layout,
    script::{Scripts, millis},
    server::{Limits, Server},
    wake::Subscriptions,
};

/// How a store is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) layout: Layout,
    pub(crate) longest_ttl: Duration,
    /// Zero: none.
    pub(crate) quarantine: Duration,
    pub(crate) limits: Limits,
}

/// One server and what this process knows of it.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) connection: Connection,
    pub(crate) subscriptions: Subscriptions,
    pub(crate) scripts: Scripts,
    pub(crate) terms: Terms,
    /// The longest quarantine that any client uses, in milliseconds.
    pub(crate) quarantine: AtomicU64,
}

impl Node {
    pub(crate) fn new(server: Server, terms: Terms) -> Self {
        Self {
            connection: Connection::new(server.clone(), terms.limits),
            subscriptions: Subscriptions::new(server, terms.limits),
            scripts: Scripts::of(terms.layout),
            quarantine: millis(terms.quarantine).into(),
            terms,
        }
    }

    /// Connects, if that was not done. Returns the id of the server's process: empty if it does not report one.
    pub(crate) async fn open(&self) -> Result<String, Failure> {
        self.connection.open().await
    }

    /// Ends the quarantine if `is_new`. Returns how much of it is left.
    pub(crate) async fn quarantine(&self, is_new: bool) -> Result<Duration, Failure> {
        let (doing, quarantine) = if is_new {
            ("declare", millis(self.terms.quarantine))
        } else {
            ("read", self.quarantine.load(Ordering::Relaxed))
        };
        if quarantine == 0 {
            return Ok(Duration::ZERO);
        }
        let answered = self.scripts.declare.run(&self.connection, |call, _| {
            call.arg(0).arg(doing).arg(quarantine);
        });
        Ok(Duration::from_millis(read(answered.await?)?))
    }

    pub(crate) fn learn(&self, longest: u64) {
        if self.quarantine.load(Ordering::Relaxed) > 0 {
            self.quarantine.fetch_max(longest, Ordering::Relaxed);
        }
    }
}
