//! One server: each operation as one call of a script. Knows nothing of quorums.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, UNIX_EPOCH},
};

use lockkit::{
    Fence, Key,
    store::{Answer, Claim, LeaseInfo, LeaseRecord, Previous, Release, Renewal, Token},
};
use redis::{FromRedisValue, Value, from_redis_value};

use crate::{
    fit::field,
    layout::{Layout, hex, name, row},
    link::Link,
    releases::Releases,
    script::{Call, Scripts},
    server::{Limits, Server},
    trouble::Trouble,
};

/// How many fences above the one of a grant belong to the grant.
pub(crate) const SPARE: u64 = 127;

/// What a lock without an expiry shows as its expiry.
const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How much of another client's value is shown. The whole may be a secret, and enough to release the lock.
const SHOWN_CHARS: usize = 8;

/// How a store is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) layout: Layout,
    pub(crate) longest_ttl: Duration,
    /// Zero: none.
    pub(crate) quarantine: Duration,
    pub(crate) limits: Limits,
}

/// One server and what this process knows of it.
#[derive(Debug)]
pub(crate) struct Node {
    link: Link,
    pub(crate) releases: Releases,
    scripts: Scripts,
    pub(crate) terms: Terms,
    /// The longest quarantine that any client has asked for, in milliseconds.
    quarantine: AtomicU64,
}

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

/// A held lease.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) record: LeaseRecord,
    /// Whether a quorum agreed on its fence.
    pub(crate) is_agreed: bool,
}

impl Node {
    pub(crate) fn new(server: Server, terms: Terms) -> Self {
        Self {
            link: Link::new(server.clone(), terms.limits),
            releases: Releases::new(server, terms.limits),
            scripts: Scripts::of(terms.layout),
            quarantine: millis(terms.quarantine).into(),
            terms,
        }
    }

    pub(crate) async fn open(&self) -> Result<(), Trouble> {
        self.link.open().await
    }

    /// The id of the server's process. Empty if it does not tell.
    pub(crate) async fn run(&self) -> Result<String, Trouble> {
        let info: String = read(self.link.ask(redis::cmd("INFO").arg("server")).await?)?;
        Ok(field(&info, "run_id").to_owned())
    }

