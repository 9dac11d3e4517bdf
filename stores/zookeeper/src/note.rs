//! What is written into the node of a key: its last holder, and how that ended. So the next holder learns of a dead
//! one. Only a node that lockkit created has a note.
//!
//! A node that is empty or has an IP address is used without a note, because kazoo and Curator leave such nodes. Any
//! other data are an error: a process that locks `/app/config/db` by mistake should learn of it. The note is replaced
//! by its version only, so data that another program writes while the lease is held stay. The child of a claim is
//! created together with the read of the data, because a read before each first claim would cost a round trip; so it is
//! below a foreign node for a moment.

use std::{net::IpAddr, time::Duration};

use lockkit::{
    Fence,
    store::{Previous, Token},
};

/// The first line of the node of a key that lockkit has used.
const MARK: &str = "lockkit 1";

/// How the first line begins in all versions of lockkit.
const ANY_MARK: &[u8] = b"lockkit ";

/// The data of the node of a key, by their owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// A note of lockkit.
    Note(Note),
    /// What another lock client leaves in the node of a lock: nothing (kazoo, and Curator for the nodes above a
    /// claim), or an IP address (Curator's default data). Also a note of a later version of lockkit. The node is used
    /// for claims, and never written or deleted.
    Lock,
    /// The data of another owner. The node is no lock.
    Foreign,
}

impl Content {
    pub(crate) fn of(data: &[u8]) -> Self {
        if let Some(note) = Note::decode(data) {
            return Self::Note(note);
        }
        // Java writes the zone of an IPv6 address after `%`.
        let is_address = |it: &str| it.split('%').next().is_some_and(|it| it.parse::<IpAddr>().is_ok());
        let is_lock = data.is_empty() || data.starts_with(ANY_MARK) || std::str::from_utf8(data).is_ok_and(is_address);
        if is_lock { Self::Lock } else { Self::Foreign }
    }
}

/// The last that is known of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// It was released.
    Free,
    /// It was granted to this holder, which has not released it since.
    Held(Last),
    /// The lease of this holder ended at its ttl.
    Expired(Last),
}

/// A holder of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Last {
    pub(crate) token: Token,
    pub(crate) fence: Fence,
    pub(crate) holder: String,
}

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (how, last) = match self {
            Self::Free => return format!("{MARK}\nfree").into_bytes(),
            Self::Held(last) => ("held", last),
            Self::Expired(last) => ("expired", last),
        };
        let Last { token, fence, holder } = last;
        format!("{MARK}\n{how}\n{}\n{fence}\n{holder}", token.to_hex()).into_bytes()
    }

    /// `None` if lockkit did not write it.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(data).ok()?.splitn(5, '\n');
        if lines.next()? != MARK {
            return None;
        }
        let how = lines.next()?;
        if how == "free" {
            return Some(Self::Free);
        }
        let (token, fence) = (Token::from_hex(lines.next()?)?, Fence::from(lines.next()?.parse::<u64>().ok()?));
        let last = Last { token, fence, holder: lines.next()?.to_owned() };
        match how {
            "held" => Some(Self::Held(last)),
            "expired" => Some(Self::Expired(last)),
            _ => None,
        }
    }

    /// The holder that did not release the key. `noted` is when this was written, in milliseconds of the server's
    /// clock, as `now`.
    pub(crate) fn previous(self, noted: i64, now: i64) -> Option<Previous> {
        let (last, expired_for) = match self {
            Self::Free => return None,
            // Its session ended. ZooKeeper does not record when.
            Self::Held(last) => (last, Duration::ZERO),
            Self::Expired(last) => {
                let ago = u64::try_from(now.saturating_sub(noted)).unwrap_or(0);
                (last, Duration::from_millis(ago))
            }
        };
        let Last { token, fence, holder } = last;
        (!token.is_nobody()).then(|| Previous::new(holder, fence, expired_for))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let last = Last { token: Token::random(), fence: Fence::from(77), holder: "host\nname".to_owned() };
        for note in [Note::Free, Note::Held(last.clone()), Note::Expired(last)] {
            assert_eq!(Note::decode(&note.encode()), Some(note));
        }
    }

    #[test]
    fn the_node_of_a_lock_is_told_from_another_owners() {
        assert_eq!(Content::of(&Note::Free.encode()), Content::Note(Note::Free));
        for lock in ["", "127.0.1.1", "fe80:0:0:0:0:0:0:1%eth0", "::1", "lockkit 2\nfree", "lockkit 1\nunknown"] {
            assert_eq!(Content::of(lock.as_bytes()), Content::Lock, "{lock}");
        }
        for foreign in [&b"{}"[..], b" ", b"127.0.1", b"lockkit", b"127.0.1.1:8080", b"\xff"] {
            assert_eq!(Content::of(foreign), Content::Foreign, "{foreign:?}");
        }
    }
}
