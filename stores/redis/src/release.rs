//! Releases. A key without an expiry is never freed, because it may be data.

use lockkit::store::{Answer, Release, Token};

use crate::{
    answer::{answers, read},
    error::Failure,
    layout::{Layout, name, row},
    node::Node,
};

impl Node {
    /// Releases the leases. A key that stays taken for its least holding time is taken by `nobody`.
    pub(crate) async fn release(&self, releases: &[Release], nobody: &[Token]) -> Result<Vec<Answer>, Failure> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let layout = self.terms.layout;
        let mut call = self.scripts.release.call().key("lockkit:names").arg(layout.message());
        for (Release { key, token, min_hold, .. }, nobody) in releases.iter().zip(nobody) {
            call = call.key(name(key)).key(row(key)).arg(layout.id(*token)).arg(token.to_hex());
            let min_hold = u64::try_from(min_hold.as_micros()).unwrap_or(u64::MAX);
            call = call.arg(min_hold).arg(layout.id(*nobody)).arg(key.as_str()).arg(layout.channel(key));
        }
        let answer = call.run(&self.connection).await?;
        let foreign = read::<Vec<i64>>(answer.clone())?.iter().position(|it| *it == 2);
        if let Some(Release { key, .. }) = foreign.and_then(|at| releases.get(at)) {
            let what = match layout {
                Layout::Token => "string",
                Layout::Redisson => "hash",
            };
            let what =
                format!("`{}` has a value of the type {what} without an expiry, which need not be a lock", name(key));
            return Err(Failure::Foreign(what));
        }
        answers(releases.len(), answer)
    }
}