    /// Takes all of the leases or none.
    pub(crate) async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Trouble> {
        let mut call = self.scripts.acquire.call().key("lockkit:epoch").key("lockkit:names").key("lockkit:times");
        call = call.arg(self.quarantine.load(Ordering::Relaxed)).arg(SPARE);
        for Claim { key, token, holder, ttl, .. } in claims {
            let ttl = millis((*ttl).min(self.terms.longest_ttl)).max(1);
            call = call.key(name(key)).key(row(key));
            call = call.arg(self.terms.layout.id(*token)).arg(&**holder).arg(ttl).arg(key.as_str());
        }
        let answer: Vec<Vec<u8>> = read(call.ask(&self.link).await?)?;
        let mut fields = answer.iter().map(|it| String::from_utf8_lossy(it));
        let mut next = || fields.next().ok_or_else(|| nonsense(&"too little"));
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
                Ok(Taken::Granted(given.collect::<Result<_, Trouble>>()?))
            }
            other => Err(nonsense(&other)),
        }
    }

    /// Raises the fences of held leases to those that a quorum agreed on. `false` if one of them is not held any more.
    pub(crate) async fn raise(&self, claims: &[Claim], fences: &[u64]) -> Result<bool, Trouble> {
        let mut call = self.scripts.raise.call().arg(SPARE);
        for (Claim { key, token, .. }, fence) in claims.iter().zip(fences) {
            call = call.key(name(key)).key(row(key)).arg(self.terms.layout.id(*token)).arg(*fence);
        }
        let held: usize = read(call.ask(&self.link).await?)?;
        Ok(held == claims.len())
    }

    pub(crate) async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>, Trouble> {
        let longest = self.terms.longest_ttl;
        if let Some(Renewal { ttl, .. }) = renewals.iter().find(|it| it.ttl > longest) {
            return Err(Trouble::TooLong { ttl: *ttl, longest });
        }
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let mut call = self.scripts.renew.call();
        for Renewal { key, token, ttl, .. } in renewals {
            call = call.key(name(key)).key(row(key)).arg(self.terms.layout.id(*token)).arg(millis(*ttl).max(1));
        }
        answers(renewals.len(), call.ask(&self.link).await?)
    }

    /// Releases the leases. A key that stays taken for its least holding time is taken by `nobody`.
    pub(crate) async fn release(&self, releases: &[Release], nobody: &[Token]) -> Result<Vec<Answer>, Trouble> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let layout = self.terms.layout;
        let mut call = self.scripts.release.call().key("lockkit:times").key("lockkit:names").arg(layout.message());
        for (Release { key, token, min_hold, .. }, nobody) in releases.iter().zip(nobody) {
            call = call.key(name(key)).key(row(key)).arg(layout.id(*token)).arg(hex(*token));
            let min_hold = u64::try_from(min_hold.as_micros()).unwrap_or(u64::MAX);
            call = call.arg(min_hold).arg(layout.id(*nobody)).arg(key.as_str()).arg(layout.channel(key));
        }
        let answer = call.ask(&self.link).await?;
        let foreign = read::<Vec<i64>>(answer.clone())?.iter().position(|it| *it == 2);
        if let Some(Release { key, .. }) = foreign.and_then(|at| releases.get(at)) {
            let what = match layout {
                Layout::Token => "string",
                Layout::Redisson => "hash",
            };
            let what =
                format!("`{}` has a value of the type {what} without an expiry, which need not be a lock", name(key));
            return Err(Trouble::Foreign(what));
        }
        answers(releases.len(), answer)
    }

    /// Reads the holder of the lease. With `all`, fails if the server may have forgotten one.
    pub(crate) async fn look(&self, key: &Key, all: bool) -> Result<Option<Seen>, Trouble> {
        Ok(records(self.reading(all).arg(key.as_str()).ask(&self.link).await?)?.pop())
    }

    /// Reads the held leases. With `all`, fails if the server may have forgotten one.
    pub(crate) async fn list(&self, prefix: &str, limit: u32, all: bool) -> Result<Vec<Seen>, Trouble> {
        // No text has the byte 255.
        let last = [b"(", prefix.as_bytes(), b"\xff"].concat();
        let first = if prefix.is_empty() { "-".to_owned() } else { format!("[{prefix}") };
        records(self.reading(all).arg(first).arg(last).arg(limit).ask(&self.link).await?)
    }

    fn reading(&self, all: bool) -> Call<'_> {
        let quarantine = if all { self.quarantine.load(Ordering::Relaxed) } else { 0 };
        self.scripts.list.call().key("lockkit:names").key("lockkit:epoch").arg(quarantine)
    }

    pub(crate) async fn sweep(&self, retention: Duration, limit: u32) -> Result<u64, Trouble> {
        let retention = u64::try_from(retention.as_micros()).unwrap_or(u64::MAX);
        let call = self.scripts.sweep.call().key("lockkit:names").key("lockkit:times").arg(retention).arg(limit);
        read(call.ask(&self.link).await?)
    }

    /// Ends the quarantine if `is_new`. Returns how much of it is left.
    pub(crate) async fn quarantine(&self, is_new: bool) -> Result<Duration, Trouble> {
        let (doing, quarantine) = if is_new {
            ("declare", millis(self.terms.quarantine))
        } else {
            ("ask", self.quarantine.load(Ordering::Relaxed))
        };
        if quarantine == 0 {
            return Ok(Duration::ZERO);
        }
        let call = self.scripts.declare.call().key("lockkit:epoch").arg(doing).arg(quarantine);
        Ok(Duration::from_millis(read(call.ask(&self.link).await?)?))
    }

    fn learn(&self, longest: &str) -> Result<(), Trouble> {
        if self.quarantine.load(Ordering::Relaxed) > 0 {
            self.quarantine.fetch_max(parsed(longest)?, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn answers(number: usize, value: Value) -> Result<Vec<Answer>, Trouble> {
    let answers: Vec<u8> = read::<Vec<i64>>(value)?.into_iter().map(|it| u8::from(it == 1)).collect();
    if answers.len() != number {
        return Err(nonsense(&format!("{} times to {number} requests", answers.len())));
    }
    Ok(answers.into_iter().map(|it| if it == 1 { Answer::Done } else { Answer::Gone }).collect())
}

fn records(value: Value) -> Result<Vec<Seen>, Trouble> {
    if let Value::Int(left) = value {
        return Err(Trouble::forgot(Duration::from_millis(u64::try_from(left).unwrap_or(0))));
    }
    read::<Vec<Vec<Vec<u8>>>>(value)?.iter().map(|it| record(it)).collect()
}

fn record(fields: &[Vec<u8>]) -> Result<Seen, Trouble> {
    let [key, holder_id, is_ours, holder, fence, acquired, left, renewals, ttl, now, agreed] = fields else {
        return Err(nonsense(&format!("{} fields of a lease", fields.len())));
    };
    let text = |it: &[u8]| String::from_utf8_lossy(it).into_owned();
    let micros = |it: &[u8]| parsed::<u64>(&text(it)).map(Duration::from_micros);
    let acquired = micros(acquired)?;
    let left = parsed::<i64>(&text(left))?;
    let holder = match is_ours.as_slice() {
        b"1" => text(holder),
        _ => another_client(&text(holder), left >= 0),
    };
    let fence = Fence::from(parsed::<u64>(&text(fence))?);
    let mut info = LeaseInfo::new(Key::from(text(key)), holder, fence, UNIX_EPOCH + acquired);
    info.held_for = micros(now)?.saturating_sub(acquired);
    info.expires_in = u64::try_from(left).map_or(NEVER, Duration::from_millis);
    info.renewals = parsed(&text(renewals))?;
    info.ttl = if ttl.is_empty() { None } else { Some(Duration::from_millis(parsed(&text(ttl))?)) };
    let token = Layout::token(holder_id).ok_or_else(|| nonsense(&text(holder_id)))?;
    Ok(Seen { record: LeaseRecord::new(token, info), is_agreed: agreed == b"1" })
}

/// The holder of a lock that lockkit did not write, by its value.
fn another_client(value: &str, expires: bool) -> String {
    let mut printable = value.chars().filter(|it| !it.is_control());
    let mut shown: String = printable.by_ref().take(SHOWN_CHARS).collect();
    if printable.next().is_some() {
        shown.push('…');
    }
    let expiry = if expires { "" } else { ", without an expiry" };
    format!("another client: {shown}{expiry}")
}

fn read<T: FromRedisValue>(value: Value) -> Result<T, Trouble> {
    from_redis_value(value).map_err(|err| nonsense(&err))
}

fn parsed<T: std::str::FromStr>(text: &str) -> Result<T, Trouble> {
    text.parse().map_err(|_| nonsense(&text))
}

fn nonsense(answer: &dyn std::fmt::Display) -> Trouble {
    Trouble::Nonsense(answer.to_string())
}

/// Whole milliseconds, rounded up.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}
