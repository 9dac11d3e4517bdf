//! Which servers can keep leases, as seen when a connection opens. Acquisitions look at eviction again, once a second.
//!
//! Eviction is a loss of memory. That look is at the policy and at the count of evicted keys: a policy that was changed
//! and changed back between two looks leaves no other trace.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::Failure;

/// The oldest major version whose scripts may read the clock before they write.
const OLDEST: u32 = 5;

/// Why a server cannot keep leases, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The server may delete a lock to free memory.
    #[error(
        "the server may evict a lock, because its maxmemory-policy is `{policy}` with a maxmemory of {maxmemory} \
         bytes: set `maxmemory-policy noeviction`, or use a server of its own for locks"
    )]
    Evicts {
        /// Its `maxmemory-policy`.
        policy: String,
        /// Its `maxmemory`.
        maxmemory: u64,
    },
    /// The server is a replica.
    #[error(
        "the server is a replica: connect to its master, or let Sentinel name it (`redis::sentinel::SentinelClient`)"
    )]
    Replica,
    /// The server is a node of a Redis Cluster.
    #[error(
        "the server is a node of a Redis Cluster, whose nodes keep the keys of one lease apart: use a single server"
    )]
    Cluster,
    /// The server is too old.
    #[error("the server is Redis {version}: use 5.0 or later, or Valkey")]
    TooOld {
        /// Its version.
        version: String,
    },
    /// The user may not read what the server is.
    #[error(
        "the user of the connection may not run INFO, which acquisitions need: allow it with `ACL SETUSER … \
         +info`"
    )]
    InfoDenied,
}

/// Checks the answer to INFO. Returns the id of the server's process, empty if it does not report one.
pub(crate) fn refuse_unfit(info: Result<String, RedisError>) -> Result<String, Failure> {
    let info = info.map_err(|err| match err.kind() {
        ErrorKind::Server(ServerErrorKind::NoPerm) => Unfit::InfoDenied.into(),
        _ => Failure::from(err),
    })?;
    check(&info)?;
    Ok(field(&info, "run_id").to_owned())
}

/// A field of the answer to INFO. Empty if the server has none.
fn field<'i>(info: &'i str, name: &str) -> &'i str {
    let mut lines = info.lines().filter_map(|it| it.split_once(':'));
    lines.find(|(field, _)| *field == name).map_or("", |(_, value)| value.trim())
}

fn check(info: &str) -> Result<(), Unfit> {
    let field = |name: &str| field(info, name);
    let version = field("redis_version");
    if version.split('.').next().and_then(|it| it.parse().ok()).is_some_and(|major: u32| major < OLDEST) {
        return Err(Unfit::TooOld { version: version.to_owned() });
    }
    if field("cluster_enabled") == "1" {
        return Err(Unfit::Cluster);
    }
    if field("role") == "slave" {
        return Err(Unfit::Replica);
    }
    let maxmemory = field("maxmemory").parse().unwrap_or(0);
    match field("maxmemory_policy") {
        "noeviction" | "" => Ok(()),
        _ if maxmemory == 0 => Ok(()),
        policy => Err(Unfit::Evicts { policy: policy.to_owned(), maxmemory }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(changed: &[(&str, &str)]) -> Result<(), Unfit> {
        let mut fields = [
            ("redis_version", "7.0.15"),
            ("role", "master"),
            ("maxmemory", "0"),
            ("maxmemory_policy", "noeviction"),
            ("cluster_enabled", "0"),
        ];
        for (name, value) in changed {
            fields.iter_mut().find(|it| it.0 == *name).unwrap().1 = value;
        }
        let lines: Vec<_> = fields.iter().map(|(name, value)| format!("{name}:{value}\r\n")).collect();
        check(&lines.concat())
    }

    #[test]
    fn a_server_that_can_forget_a_lock_by_itself_is_refused() {
        assert_eq!(checked(&[]), Ok(()));
        assert_eq!(checked(&[("maxmemory_policy", "allkeys-lru")]), Ok(()), "without a limit nothing is evicted");
        let evicts = checked(&[("maxmemory_policy", "volatile-ttl"), ("maxmemory", "1000")]);
        assert_eq!(evicts, Err(Unfit::Evicts { policy: "volatile-ttl".to_owned(), maxmemory: 1000 }));
        assert_eq!(checked(&[("maxmemory", "1000")]), Ok(()));
        assert_eq!(checked(&[("role", "slave")]), Err(Unfit::Replica));
        assert_eq!(checked(&[("cluster_enabled", "1")]), Err(Unfit::Cluster));
        for (old, new) in [("3.2.1", "5.0.0"), ("4.0.14", "10.0")] {
            assert!(matches!(checked(&[("redis_version", old)]), Err(Unfit::TooOld { .. })), "{old}");
            assert_eq!(checked(&[("redis_version", new)]), Ok(()), "{new}");
        }
    }
}
