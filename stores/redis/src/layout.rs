//! How a lock is written in Redis: its names, and the text that stands for its holder.
//!
//! The string is what every `SET NX PX` client sees; the row beside it keeps the fence when the lease is free. A
//! string without an expiry may be a lock of redis-py without a timeout or the configuration of a service: it is never
//! freed. A hash counts as a lock of Redisson only if its fields are named as Redisson names them.

use std::borrow::Cow;

use lockkit::{Key, store::Token};
use redis::Cmd;

/// How a lock is written, and so which other clients respect it.
///
/// All clients of a lock must use the same layout. A lock of one layout is an error for the others, so none of them
/// enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Layout {
    /// A string with the name of the key, written with `SET NX PX`, as redis-py's `Lock`, the clients of the Redlock
    /// family and most hand-written locks do. The default.
    #[default]
    Token,
    /// A hash as `RLock` of Redisson 3.x writes it, with the messages that wake its waiters. For other holders, a lease
    /// is a lock of another client with one entry.
    ///
    /// Only Redisson's plain lock (`getLock`). Its fair, read, write and spin locks have more keys. Keys of Redisson's
    /// name mapper are not applied.
    Redisson,
}

/// The start of the names of lockkit's own keys.
const OWN: &str = "lockkit:";

impl Layout {
    /// The text in Redis that stands for the holder.
    pub(crate) fn id(self, token: Token) -> String {
        let hex = token.to_hex();
        match self {
            Self::Token => hex,
            // A client's UUID, and the number of its thread.
            Self::Redisson => {
                format!("{}-{}-{}-{}-{}:1", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
            }
        }
    }

    /// The token of a holder, or of the hash that stands for another client.
    pub(crate) fn token(text: &[u8]) -> Option<Token> {
        let text = text.strip_suffix(b":1").unwrap_or(text);
        let digits: String = text.iter().filter(|byte| **byte != b'-').map(|byte| char::from(*byte)).collect();
        Token::from_hex(&digits)
    }

    /// The channel on which a release is published.
    pub(crate) fn channel(self, key: &Key) -> String {
        match self {
            Self::Token => row(key),
            Self::Redisson => {
                let name = name(key);
                if name.contains('{') {
                    format!("redisson_lock__channel:{name}")
                } else {
                    format!("redisson_lock__channel:{{{name}}}")
                }
            }
        }
    }
}

/// The name of the lock: the key, unless lockkit's own keys would hide it.
pub(crate) fn name(key: &Key) -> Cow<'_, str> {
    if key.starts_with(OWN) { format!("{OWN}:{key}").into() } else { key.as_str().into() }
}

/// The name of the row beside the lock.
pub(crate) fn row(key: &Key) -> String {
    [OWN, "{", key, "}"].concat()
}

/// Adds the names of locks and rows to the call of a script, with their number.
pub(crate) fn add_keys<'k>(call: &mut Cmd, keys: impl ExactSizeIterator<Item = &'k Key>) {
    call.arg(2 * keys.len());
    for key in keys {
        call.arg(&*name(key)).arg(row(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_written() {
        for token in [Token::random(), Token::nobody(), Token::from_bytes([0xff; 16])] {
            for layout in [Layout::Token, Layout::Redisson] {
                assert_eq!(Layout::token(layout.id(token).as_bytes()), Some(token));
            }
        }
        for other in ["", "abc", "zz000000000000000000000000000000", "000000000000000000000000000000001"] {
            assert_eq!(Layout::token(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn no_key_is_named_as_a_key_of_lockkit() {
        for key in ["lockkit:names", "lockkit:{a}", "lockkit::a"] {
            assert!(name(&key.into()).starts_with("lockkit::lockkit:"), "{key}");
        }
        assert_eq!(name(&"lockkit/sweeper".into()), "lockkit/sweeper");
    }

    #[test]
    fn channels_are_named_as_redisson_names_them() {
        let channel = |key: &str| Layout::Redisson.channel(&key.into());
        assert_eq!(channel("a"), "redisson_lock__channel:{a}");
        assert_eq!(channel("{a}b"), "redisson_lock__channel:{a}b");
    }
}
