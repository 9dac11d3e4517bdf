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
    answer::{read, unexpected},
    error::Failure,
    layout::Layout,
    node::Node,
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
        let answered = self.scripts.list.run(&self.connection, |call, _| {
            call.arg(0).arg(self.quarantine_of(all)).arg(key.as_str());
        });
        Ok(records(answered.await?)?.0.pop())
    }

    /// Reads the held leases. With `all`, fails if the server may have forgotten one.
    pub(crate) async fn list(&self, prefix: &str, limit: u32, all: bool) -> Result<Vec<Seen>, Failure> {
        // No text has the byte 255.
        let last = [b"(", prefix.as_bytes(), b"\xff"].concat();
        let mut first = if prefix.is_empty() { b"-".to_vec() } else { format!("[{prefix}").into_bytes() };
        let mut seen = Vec::new();
        loop {
            let left = limit.saturating_sub(u32::try_from(seen.len()).unwrap_or(u32::MAX));
            let answered = self.scripts.list.run(&self.connection, |call, _| {
                call.arg(0).arg(self.quarantine_of(all)).arg(&first).arg(&last).arg(left);
            });
            let (mut found, next) = records(answered.await?)?;
            seen.append(&mut found);
            if next.is_empty() {
                return Ok(seen);
            }
            first = next;
        }
    }

    fn quarantine_of(&self, all: bool) -> u64 {
        if all { self.quarantine.load(Ordering::Relaxed) } else { 0 }
    }
}

/// Also returns where the next list goes on.
pub(crate) fn records(value: Value) -> Result<(Vec<Seen>, Vec<u8>), Failure> {
    if let Value::Int(left) = value {
        return Err(Failure::quarantined(Duration::from_millis(u64::try_from(left).unwrap_or(0))));
    }
    let mut answers = read::<Vec<Value>>(value)?.into_iter();
    let next = read(answers.next().ok_or_else(|| unexpected(&"too little"))?)?;
    Ok((answers.map(record).collect::<Result<_, _>>()?, next))
}

fn record(value: Value) -> Result<Seen, Failure> {
    type Texts = (Vec<u8>, Vec<u8>, u8, Vec<u8>);
    type Numbers = (u64, u64, u64, i64, u64, i64, u8);
    let mut fields: Vec<Value> = read(value)?;
    let numbers = fields.split_off(fields.len().min(4));
    let (key, holder_id, is_ours, holder): Texts = read(Value::Array(fields))?;
    let (fence, acquired, held_for, left, renewals, ttl, agreed): Numbers = read(Value::Array(numbers))?;
    let text = |it: &[u8]| String::from_utf8_lossy(it).into_owned();
    let holder = if is_ours == 1 { text(&holder) } else { another_client(&text(&holder), left >= 0) };
    let acquired = UNIX_EPOCH + Duration::from_micros(acquired);
    let mut info = LeaseInfo::new(Key::from(text(&key)), holder, Fence::from(fence), acquired);
    info.held_for = Duration::from_micros(held_for);
    info.expires_in = u64::try_from(left).map_or(NEVER, Duration::from_millis);
    info.renewals = renewals;
    info.ttl = u64::try_from(ttl).ok().map(Duration::from_millis);
    let token = Layout::token(&holder_id).ok_or_else(|| unexpected(&text(&holder_id)))?;
    Ok(Seen { record: LeaseRecord::new(token, info), is_agreed: agreed == 1 })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    /// A lease as a list answers it.
    fn seen(left: i64, agreed: i64) -> Seen {
        let texts = [text("k"), text(&"0".repeat(32)), Value::Int(1), text("test")];
        let numbers = [7, 1_000_000, 500_000, left, 3, 30_000, agreed].map(Value::Int);
        let answer = Value::Array(vec![text(""), Value::Array([&texts[..], &numbers[..]].concat())]);
        records(answer).expect("it is a list").0.remove(0)
    }

    #[test]
    fn a_lease_is_read_as_the_script_answers_it() {
        for agreed in [0, 1] {
            let Seen { record, is_agreed } = seen(1500, agreed);
            assert_eq!(is_agreed, agreed == 1);
            let info = record.info;
            assert_eq!((info.fence.get(), info.renewals), (7, 3));
            assert_eq!(info.acquired_at, UNIX_EPOCH + Duration::from_secs(1));
            assert_eq!((info.held_for, info.expires_in), (Duration::from_millis(500), Duration::from_millis(1500)));
            assert_eq!(info.ttl, Some(Duration::from_secs(30)));
        }
    }

    #[test]
    fn a_lock_without_an_expiry_is_shown_with_one_in_a_year() {
        assert_eq!(seen(-1, 0).record.info.expires_in, Duration::from_hours(365 * 24));
    }
}
