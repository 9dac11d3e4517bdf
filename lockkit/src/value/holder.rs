//! The holder of a lock, for display. Never compared to decide ownership.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use crate::value::{error::rounded, fence::Fence, key::Key};

/// The holder of a lock that could not be taken, for display: a lease, or a session of the database server.
///
/// Displayed as "host-7/4711/9f3a, held for 2.0 s, expires in 28 s unless renewed (renewed once)", as [`LockHolder`]
/// is, or as the reason why the holder is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// The holder of a lease.
    Lease(LeaseInfo),
    /// The server session that holds a row, named or session lock.
    Session(LockHolder),
    /// Perhaps nobody: the store refused the lease and did not say who holds it. With the reason of its last answer,
    /// such as the quarantine of a Redis server, which may have forgotten leases, and how long it lasts.
    Unknown(String),
}

impl Holder {
    /// The lease, if the lock is a lease.
    pub fn as_lease(&self) -> Option<&LeaseInfo> {
        match self {
            Self::Lease(lease) => Some(lease),
            Self::Session(_) | Self::Unknown(_) => None,
        }
    }

    /// The server session, if the lock is a row, named or session lock.
    pub fn as_session(&self) -> Option<&LockHolder> {
        match self {
            Self::Lease(_) | Self::Unknown(_) => None,
            Self::Session(session) => Some(session),
        }
    }

    /// Whether another caller of the same [`Leases`](crate::Leases), and so of this process, holds the lock. `false` if
    /// the lock is not a lease.
    pub fn is_this_process(&self) -> bool {
        self.as_lease().is_some_and(|it| it.is_this_process)
    }
}

impl From<LeaseInfo> for Holder {
    fn from(lease: LeaseInfo) -> Self {
        Self::Lease(lease)
    }
}

impl From<LockHolder> for Holder {
    fn from(session: LockHolder) -> Self {
        Self::Session(session)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lease(lease) => write!(f, "{}, {}", lease.holder, lease.times()),
            Self::Session(session) => session.fmt(f),
            Self::Unknown(reason) => f.write_str(reason),
        }
    }
}

/// One held lease, as the store describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The lease.
    pub key: Key,
    /// The holding process: host, process id and a random part, unless the service set its own name.
    pub holder: String,
    /// The fencing token.
    pub fence: Fence,
    /// When the lease was acquired, according to the store's clock.
    pub acquired_at: SystemTime,
    /// How long the lease has been held.
    pub held_for: Duration,
    /// Time until the lease expires unless it is renewed.
    pub expires_in: Duration,
    /// How often the holder has renewed the lease. If there is no renewal after a third of the ttl, the holder hangs or
    /// is dead.
    pub renewals: u64,
    /// The ttl of the last grant or renewal, if the store keeps it.
    pub ttl: Option<Duration>,
    /// Whether a caller of the queried [`Leases`](crate::Leases), and so of this process, holds the lease.
    pub is_this_process: bool,
    /// Whether the holder has released the lease, whose key stays taken until `min_hold` has passed.
    pub is_released: bool,
    /// Why lockkit cannot have written the stored lease, such as "its ttl is negative". The other fields have what
    /// could be read of it. `None` for a lease as it should be.
    pub flaw: Option<&'static str>,
}

impl LeaseInfo {
    /// For stores: describes a lease that was acquired just now, expires at once and was never renewed. Set the other
    /// fields as the store knows them. [`Leases`](crate::Leases) sets `is_this_process` and `is_released`.
    pub fn new(key: Key, holder: impl Into<String>, fence: Fence, acquired_at: SystemTime) -> Self {
        Self {
            key,
            holder: holder.into(),
            fence,
            acquired_at,
            held_for: Duration::ZERO,
            expires_in: Duration::ZERO,
            renewals: 0,
            ttl: None,
            is_this_process: false,
            is_released: false,
            flaw: None,
        }
    }

    fn times(&self) -> String {
        let renewed = match self.renewals {
            0 => "not renewed so far".to_owned(),
            1 => "renewed once".to_owned(),
            times => format!("renewed {times} times"),
        };
        let (held_for, expires_in) = (rounded(self.held_for), rounded(self.expires_in));
        format!("held for {held_for}, expires in {expires_in} unless renewed ({renewed})")
    }
}

