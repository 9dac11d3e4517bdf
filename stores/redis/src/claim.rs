//! Claims: one script takes all of the leases or none, or each that is free.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit::{
    Fence,
    store::{Acquired, AcquiredAll, Claim, Grant, Previous},
};
use redis::Value;

use crate::{
    answer::{read, unexpected},
    error::Failure,
    layout::add_keys,
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
pub(crate) enum Answered {
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
        let answered = self.scripts.acquire.run(&self.connection, |call, run| {
            add_keys(call, claims.iter().map(|it| &it.key));
            call.arg(format!("{run} {}", self.quarantine.load(Ordering::Relaxed))).arg(which);
            for Claim { token, holder, ttl, .. } in claims {
                let ttl = millis((*ttl).min(self.terms.longest_ttl)).max(1);
                call.arg(self.terms.layout.id(*token)).arg(&**holder).arg(ttl);
            }
        });
        let Value::Array(mut answers) = answered.await? else { return Err(unexpected(&"no array")) };
        if answers.len() > claims.len() {
            self.learn(read(answers.split_off(claims.len()).swap_remove(0))?);
        }
        if answers.len() < claims.len() {
            return Err(unexpected(&"too little"));
        }
        answers.into_iter().map(answer).collect()
    }

    /// Raises the fences of held leases to those that a quorum agreed on. `false` if one of them is not held any more.
    pub(crate) async fn raise(&self, claims: &[Claim], fences: &[u64]) -> Result<bool, Failure> {
        let answered = self.scripts.raise.run(&self.connection, |call, _| {
            add_keys(call, claims.iter().map(|it| &it.key));
            for (claim, fence) in claims.iter().zip(fences) {
                call.arg(self.terms.layout.id(claim.token)).arg(*fence);
            }
        });
        let raised: usize = read(answered.await?)?;
        Ok(raised == claims.len())
    }
}

/// Reads the answer to one claim.
pub(crate) fn answer(value: Value) -> Result<Answered, Failure> {
    let fields = match value {
        Value::Array(fields) => fields,
        fence => return Ok(Answered::Granted(Given { fence: read(fence)?, is_agreed: false, previous: None })),
    };
    match fields.len() {
        0 => Ok(Answered::Not),
        1 => {
            let (left,): (i64,) = read(Value::Array(fields))?;
            Ok(Answered::Held(u64::try_from(left).ok().map(|it| Duration::from_millis(it.max(1)))))
        }
        _ => {
            let (fence, agreed, holder, before, expired): (u64, u8, Vec<u8>, u64, i64) = read(Value::Array(fields))?;
            let previous = u64::try_from(expired).ok().map(|expired| {
                let holder = String::from_utf8_lossy(&holder);
                Previous::new(holder, Fence::from(before), Duration::from_micros(expired))
            });
            Ok(Answered::Granted(Given { fence, is_agreed: agreed == 1, previous }))
        }
    }
}

/// The answer of the store to a request for several leases.
pub(crate) fn all(taken: Taken, claims: &[Claim], longest_ttl: Duration) -> AcquiredAll {
    match taken {
        Taken::Granted(given) => AcquiredAll::Granted(
            given.into_iter().zip(claims).map(|(it, claim)| grant(it, claim, longest_ttl)).collect(),
        ),
        Taken::Held { at, free_in } => AcquiredAll::Held { key: claims[at].key.clone(), free_in },
    }
}

pub(crate) fn grant(given: Given, claim: &Claim, longest_ttl: Duration) -> Grant {
    let mut grant = Grant::from(Fence::from(given.fence)).after(given.previous);
    grant.spare_fences = SPARE;
    grant.ttl = (claim.ttl > longest_ttl).then_some(longest_ttl);
    grant
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_says_whether_a_quorum_agreed_on_its_fence() {
        for agreed in [0, 1] {
            let fields =
                [Value::Int(7), Value::Int(agreed), Value::BulkString(Vec::new()), Value::Int(0), Value::Int(-1)];
            let Ok(Answered::Granted(given)) = answer(Value::Array(fields.to_vec())) else { panic!("it is a grant") };
            assert_eq!((given.fence, given.is_agreed, given.previous.is_some()), (7, agreed == 1, false));
        }
    }
}
