//! Renewals.

use lockkit::store::{Answer, Renewal};

use crate::{
    answer::{answer, codes},
    error::Failure,
    layout::{name, row},
    node::Node,
    script::millis,
};

impl Node {
    pub(crate) async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>, Failure> {
        let longest = self.terms.longest_ttl;
        if let Some(Renewal { ttl, .. }) = renewals.iter().find(|it| it.ttl > longest) {
            return Err(Failure::TooLong { ttl: *ttl, longest });
        }
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let mut call = self.scripts.renew.call();
        for Renewal { key, token, ttl, .. } in renewals {
            call = call.key(name(key)).key(row(key)).arg(self.terms.layout.id(*token)).arg(millis(*ttl).max(1));
        }
        let codes = codes(renewals.len(), call.run(&self.connection).await?)?;
        Ok(codes.into_iter().map(answer).collect())
    }
}
