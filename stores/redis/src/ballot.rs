//! Asking several servers the same, and counting their answers.

use std::{sync::Arc, time::Duration};

use lockkit::store::{Answer, Release, Token};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{debts::Debts, node::Node, trouble::Trouble};

/// How long to wait for the last answers to a survey, once a majority has answered.
pub(crate) const GRACE: Duration = Duration::from_millis(50);

/// The servers of a quorum.
#[derive(Debug)]
pub(crate) struct Members(pub(crate) Vec<Arc<Member>>);

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) node: Arc<Node>,
    debts: Arc<Debts>,
}

impl Member {
    pub(crate) fn new(node: Node) -> Self {
        Self { node: Arc::new(node), debts: Arc::default() }
    }

    /// Releases the leases. A release that the server does not hear is repeated in the background, at most for `ttl`.
    pub(crate) async fn release(
        &self,
        releases: &[Release],
        nobody: &[Token],
        ttl: Duration,
    ) -> Result<Vec<Answer>, Trouble> {
        let answer = self.node.release(releases, nobody).await;
        if answer.is_err() {
            self.debts.owe(&self.node, releases, ttl.min(self.node.terms.longest_ttl));
        }
        answer
    }
}

/// The answers so far: one place for each server. `None` without an answer.
#[derive(Debug)]
pub(crate) struct Ballot<T> {
    pub(crate) answers: Vec<Option<T>>,
    /// How many servers failed.
    failed: usize,
    trouble: Option<Trouble>,
}

impl Members {
    /// The smallest majority.
    pub(crate) fn needed(&self) -> usize {
        self.0.len() / 2 + 1
    }

    /// Asks all servers at once, until `is_enough`, or all have answered or failed. Once a majority has answered, waits a
    /// quarter of the answer timeout for the others: a stopped server must not cost the answers of a whole batch. The
    /// others go on in the background.
    pub(crate) async fn ask<T, Fut>(
        &self,
        question: impl Fn(Arc<Member>) -> Fut,
        is_enough: impl Fn(&Ballot<T>) -> bool,
    ) -> Ballot<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let grace = (self.0[0].node.terms.limits.answer / 4).max(GRACE);
        self.collect(question, is_enough, Some(grace)).await
    }

    /// Asks all servers at once. Waits for a majority, and a moment for the others.
    pub(crate) async fn survey<T, Fut>(&self, question: impl Fn(Arc<Member>) -> Fut) -> Ballot<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        self.collect(question, |_| false, Some(GRACE)).await
    }

    /// Asks all servers at once. Waits until all have answered or failed.
    pub(crate) async fn ask_all<T, Fut>(&self, question: impl Fn(Arc<Member>) -> Fut) -> Ballot<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        self.collect(question, |_| false, None).await
    }

    async fn collect<T, Fut>(
        &self,
        question: impl Fn(Arc<Member>) -> Fut,
        is_enough: impl Fn(&Ballot<T>) -> bool,
        grace: Option<Duration>,
    ) -> Ballot<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let mut ballot = Ballot { answers: self.0.iter().map(|_| None).collect(), failed: 0, trouble: None };
        let mut heard = self.send(question);
        let mut until = None;
        while !is_enough(&ballot) {
            let next = match grace {
                Some(grace) if ballot.answered() >= self.needed() => {
                    let until = *until.get_or_insert_with(|| Instant::now() + grace);
                    timeout_at(until, heard.recv()).await.ok().flatten()
                }
                _ => heard.recv().await,
            };
            let Some((at, answer)) = next else { break };
            ballot.count(at, answer);
        }
        ballot
    }

    fn send<T, Fut>(
        &self,
        question: impl Fn(Arc<Member>) -> Fut,
    ) -> mpsc::UnboundedReceiver<(usize, Result<T, Trouble>)>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let (tell, heard) = mpsc::unbounded_channel();
        for (at, member) in self.0.iter().enumerate() {
            let (tell, asking) = (tell.clone(), question(member.clone()));
            tokio::spawn(async move {
                // Nobody listens any more if the other answers were enough.
                let _ = tell.send((at, asking.await));
            });
        }
        heard
    }

    /// An error, if less than a majority answered.
    pub(crate) fn check<T>(&self, ballot: &mut Ballot<T>) -> Result<(), Trouble> {
        let (answered, nodes, needed) = (ballot.answered(), self.0.len(), self.needed());
        if answered >= needed {
            return Ok(());
        }
        Err(Trouble::NoQuorum { answered, nodes, needed, source: ballot.trouble.take().map(Box::new) })
    }
}

impl<T> Ballot<T> {
    pub(crate) fn answered(&self) -> usize {
        self.answers.iter().flatten().count()
    }

    /// Whether a majority agrees, or no majority can agree any more and a majority has answered.
    pub(crate) fn is_decided(&self, agreeing: usize, needed: usize) -> bool {
        let open = self.answers.len() - self.answered() - self.failed;
        agreeing >= needed || agreeing + open < needed && self.answered() >= needed
    }

    pub(crate) fn number(&self, is: impl Fn(&T) -> bool) -> usize {
        self.answers.iter().flatten().filter(|it| is(it)).count()
    }

    fn count(&mut self, at: usize, answer: Result<T, Trouble>) {
        match answer {
            Ok(answer) => self.answers[at] = Some(answer),
            Err(trouble) => {
                self.failed += 1;
                // A silent server may answer later. That is what waiting requests need to know.
                if self.trouble.is_none() || matches!(trouble, Trouble::Silent(_)) {
                    self.trouble = Some(trouble);
                }
            }
        }
    }
}
