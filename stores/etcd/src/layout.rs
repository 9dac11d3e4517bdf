//! Where a lease is in etcd, and what its keys hold. Pure: no I/O.
//!
//! A key below the name is a claim if lockkit wrote it or if it has the form of a `concurrency.Mutex`. The record of
//! the last holder is written only if there is none or lockkit wrote it: a claim without its record would weaken
//! `TakeOver`, so another value there is an error.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use etcd_client::{Compare, CompareOp, KeyValue, Txn, TxnOp};
use lockkit::{
    Error, Fault, Fence, Key, Result,
    store::{LeaseInfo, LeaseRecord, Token},
};

/// Below this are the records of the last holders.
const LAST: &str = "lockkit/last/";

/// Below this is one key for each etcd lease that a process keeps alive.
const SESSION: &str = "lockkit/session/";

/// By how many bits a revision is shifted to be a fence.
const FENCE_BITS: u32 = 8;

/// How many fences above its own belong to each grant.
pub(crate) const SPARE_FENCES: u64 = (1 << FENCE_BITS) - 1;

/// Begins the value of a key that lockkit has written.
const VERSION: &str = "lockkit1";

/// Begins such values in all versions of lockkit.
const ANY_VERSION: &str = "lockkit";

/// Above all values that begin so.
const ABOVE_ANY_VERSION: &str = "lockkiu";

/// How many characters of another owner's value an error shows.
const SHOWN: usize = 40;

/// The fence of the claim whose key was created at this revision. Fences stay below 2^62 for the first 2^54 revisions.
pub(crate) fn fence(create_revision: i64) -> Fence {
    Fence::from(u64::try_from(create_revision).unwrap_or(0) << FENCE_BITS)
}

/// Whether lockkit has keys of its own below or above this prefix.
pub(crate) fn is_reserved(prefix: &str) -> bool {
    [LAST, SESSION].iter().any(|own| prefix.starts_with(own))
}

/// The key that belongs to an etcd lease, which fences late requests. See [`Session`](crate::session::Session).
pub(crate) fn marker(lease: i64) -> String {
    format!("{SESSION}{lease:x}")
}

/// The keys of one lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) name: Key,
    /// The start of the keys of all claims: `name/`, as in etcd's own `concurrency.Mutex`.
    pub(crate) dir: String,
    /// The key of the record of the last holder that did not release the lease.
    pub(crate) last: String,
}

impl Place {
    pub(crate) fn new(prefix: &str, name: &Key, doing: &'static str) -> Result<Self> {
        let path = format!("{prefix}{}", escape(name));
        let (dir, last) = (format!("{path}/"), format!("{LAST}{path}"));
        if LAST.starts_with(&dir) || SESSION.starts_with(&dir) || is_reserved(&dir) {
            let reason = format!("`{dir}` is where lockkit keeps its own keys; use another name, or a prefix");
            return Err(Error::database(doing, name, Fault::Other, reason));
        }
        Ok(Self { name: name.clone(), dir, last })
    }

    /// The key of the claim of a process that has this number.
    pub(crate) fn path(&self, token: Token, number: u64) -> String {
        format!("{}{}-{number:x}", self.dir, token.to_hex())
    }
}

/// The start of the keys of all leases whose name starts with `names`.
pub(crate) fn start_of(prefix: &str, names: &str) -> String {
    format!("{prefix}{}", escape(names))
}

/// The start of the records of the last holders of all leases.
pub(crate) fn start_of_last(prefix: &str) -> String {
    format!("{LAST}{prefix}")
}

/// The name of the lease whose last holder has this key.
pub(crate) fn name_of_last(prefix: &str, key: &[u8]) -> Option<Key> {
    let path = std::str::from_utf8(key).ok()?.strip_prefix(LAST)?.strip_prefix(prefix)?;
    // Another prefix, below this one, has `/` in it.
    unescape(path).map(Key::from)
}

/// The name of the lease of a claim, and the last part of the claim's key.
pub(crate) fn name_of<'k>(prefix: &str, key: &'k [u8]) -> Option<(Key, &'k str)> {
    let path = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    let (name, last) = path.split_once('/').filter(|(name, last)| !name.is_empty() && !last.contains('/'))?;
    Some((unescape(name)?.into(), last))
}

/// `/` would make the keys of `a/b` look like claims to `a`.
pub(crate) fn escape(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2f")
}

/// `None` if no name is escaped so: the key is another program's.
fn unescape(path: &str) -> Option<String> {
    let name = path.replace("%2f", "/").replace("%25", "%");
    (escape(&name) == path).then_some(name)
}

/// What a claim is at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits for those before it.
    Waiting,
    Held,
    /// The lease was released, and stays taken for its minimum time.
    Nobody,
    /// The process of the holder let it expire. Only in the record of the last holder.
    Expired,
}

