//! Releases. A key without an expiry is never freed, because it may be data.

use lockkit::store::{Answer, Release, Token};

use crate::{
    answer::{answer, codes},
    error::Failure,
    layout::{Layout, name, row},
    node::Node,
};

/// The code of a value without an expiry that lockkit did not write.
const FOREIGN: i64 = 2;

impl Node {
    /// Releases the leases. A key that stays taken for its least holding time is taken by `nobody`.
    pub(crate) async fn release(&self, releases: &[Release], nobody: &[Token]) -> Result<Vec<Answer>, Failure> {
        let codes = self.release_codes(releases, nobody).await?;
        if let Some(at) = codes.iter().position(|it| *it == FOREIGN) {
            let what = match self.terms.layout {
                Layout::Token => "string",
                Layout::Redisson => "hash",
            };
            let name = name(&releases[at].key);
            let what = format!("`{name}` has a value of the type {what} without an expiry, which need not be a lock");
            return Err(Failure::Foreign(what));
        }
        Ok(codes.into_iter().map(answer).collect())
    }

    /// As [`release`](Self::release), without an error for what is left as it is: a release that is sent again alone
    /// gets that.
    pub(crate) async fn release_each(&self, releases: &[Release], nobody: &[Token]) -> Result<Vec<Answer>, Failure> {
        let codes = self.release_codes(releases, nobody).await?;
        Ok(codes.into_iter().map(|it| if it == FOREIGN { Answer::Busy } else { answer(it) }).collect())
    }

    async fn release_codes(&self, releases: &[Release], nobody: &[Token]) -> Result<Vec<i64>, Failure> {
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
        codes(releases.len(), call.run(&self.connection).await?)
    }
}
