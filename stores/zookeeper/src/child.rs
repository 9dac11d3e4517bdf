//! What is written into the child of a claim, and the fence that its creation gives.

use std::time::Duration;

use lockkit::{Fence, store::Token};
use zookeeper_client::Stat;

use crate::{error::Failure, layout::Place};

/// How many bits a fence has below the `czxid` of its child: two grants are at least 2^8 fences apart.
pub const FENCE_SHIFT: u32 = 8;

/// How many fences above its own a grant has.
pub(crate) const SPARE_FENCES: u64 = (1 << FENCE_SHIFT) - 1;

/// The first line of a child of lockkit.
const MARK: &str = "lockkit 1";

/// What a claim writes into its child, for other processes to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Child {
    pub(crate) token: Token,
    pub(crate) ttl: Duration,
    pub(crate) holder: String,
}

impl Child {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { token, ttl, holder } = self;
        format!("{MARK}\n{}\n{}\n{holder}", token.to_hex(), ttl.as_micros()).into_bytes()
    }

    /// `None` if another client wrote it.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(data).ok()?.splitn(4, '\n');
        if lines.next()? != MARK {
            return None;
        }
        let (token, micros, holder) = (Token::from_hex(lines.next()?)?, lines.next()?.parse().ok()?, lines.next()?);
        Some(Self { token, ttl: Duration::from_micros(micros), holder: holder.to_owned() })
    }
}

/// The token of a child that another client created: the unique id in its name, or else two numbers that no other
/// node of the key has.
pub(crate) fn foreign_token(place: &Place, stat: &Stat) -> Token {
    place.token().unwrap_or_else(|| {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&stat.czxid.to_be_bytes());
        bytes[8..].copy_from_slice(&stat.ephemeral_owner.to_be_bytes());
        Token::from_bytes(bytes)
    })
}

/// The first fence of the child that was created by this transaction.
pub(crate) fn fence(czxid: i64) -> Result<Fence, Failure> {
    // Fences are below 2^62.
    let room = 62 - FENCE_SHIFT;
    match u64::try_from(czxid) {
        Ok(czxid) if czxid > 0 && czxid >> room == 0 => Ok(Fence::from(czxid << FENCE_SHIFT)),
        _ => Err(Failure::NoFence(czxid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_read_as_it_was_written() {
        let child = Child { token: Token::random(), ttl: Duration::from_millis(1500), holder: "a/1/x y".to_owned() };
        assert_eq!(Child::decode(&child.encode()), Some(child));
        for foreign in [&b""[..], b"127.0.0.1", b"lockkit 2\n", b"\xff"] {
            assert_eq!(Child::decode(foreign), None);
        }
    }

    #[test]
    fn fences_rise_with_transactions_and_end_loudly() {
        let [a, b] = [1 << 32 | 0xffff_ffff, 2 << 32].map(|it| fence(it).expect("a fence"));
        assert!(a.get() + SPARE_FENCES < b.get());
        let last = fence((1 << 54) - 1).expect("a fence");
        assert!(last.get() + SPARE_FENCES < 1 << 62);
        assert!(fence(1 << 54).is_err() && fence(0).is_err() && fence(-1).is_err());
    }
}
