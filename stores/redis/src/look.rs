//! Reads who holds leases, also the locks of other clients.

use std::{
    sync::atomic::Ordering,
    time::{Duration, UNIX_EPOCH},
};

use lockkit::{
    Fence, Key,
    store::{LeaseInfo, LeaseRecord},
};
use redis::Value;

use crate::{
    answer::{parsed, read, unexpected},
    error::Failure,
    layout::Layout,
    node::Node,
    script::Call,
};

/// What a lock without an expiry shows as its expiry.
const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How much of another client's value is shown. The whole may be a secret, and enough to release the lock.
const SHOWN_CHARS: usize = 8;

/// A held lease.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) record: LeaseRecord,
    /// Whether a quorum agreed on its fence.
    pub(crate) is_agreed: bool,
}

impl Node {
    /// Reads the holder of the lease. With `all`, fails if the server may have forgotten one.
    pub(crate) async fn look(&self, key: &Key, all: bool) -> Result<Option<Seen>, Failure> {
        Ok(records(self.reading(all).arg(key.as_str()).run(&self.connection).await?)?.pop())
    }

    /// Reads the held leases. With `all`, fails if the server may have forgotten one.
    pub(crate) async fn list(&self, prefix: &str, limit: u32, all: bool) -> Result<Vec<Seen>, Failure> {
        // No text has the byte 255.
        let last = [b"(", prefix.as_bytes(), b"\xff"].concat();
        let first = if prefix.is_empty() { "-".to_owned() } else { format!("[{prefix}") };
        records(self.reading(all).arg(first).arg(last).arg(limit).run(&self.connection).await?)
    }

    fn reading(&self, all: bool) -> Call<'_> {
        let quarantine = if all { self.quarantine.load(Ordering::Relaxed) } else { 0 };
        self.scripts.list.call().key("lockkit:names").key("lockkit:epoch").arg(quarantine)
    }
}

fn records(value: Value) -> Result<Vec<Seen>, Failure> {
    if let Value::Int(left) = value {
        return Err(Failure::quarantined(Duration::from_millis(u64::try_from(left).unwrap_or(0))));
    }
    read::<Vec<Vec<Vec<u8>>>>(value)?.iter().map(|it| record(it)).collect()
}

fn record(fields: &[Vec<u8>]) -> Result<Seen, Failure> {
    let [key, holder_id, is_ours, holder, fence, acquired, left, renewals, ttl, now, agreed] = fields else {
        return Err(unexpected(&format!("{} fields of a lease", fields.len())));
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
    let token = Layout::token(holder_id).ok_or_else(|| unexpected(&text(holder_id)))?;
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
