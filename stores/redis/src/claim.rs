//! Claims: one script takes all of the leases or none, or each that is free.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit::{
    Fence,
    store::{Acquired, AcquiredAll, Claim, Grant, Previous},
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

/// The answer to claims of which all are granted or none.
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

/// The answer to one claim of several.
enum Answered {
    Granted(Given),
    Held(Option<Duration>),
    /// Nothing was done for it.
    Not,
}

impl Node {
    /// Takes all of the leases or none.
    pub(crate) async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Failure> {
        let mut given = Vec::with_capacity(claims.len());
        for (at, answer) in self.claim(claims, "all").await?.into_iter().enumerate() {
            match answer {
                Answered::Granted(it) => given.push(it),
                Answered::Held(free_in) => return Ok(Taken::Held { at, free_in }),
                Answered::Not => {}
            }
        }
        if given.len() < claims.len() {
            return Err(unexpected(&"to some claims"));
        }
        Ok(Taken::Granted(given))
    }

    /// Takes each of the leases that is free. `None` for a claim that must be sent alone.
    pub(crate) async fn acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>, Failure> {
        let answers = self.claim(claims, "each").await?;
        let acquired = answers.into_iter().zip(claims).map(|(answer, claim)| match answer {
            Answered::Granted(it) => Some(Acquired::Granted(grant(it, claim, self.terms.longest_ttl))),
            Answered::Held(free_in) => Some(Acquired::Held { free_in }),
            Answered::Not => None,
        });
        Ok(acquired.collect())
    }

    async fn claim(&self, claims: &[Claim], which: &str) -> Result<Vec<Answered>, Failure> {
        let mut call = self.scripts.acquire.call().key("lockkit:epoch").key("lockkit:names").key("lockkit:times");
        call = call.arg(self.quarantine.load(Ordering::Relaxed)).arg(SPARE).arg(which);
        for Claim { key, token, holder, ttl, .. } in claims {
            let ttl = millis((*ttl).min(self.terms.longest_ttl)).max(1);
            call = call.key(name(key)).key(row(key));
            call = call.arg(self.terms.layout.id(*token)).arg(&**holder).arg(ttl).arg(key.as_str());
        }
        let answer: Vec<Vec<u8>> = read(call.run_checked(&self.connection).await?)?;
        let mut fields = answer.iter().map(|it| String::from_utf8_lossy(it));
        let mut next = || fields.next().ok_or_else(|| unexpected(&"too little"));
        self.learn(&next()?)?;
        let now: u64 = parsed(&String::from_utf8_lossy(answer.last().map_or(b"", |it| it)))?;
        let answered = claims.iter().map(|_| {
            let (fence, second) = (next()?, next()?);
            let (holder, before, expired) = (next()?, next()?, next()?);
            if fence.is_empty() {
                let Ok(free_in) = second.parse::<i64>() else { return Ok(Answered::Not) };
                let free_in = u64::try_from(free_in).ok();
                return Ok(Answered::Held(free_in.map(|it| Duration::from_millis(it.max(1)))));
            }
            let previous = if before.is_empty() {
                None
            } else {
                let expired_for = Duration::from_micros(now.saturating_sub(parsed(&expired)?));
                Some(Previous::new(holder, Fence::from(parsed::<u64>(&before)?), expired_for))
            };
            Ok(Answered::Granted(Given { fence: parsed(&fence)?, is_agreed: second == "1", previous }))
        });
        answered.collect()
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