/// The value of a claim's key, and of the key of the last holder: one line for each field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) state: State,
    pub(crate) token: Token,
    pub(crate) ttl: Duration,
    /// When it was written, by the clock of the process. For display only.
    pub(crate) at: SystemTime,
    /// The revision at which the claim's key was created. 0 if it was created together with this record.
    pub(crate) revision: i64,
    pub(crate) holder: String,
}

impl Record {
    pub(crate) fn now(state: State, token: Token, ttl: Duration, holder: &str) -> Self {
        Self { state, token, ttl, at: SystemTime::now(), revision: 0, holder: holder.to_owned() }
    }

    pub(crate) fn text(&self) -> String {
        let Self { state, token, ttl, at, revision, holder } = self;
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (ttl, at) = (ttl.as_micros(), at.as_micros());
        format!("{}\n{ttl}\n{at}\n{revision}\n{holder}", Self::start(*state, *token))
    }

    /// The texts of all records of this claim in this state are above the first and below the second.
    pub(crate) fn range(state: State, token: Token) -> (String, String) {
        let start = Self::start(state, token);
        (format!("{start}\n"), format!("{start}\u{b}"))
    }

    fn start(state: State, token: Token) -> String {
        let state = match state {
            State::Waiting => "waiting",
            State::Held => "held",
            State::Nobody => "nobody",
            State::Expired => "expired",
        };
        format!("{VERSION}\n{state}\n{}", token.to_hex())
    }

    /// `None` if lockkit did not write it.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let mut lines = text.splitn(7, '\n');
        let mut line = || lines.next();
        if line()? != VERSION {
            return None;
        }
        let state = match line()? {
            "waiting" => State::Waiting,
            "held" => State::Held,
            "nobody" => State::Nobody,
            "expired" => State::Expired,
            _ => return None,
        };
        let (token, ttl, at) = (Token::from_hex(line()?)?, line()?.parse().ok()?, line()?.parse().ok()?);
        let at = UNIX_EPOCH.checked_add(Duration::from_micros(at))?;
        let (revision, holder) = (line()?.parse().ok()?, line()?.to_owned());
        Some(Self { state, token, ttl: Duration::from_micros(ttl), at, revision, holder })
    }

    /// How long ago it was written, as far as the clocks of the processes agree.
    pub(crate) fn age(&self) -> Duration {
        self.at.elapsed().unwrap_or_default()
    }
}

/// The claim that comes first, as it is shown.
#[derive(Debug, Clone)]
pub(crate) struct First {
    pub(crate) record: LeaseRecord,
    pub(crate) state: State,
}

/// Describes the first claim to a lease. A claim of another client, such as `etcdctl lock`, holds the lease when it is
/// the first. Its token is made of the last part of its key.
pub(crate) fn describe(name: &Key, last: &str, kv: &KeyValue) -> First {
    let fence = fence(kv.create_revision());
    if let Some(Record { state, token, ttl, at, revision: _, holder }) = Record::parse(kv.value()) {
        let holder = if state == State::Nobody { String::new() } else { holder };
        let mut info = LeaseInfo::new(name.clone(), holder, fence, at);
        info.held_for = at.elapsed().unwrap_or_default();
        (info.expires_in, info.ttl) = (ttl, Some(ttl));
        return First { record: LeaseRecord::new(token, info), state };
    }
    let holder = format!("another client of etcd, with lease {:x}", kv.lease());
    let info = LeaseInfo::new(name.clone(), holder, fence, SystemTime::now());
    First { record: LeaseRecord::new(token_of_other(last), info), state: State::Held }
}

/// Whether lockkit wrote this value.
pub(crate) fn is_own(value: &[u8]) -> bool {
    value.starts_with(ANY_VERSION.as_bytes())
}

/// Says what is in a key below the name of a lease, unless it is a claim: of lockkit, or of a `concurrency.Mutex`.
pub(crate) fn check_claim(dir: &str, kv: &KeyValue) -> Result<(), String> {
    let last = kv.key_str().ok().and_then(|it| it.strip_prefix(dir)).unwrap_or_default();
    if is_own(kv.value()) || is_mutex(last, kv) { Ok(()) } else { Err(foreign(kv.key(), kv.value())) }
}

/// Says what is in the key of the last holder, unless lockkit wrote it.
pub(crate) fn check_last(last: &[KeyValue]) -> Result<(), String> {
    last.first().filter(|kv| !is_own(kv.value())).map_or(Ok(()), |kv| Err(foreign(kv.key(), kv.value())))
}

