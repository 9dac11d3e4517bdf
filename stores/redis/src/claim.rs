//! Claims: one script takes all of the leases or none.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit::{
    Fence,
    store::{AcquiredAll, Claim, Grant, Previous},
};

use crate::{
    answer::{parsed, read, unexpected},
    error::Failure,
    layout::{name, row},
    node::Node,
    script::millis,
};

/// How many fences above the one of a grant belong to the grant.
pub(crate) const SPARE: u64 = 127;

/// The answer to claims.
#[derive(Debug)]
pub(crate) enum Taken {
    /// One for each claim.
    Granted(Vec<Given>),
    Held {
        /// The number of the claim.
        at: usize,
        free_in: Option<Duration>,
    },
}

/// The grant of one claim.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) fence: u64,
    /// Whether a quorum agreed on the fence.
    pub(crate) is_agreed: bool,
    pub(crate) previous: Option<Previous>,
}

impl Node {
    /// Takes all of the leases or none.
    pub(crate) async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Failure> {
        let mut call = self.scripts.acquire.call().key("lockkit:epoch").key("lockkit:names").key("lockkit:times");
        call = call.arg(self.quarantine.load(Ordering::Relaxed)).arg(SPARE);
        for Claim { key, token, holder, ttl, .. } in claims {
            let ttl = millis((*ttl).min(self.terms.longest_ttl)).max(1);
            call = call.key(name(key)).key(row(key));
            call = call.arg(self.terms.layout.id(*token)).arg(&**holder).arg(ttl).arg(key.as_str());
        }
        let answer: Vec<Vec<u8>> = read(call.run_checked(&self.connection).await?)?;
        let mut fields = answer.iter().map(|it| String::from_utf8_lossy(it));
        let mut next = || fields.next().ok_or_else(|| unexpected(&"too little"));
        match &*next()? {
            "held" => {
                let at = parsed::<usize>(&next()?)?.saturating_sub(1);
                let free_in = parsed::<i64>(&next()?)?;
                self.learn(&next()?)?;
                Ok(Taken::Held { at, free_in: u64::try_from(free_in).ok().map(|it| Duration::from_millis(it.max(1))) })
            }
            "granted" => {
                self.learn(&next()?)?;
                let now: u64 = parsed(&String::from_utf8_lossy(answer.last().map_or(b"", |it| it)))?;
                let given = claims.iter().map(|_| {
                    let (fence, is_agreed) = (parsed(&next()?)?, &*next()? == "1");
                    let (holder, before, expired) = (next()?, next()?, next()?);
                    let previous = if before.is_empty() {
                        None
                    } else {
                        let expired_for = Duration::from_micros(now.saturating_sub(parsed(&expired)?));
                        Some(Previous::new(holder, Fence::from(parsed::<u64>(&before)?), expired_for))
                    };
                    Ok(Given { fence, is_agreed, previous })
                });
                Ok(Taken::Granted(given.collect::<Result<_, Failure>>()?))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Raises the fences of held leases to those that a quorum agreed on. `false` if one of them is not held any more.
    pub(crate) async fn raise(&self, claims: &[Claim], fences: &[u64]) -> Result<bool, Failure> {
        let mut call = self.scripts.raise.call().arg(SPARE);
        for (Claim { key, token, .. }, fence) in claims.iter().zip(fences) {
            call = call.key(name(key)).key(row(key)).arg(self.terms.layout.id(*token)).arg(*fence);
        }
        let held: usize = read(call.run(&self.connection).await?)?;
        Ok(held == claims.len())
    }
}

/// The answer of the store to a request for several leases.
pub(crate) fn all(taken: Taken, claims: &[Claim], longest_ttl: Duration) -> AcquiredAll {
    match taken {
        Taken::Granted(given) => AcquiredAll::Granted(
            given.into_iter().zip(claims).map(|(it, claim)| grant(it, claim, longest_ttl)).collect(),
        ),
        Taken::Held { at, free_in } => AcquiredAll::Held { key: claims[at.min(claims.len() - 1)].key.clone(), free_in },
    }
}

pub(crate) fn grant(given: Given, claim: &Claim, longest_ttl: Duration) -> Grant {
    let mut grant = Grant::from(Fence::from(given.fence)).after(given.previous);
    grant.spare_fences = SPARE;
    grant.ttl = (claim.ttl > longest_ttl).then_some(longest_ttl);
    grant
}
