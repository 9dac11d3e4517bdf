//! Renewals.

use lockkit::store::{Answer, Renewal};

use crate::{
    answer::{answer, codes},
    error::Failure,
    layout::add_keys,
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
        let answered = self.scripts.renew.run(&self.connection, |call, _| {
            add_keys(call, renewals.iter().map(|it| &it.key));
            for Renewal { token, ttl, .. } in renewals {
                call.arg(self.terms.layout.id(*token)).arg(millis(*ttl).max(1));
            }
        });
        let codes = codes(renewals.len(), answered.await?)?;
        Ok(codes.into_iter().map(answer).collect())
    }
}