/// Says what another program has written into a key.
pub(crate) fn foreign(key: &[u8], value: &[u8]) -> String {
    let (path, text) = (String::from_utf8_lossy(key), String::from_utf8_lossy(value));
    let path = path.escape_debug();
    let mut start = String::new();
    for char in text.chars().take(SHOWN) {
        match char {
            '"' | '\'' => start.push(char),
            other => start.extend(other.escape_debug()),
        }
    }
    if text.chars().nth(SHOWN).is_some() {
        start.push('…');
    }
    format!(
        "the key `{path}` belongs to another program and is no lock: its value is `{start}`; lockkit leaves it as it \
         is, so use another prefix or name, or delete the key if nothing needs it"
    )
}

/// Writes the record of the last holder, unless the key has another owner's value.
pub(crate) fn put_last(last: &str, record: &str) -> TxnOp {
    let put = TxnOp::put(last, record, None);
    let is_new = Compare::create_revision(last, CompareOp::Equal, 0);
    // A comparison of a value fails if there is none.
    let is_own = [
        Compare::value(last, CompareOp::Greater, ANY_VERSION),
        Compare::value(last, CompareOp::Less, ABOVE_ANY_VERSION),
    ];
    let replace = TxnOp::txn(Txn::new().when(is_own).and_then([put.clone()]));
    TxnOp::txn(Txn::new().when([is_new]).and_then([put]).or_else([replace]))
}

/// Whether this is the key of a `concurrency.Mutex`: its last part is its lease.
pub(crate) fn is_mutex(last: &str, kv: &KeyValue) -> bool {
    kv.lease() != 0 && last == format!("{:x}", kv.lease())
}

/// The token by which another client's claim is shown and stolen: the last 16 bytes of the last part of its key.
fn token_of_other(last: &str) -> Token {
    let mut bytes = [b' '; 16];
    let last = &last.as_bytes()[last.len().saturating_sub(16)..];
    bytes[16 - last.len()..].copy_from_slice(last);
    Token::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_of_names_is_a_prefix_of_their_keys_and_of_no_others() {
        let names = ["a", "a/b", "a%2fb", "a%", "a%2", "é/", "%", "/", "a/", "ab"];
        for name in names {
            assert_eq!(name_of("p/", format!("p/{}/x", escape(name)).as_bytes()), Some((name.into(), "x")));
            for prefix in names {
                let starts = format!("p/{}", escape(name)).starts_with(&start_of("p/", prefix));
                assert_eq!(starts, name.starts_with(prefix), "{name} {prefix}");
            }
        }
    }

    #[test]
    fn a_key_whose_name_is_escaped_otherwise_is_of_no_lease() {
        for path in ["%2F", "a%2", "%", "%2525%"] {
            assert_eq!(name_of("p/", format!("p/{path}/x").as_bytes()), None, "{path}");
            assert_eq!(name_of_last("p/", format!("{LAST}p/{path}").as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn what_is_said_of_another_programs_key_moves_no_cursor() {
        let said = foreign(b"p/a/\x1b[2J\n", b"\x1b[2J");
        assert!(said.contains("`p/a/\\u{1b}[2J\\n`") && !said.contains(char::is_control), "{said}");
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = Record {
            at: UNIX_EPOCH + Duration::from_micros(1_767_225_600_000_001),
            ..Record::now(State::Waiting, Token::random(), Duration::from_millis(1500), "a\nb")
        };
        assert_eq!(Record::parse(record.text().as_bytes()), Some(record.clone()));
        let text = record.text();
        let (from, below) = Record::range(State::Waiting, record.token);
        assert!(from < text && text < below);
        let (from, below) = Record::range(State::Waiting, Token::random());
        assert!(text < from || below < text);
        for foreign in ["", "lockkit1", "lockkit1\nheld\nxyz\n1\n1\n0\nh", "lockkit1\nother\n00\n1\n1\n0\nh"] {
            assert_eq!(Record::parse(foreign.as_bytes()), None, "{foreign}");
        }
    }

    #[test]
    fn lockkits_own_keys_are_no_claims() {
        let place = |prefix, name| Place::new(prefix, &Key::from(name), "testing");
        assert!(place("", "lockkit").is_err());
        assert!(place("lockkit/", "last").is_err());
        assert!(place("", "lockkit/last").is_ok());
        assert!(place("lockkit/lock/", "lockkit").is_ok());
    }

    #[test]
    fn fences_have_room_between_them() {
        assert_eq!(fence(2).get() - fence(1).get(), SPARE_FENCES + 1);
    }

    #[test]
    fn records_of_last_holders_are_apart_from_claims() {
        let place = Place::new("p/", &Key::from("k"), "testing").expect("a place");
        let start = start_of_last("p/");
        assert!(place.last.starts_with(&start) && !place.dir.starts_with(&start));
        assert_eq!(name_of_last("p/", place.last.as_bytes()), Some(place.name));
    }

    #[test]
    fn a_key_without_a_name_or_below_a_claim_is_of_no_lease() {
        assert_eq!(name_of("p/", b"p//x"), None);
        assert_eq!(name_of("p/", b"p/a/b/x"), None);
    }
}
