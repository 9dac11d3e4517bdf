//! Renewals: a burst of reads that finds whether the children are still there, after a write that proves the session. A
//! child whose ttl has changed is written, so that others see when it expires.
//!
//! A lease is trusted for 3/8 of the session timeout. A follower reports only every half tick which sessions are alive,
//! and the client is silent for up to a third of the timeout: when a follower died right after a confirmed renewal,
//! sessions of 3 s lived for 2.56 to 3.06 s.

use std::{pin::Pin, sync::Arc};

use lockkit::store::{Answer, Renewal};
use zookeeper_client::Error as Zk;

use crate::{
    claims::Renewed,
    error::Failure,
    remove::is_refused,
    session::{Session, Shared},
};

/// Whether the child is there.
type There<'l> = Pin<Box<dyn Future<Output = Result<bool, Zk>> + Send + 'l>>;

impl Shared {
    /// Answers each renewal. An error while no server answers: nothing is known then.
    pub(crate) async fn renew(self: Arc<Self>, renewals: Vec<Renewal>) -> Result<Vec<Answer>, Failure> {
        let session = self.current();
        let number = session.as_ref().map(|it| it.number);
        let renewed: Vec<_> = {
            let mut claims = self.claims();
            let renewed = renewals.iter().map(|it| claims.prolong(it.token, it.ttl));
            renewed.map(|it| it.filter(|it| Some(it.session) == number)).collect()
        };
        let Some(session) = session.filter(|_| renewed.iter().any(Option::is_some)) else {
            return Ok(vec![Answer::Gone; renewals.len()]);
        };
        // All requests are sent before the first answer is awaited.
        let proof = session.prove(&self.settings.root);
        let pending: Vec<_> = renewed.iter().map(|it| it.as_ref().map(|it| session.confirm(it))).collect();
        proof.await?;
        let mut answers = Vec::with_capacity(renewals.len());
        for ((renewal, renewed), pending) in renewals.iter().zip(&renewed).zip(pending) {
            let is_there = match pending {
                Some(pending) => pending.await?,
                None => false,
            };
            answers.push(if is_there { Answer::Done } else { Answer::Gone });
            let mut claims = self.claims();
            if is_there {
                claims.count_renewal(renewal.token);
                if let Some(child) = renewed.as_ref().and_then(|it| it.child.as_ref()) {
                    claims.shows(renewal.token, child.ttl);
                }
            } else if claims.until(renewal.token, session.number).is_some() {
                // Another client has deleted its child.
                claims.remove(renewal.token);
            }
        }
        Ok(answers)
    }
}

impl Session {
    /// Sends the request at once. Returns whether the child is there.
    fn confirm(&self, renewed: &Renewed) -> There<'_> {
        let Renewed { session: _, path, child } = renewed;
        let Some(child) = child else {
            let read = self.client.check_stat(path);
            return Box::pin(async move { Ok(read.await?.is_some()) });
        };
        let written = self.client.set_data(path, &child.encode(), None);
        Box::pin(async move {
            match written.await {
                Ok(_) => Ok(true),
                Err(Zk::NoNode) => Ok(false),
                // The server looks for the node before it looks at the rights.
                Err(err) if is_refused(&err) => Ok(true),
                Err(err) => Err(err),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use lockkit::store::Token;

    use super::*;
    use crate::{
        child::Child,
        faults::{
            Outcome::{Lost, Refused},
            Request::SetData,
            SESSION, child, inside_behind_proxy, own_root, session,
        },
    };

    #[tokio::test]
    async fn a_child_is_there_if_the_server_refuses_to_write_it() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (session, dir, token) = (session(&shared), shared.dir("k"), Token::random());
        let path = format!("{dir}/{}", child(&shared, &dir, token, b"").await.name);
        let shown = Child { token, ttl: SESSION, holder: "test".to_owned() };
        let renewed = |path: &str| Renewed { session: 0, path: path.to_owned(), child: Some(shown.clone()) };
        assert_eq!(session.confirm(&renewed(&path)).await, Ok(true));
        proxy.plan(&[(SetData, Refused), (SetData, Lost)]);
        assert_eq!(session.confirm(&renewed(&path)).await, Ok(true));
        assert_eq!(session.confirm(&renewed(&path)).await, Err(Zk::ConnectionLoss));
        assert_eq!(session.confirm(&renewed(&format!("{dir}/none"))).await, Ok(false));
    }
}
