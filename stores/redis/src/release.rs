//! Releases. A key without an expiry is never freed, because it may be data.

use lockkit::store::{Answer, Release};

use crate::{
    answer::{answer, codes},
    error::Failure,
    layout::{Layout, add_keys, name},
    node::Node,
};

/// The code of a value without an expiry that lockkit did not write.
const FOREIGN: i64 = 2;

impl Node {
    /// Releases the leases.
    pub(crate) async fn release(&self, releases: &[Release]) -> Result<Vec<Answer>, Failure> {
        let codes = self.release_codes(releases).await?;
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
    pub(crate) async fn release_each(&self, releases: &[Release]) -> Result<Vec<Answer>, Failure> {
        let codes = self.release_codes(releases).await?;
        Ok(codes.into_iter().map(|it| if it == FOREIGN { Answer::Busy } else { answer(it) }).collect())
    }

    async fn release_codes(&self, releases: &[Release]) -> Result<Vec<i64>, Failure> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let answered = self.scripts.release.run(&self.connection, |call, _| {
            add_keys(call, releases.iter().map(|it| &it.key));
            for Release { token, min_hold, .. } in releases {
                let min_hold = u64::try_from(min_hold.as_micros()).unwrap_or(u64::MAX);
                call.arg(self.terms.layout.id(*token)).arg(min_hold);
            }
        });
        codes(releases.len(), answered.await?)
    }
}
