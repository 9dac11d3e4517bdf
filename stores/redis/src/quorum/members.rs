//! The servers of a quorum: sends all of them the same request, and collects their answers until they are enough.

use std::{sync::Arc, time::Duration};

use lockkit::store::{Answer, Release};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{
    error::Failure,
    node::Node,
    quorum::{unreleased::Unreleased, votes::Votes},
};

/// How long to wait for the last answers to a survey, once a majority has answered.
pub(crate) const GRACE: Duration = Duration::from_millis(50);

/// The servers of a quorum.
#[derive(Debug)]
pub(crate) struct Members(pub(crate) Vec<Arc<Member>>);

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) node: Arc<Node>,
    unreleased: Arc<Unreleased>,
}

impl Member {
    pub(crate) fn new(node: Node) -> Self {
        Self { node: Arc::new(node), unreleased: Arc::default() }
    }

    /// Releases the leases. A release that the server does not answer is repeated in the background, at most for `ttl`.
    pub(crate) async fn release(&self, releases: &[Release], ttl: Duration) -> Result<Vec<Answer>, Failure> {
        let answer = self.node.release(releases).await;
        if answer.is_err() {
            self.unreleased.add(&self.node, releases, ttl.min(self.node.terms.longest_ttl));
        }
        answer
    }
}

impl Members {
    /// The smallest majority.
    pub(crate) fn needed(&self) -> usize {
        self.0.len() / 2 + 1
    }

    /// Queries all servers at once, until `is_enough`, or all have answered or failed. Once a majority has answered,
    /// waits a quarter of the answer timeout for the others: a stopped server must not cost the answers of a whole
    /// batch. The others go on in the background.
    pub(crate) async fn query<T, Fut>(
        &self,
        request: impl Fn(Arc<Member>) -> Fut,
        is_enough: impl Fn(&Votes<T>) -> bool,
    ) -> Votes<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let grace = (self.0[0].node.terms.limits.answer / 4).max(GRACE);
        self.collect(request, is_enough, Some(grace)).await
    }

    /// Queries all servers at once. Waits for a majority, and a moment for the others.
    pub(crate) async fn survey<T, Fut>(&self, request: impl Fn(Arc<Member>) -> Fut) -> Votes<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        self.collect(request, |_| false, Some(GRACE)).await
    }

    /// Queries all servers at once. Waits until all have answered or failed.
    pub(crate) async fn query_all<T, Fut>(&self, request: impl Fn(Arc<Member>) -> Fut) -> Votes<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        self.collect(request, |_| false, None).await
    }

    async fn collect<T, Fut>(
        &self,
        request: impl Fn(Arc<Member>) -> Fut,
        is_enough: impl Fn(&Votes<T>) -> bool,
        grace: Option<Duration>,
    ) -> Votes<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut votes = Votes::none(self.0.len());
        let mut received = self.send(request);
        let mut until = None;
        while !is_enough(&votes) {
            let next = match grace {
                Some(grace) if votes.answered() >= self.needed() => {
                    let until = *until.get_or_insert_with(|| Instant::now() + grace);
                    timeout_at(until, received.recv()).await.ok().flatten()
                }
                _ => received.recv().await,
            };
            let Some((at, answer)) = next else { break };
            votes.count(at, answer);
        }
        votes
    }

    fn send<T, Fut>(&self, request: impl Fn(Arc<Member>) -> Fut) -> mpsc::UnboundedReceiver<(usize, Result<T, Failure>)>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let (sender, received) = mpsc::unbounded_channel();
        for (at, member) in self.0.iter().enumerate() {
            let (sender, answering) = (sender.clone(), request(member.clone()));
            tokio::spawn(async move {
                // Closed if the other answers were enough.
                let _ = sender.send((at, answering.await));
            });
        }
        received
    }

    /// An error, if less than a majority answered.
    pub(crate) fn check<T>(&self, votes: &mut Votes<T>) -> Result<(), Failure> {
        let (answered, nodes, needed) = (votes.answered(), self.0.len(), self.needed());
        if answered >= needed {
            return Ok(());
        }
        Err(Failure::NoQuorum { answered, nodes, needed, source: votes.failure.take().map(Box::new) })
    }
}