/// The server session that holds a row, named or session lock, as the server describes it.
///
/// Displayed as "session 4711 of `shop` from 10.0.0.7 (`orders`), for 2.0 s at most".
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockHolder {
    /// The id that ends the session: `pg_terminate_backend(id)` on PostgreSQL, `KILL id` on MySQL and MariaDB.
    pub id: i64,
    /// The user name of the session.
    pub user: Option<String>,
    /// The address of the client. `None` for a local connection. On PostgreSQL also `None` if the current user may not
    /// see it: that needs the same user or the role `pg_read_all_stats`.
    pub host: Option<String>,
    /// The `application_name` of the connection. PostgreSQL only.
    pub application: Option<String>,
    /// The age of the transaction (row or named lock) or connection (session lock), because no server reports when a
    /// lock was taken. PostgreSQL only, and only if the current user may see it.
    pub held_at_most: Option<Duration>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, user, host, application, held_at_most } = self;
        write!(f, "session {id}")?;
        if let Some(user) = user {
            write!(f, " of `{user}`")?;
        }
        if let Some(host) = host {
            write!(f, " from {host}")?;
        }
        if let Some(application) = application {
            write!(f, " (`{application}`)")?;
        }
        if let Some(time) = held_at_most {
            write!(f, ", for {} at most", rounded(*time))?;
        }
        Ok(())
    }
}

/// The verb of the message of [`Error::Contended`](crate::Error::Contended).
pub(crate) fn state(holder: Option<&Holder>) -> &'static str {
    match holder {
        Some(Holder::Unknown(_)) => "not granted",
        Some(holder) if holder.is_this_process() => "held by this process",
        _ => "held by somebody else",
    }
}

/// The end of the message of [`Error::Contended`](crate::Error::Contended).
pub(crate) fn details(holder: Option<&Holder>) -> String {
    match holder {
        None => String::new(),
        Some(Holder::Lease(lease)) if lease.is_this_process => format!(": {}", lease.times()),
        Some(holder) => format!(": {holder}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::error::Error;

    fn lease(is_this_process: bool, renewals: u64) -> Holder {
        let lease = LeaseInfo::new(Key::from("k"), "host-7/4711", Fence::from(1), SystemTime::UNIX_EPOCH);
        let expires_in = Duration::from_secs(28);
        LeaseInfo { expires_in, renewals, is_this_process, ..lease }.into()
    }

    fn session() -> LockHolder {
        let user = Some("shop".to_owned());
        LockHolder { id: 4711, user, host: None, application: None, held_at_most: None }
    }

    #[test]
    fn a_holder_is_a_lease_or_a_session() {
        let (here, there, session) = (lease(true, 0), lease(false, 0), Holder::from(session()));
        assert!(here.as_lease().is_some() && here.as_session().is_none());
        assert!(session.as_lease().is_none());
        assert_eq!(session.as_session().map(|it| it.id), Some(4711));
        assert_eq!([&here, &there, &session].map(Holder::is_this_process), [true, false, false]);
    }

    #[test]
    fn a_refusal_says_who_has_the_lock_and_for_how_long() {
        let refused = |holder: Option<Holder>| Error::contended("k", Duration::from_secs(2), holder).to_string();
        let times = |renewed| format!("held for 0 ms, expires in 28 s unless renewed ({renewed})");
        let here = refused(Some(lease(true, 0)));
        assert!(
            here.contains("this process") && here.ends_with(&format!(": {}", times("not renewed so far"))),
            "{here}"
        );
        for (renewals, renewed) in [(1, "renewed once"), (2, "renewed 2 times")] {
            let there = refused(Some(lease(false, renewals)));
            let ends = format!(": host-7/4711, {}", times(renewed));
            assert!(there.contains("somebody else") && there.ends_with(&ends), "{there}");
        }
        let session = refused(Some(session().into()));
        assert!(session.contains("somebody else") && session.ends_with(": session 4711 of `shop`"), "{session}");
        let unknown = refused(None);
        assert!(unknown.contains("somebody else") && !unknown.contains(": "), "{unknown}");
    }
}
