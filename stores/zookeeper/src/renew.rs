//! Renewals: a burst that asks whether the children are still there, after a write that proves the session.

use std::sync::Arc;

use lockkit::store::{Answer, Renewal};

use crate::{error::Failure, link::Shared};

impl Shared {
    /// Answers each renewal. An error while no server answers: nothing is known then.
    pub(crate) async fn renew(self: Arc<Self>, renewals: Vec<Renewal>) -> Result<Vec<Answer>, Failure> {
        let link = self.current();
        let number = link.as_ref().map(|it| it.number);
        let paths: Vec<_> = {
            let mut mines = self.mines();
            let renewed = renewals.iter().map(|it| mines.prolong(it.token, it.ttl));
            renewed.map(|it| it.filter(|it| Some(it.0) == number).map(|it| it.1)).collect()
        };
        let Some(link) = link.filter(|_| paths.iter().any(Option::is_some)) else {
            return Ok(vec![Answer::Gone; renewals.len()]);
        };
        // All requests are sent before the first answer is awaited.
        let proof = link.prove(&self.settings.root);
        let asked: Vec<_> = paths.iter().map(|it| it.as_deref().map(|it| link.client.check_stat(it))).collect();
        proof.await?;
        let mut answers = Vec::with_capacity(renewals.len());
        for (renewal, asked) in renewals.iter().zip(asked) {
            let is_there = match asked {
                Some(asked) => asked.await?.is_some(),
                None => false,
            };
            answers.push(if is_there { Answer::Done } else { Answer::Gone });
            let mut mines = self.mines();
            if is_there {
                mines.count_renewal(renewal.token);
            } else if mines.until(renewal.token, link.number).is_some() {
                // Somebody has deleted its child.
                mines.remove(renewal.token);
            }
        }
        Ok(answers)
    }
}
