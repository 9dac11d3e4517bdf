//! The operations on ShedLock's table, and what its rows mean.

use std::{
    future::Future,
    time::{Duration, SystemTime},
};

use crate::{
    lease::store::{Acquired, Answer, Claim, LeaseInfo, LeaseRecord, Previous, Release, Renewal},
    sql::{
        Dialect, Driver,
        ident::TableName,
        units::{duration, fence},
    },
    value::{key::Key, token::Token},
};

/// The greatest number of characters in ShedLock's column `locked_by`.
const LOCKED_BY_CHARS: usize = 255;

/// How much of a foreign `locked_by` is shown.
const SHOWN_CHARS: usize = 64;

/// 9999-12-31 in microseconds since 1970. No fence follows such a `locked_at`: it is the last day of MySQL, and what an
/// infinite time of PostgreSQL is read as.
pub(crate) const LAST_US: i64 = 253_402_214_400_000_000;

/// The end of `locked_by` in a row that lockkit has released. Its lease is free, even before `lock_until`.
pub(crate) const RELEASED: &str = "#00000000000000000000000000000000";

/// ShedLock's table.
#[diagnostic::on_unimplemented(
    message = "lockkit does not know ShedLock's table in the database `{Self}`",
    label = "`ShedLockTable` needs sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::ShedLockOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::ShedLockOps`"
)]
pub trait ShedLockOps: Dialect + ShedLockStatements {}

/// The statements on ShedLock's table. Hidden from the docs: users call [`ShedLockTable`](crate::store::ShedLockTable).
pub trait ShedLockStatements: Driver {
    /// Whether the columns of the times can be used.
    fn shedlock_columns(
        conn: &mut Self::Connection,
        place: Place<'_>,
    ) -> impl Future<Output = sqlx::Result<Columns>> + Send;

    /// See [`LeaseStore::lease_acquire`](crate::LeaseStore::lease_acquire).
    fn shedlock_acquire(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        place: Place<'_>,
        claim: &Claim,
    ) -> impl Future<Output = sqlx::Result<Acquired>> + Send;

    /// The row of a held lock.
    fn shedlock_look(
        conn: &mut Self::Connection,
        place: Place<'_>,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<Row>>> + Send;

    /// See [`LeaseStore::lease_renew`](crate::LeaseStore::lease_renew).
    fn shedlock_renew(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        place: Place<'_>,
        renewals: &[Renewal],
    ) -> impl Future<Output = sqlx::Result<Vec<Answer>>> + Send;

    /// Releases a lease of lockkit. See [`LeaseStore::lease_release`](crate::LeaseStore::lease_release).
    fn shedlock_release(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        place: Place<'_>,
        release: &Release,
    ) -> impl Future<Output = sqlx::Result<Answer>> + Send;

    /// Frees the lock, if the row still has this holder and time of acquisition.
    fn shedlock_take_away(
        conn: &mut Self::Connection,
        grammar: Self::Grammar,
        place: Place<'_>,
        row: &Row,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The rows of the held locks with this prefix, in the order of their names.
    fn shedlock_list(
        conn: &mut Self::Connection,
        place: Place<'_>,
        prefix: &str,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<Vec<Row>>> + Send;
}

/// A table, and the step in microseconds between two times that its columns can tell apart.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub(crate) table: &'a TableName,
    pub(crate) step_us: i64,
}

/// Whether the columns of the times can be used.
#[derive(Debug)]
pub enum Columns {
    /// They can.
    Fit {
        /// The step of their times.
        step_us: i64,
    },
    /// There is no such table, or no such column in it.
    Missing,
    /// They would be misread.
    Unfit {
        /// What to change.
        hint: &'static str,
        /// What was found.
        found: String,
    },
}

impl Columns {
    /// The columns with so many decimals of a second.
    pub(crate) fn with_decimals(decimals: u32) -> Self {
        if decimals < 3 {
            let hint = "the times in ShedLock's table need milliseconds: give `lock_until` and `locked_at` three \
                        decimals or more";
            return Self::Unfit { hint, found: format!("its times have {decimals} decimals of a second") };
        }
        Self::Fit { step_us: 10_i64.pow(6_u32.saturating_sub(decimals)) }
    }
}

/// One row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    pub(crate) name: String,
    pub(crate) locked_by: String,
    pub(crate) locked_at_us: i64,
    pub(crate) lock_until_us: i64,
    pub(crate) now_us: i64,
}

impl Row {
    /// The token in `locked_by`. `None` for a lock of Java.
    pub(crate) fn token(&self) -> Option<Token> {
        self.parts().1
    }

    /// The name of the holder, and its token.
    fn parts(&self) -> (&str, Option<Token>) {
        let text = &*self.locked_by;
        let parts = text.len().checked_sub(RELEASED.len()).and_then(|at| text.split_at_checked(at));
        let token = parts.and_then(|(_, tag)| token_of(tag));
        match (parts, token) {
            (Some((holder, _)), Some(token)) => (holder, Some(token)),
            _ => (text, None),
        }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.locked_by.ends_with(RELEASED)
    }

    /// How long the lock is held, if the claim with this token cannot have it.
    pub(crate) fn in_the_way_of(&self, token: Token) -> Option<Duration> {
        let is_free = self.lock_until_us <= self.now_us || self.is_released() || self.token() == Some(token);
        (!is_free).then(|| self.left())
    }

    pub(crate) fn left(&self) -> Duration {
        duration(self.lock_until_us.saturating_sub(self.now_us))
    }

    /// Refuses a free row whose next fence could not rise.
    pub(crate) fn check_fence(&self, place: Place<'_>) -> sqlx::Result<()> {
        if self.locked_at_us < LAST_US {
            return Ok(());
        }
        let Self { name, .. } = self;
        let found = format!(
            "`locked_at` of the row `{name}` in `{}` is in the year 9999 or later, which neither ShedLock nor lockkit \
             writes: set it to the present",
            place.table
        );
        Err(sqlx::Error::Decode(found.into()))
    }

    /// The holder before the claim with this token. `None` if the lock was released, or was Java's: its rows do not
    /// tell.
    pub(crate) fn previous(&self, by: Token) -> Option<Previous> {
        let (holder, token) = self.parts();
        token.filter(|it| !it.is_nobody() && *it != by)?;
        Some(Previous::new(holder, fence(self.locked_at_us), duration(self.now_us.saturating_sub(self.lock_until_us))))
    }

    pub(crate) fn record(&self) -> LeaseRecord {
        let (holder, token) = self.parts();
        let info = LeaseInfo {
            key: Key::from(&*self.name),
            holder: if token.is_some() { holder.to_owned() } else { shown(holder) },
            fence: fence(self.locked_at_us.min(LAST_US)),
            acquired_at: SystemTime::UNIX_EPOCH + duration(self.locked_at_us),
            held_for: duration(self.now_us.saturating_sub(self.locked_at_us)),
            expires_in: self.left(),
            renewals: 0,
            ttl: None,
            is_this_process: false,
            is_released: false,
            flaw: None,
        };
        LeaseRecord::new(token.unwrap_or_else(|| self.token_of_java()), info)
    }

    /// Stands for a lock of Java: when it was taken, and a hash (FNV-1a) of who did.
    fn token_of_java(&self) -> Token {
        let mut bytes = [0; 16];
        let (when, who) = bytes.split_at_mut(8);
        // Zeros would mean that it has no holder.
        when.copy_from_slice(&self.locked_at_us.max(1).to_be_bytes());
        let hash = self
            .locked_by
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        who.copy_from_slice(&hash.to_be_bytes());
        Token::from_bytes(bytes)
    }
}

/// The printable beginning of a holder's name that lockkit did not write.
fn shown(holder: &str) -> String {
    let mut printable = holder.chars().filter(|it| !it.is_control());
    let mut shown: String = printable.by_ref().take(SHOWN_CHARS).collect();
    if printable.next().is_some() {
        shown.push('…');
    }
    shown
}

/// The end of `locked_by` for this token.
pub(crate) fn tag(token: Token) -> String {
    token.as_bytes().iter().fold("#".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

fn token_of(tag: &str) -> Option<Token> {
    let digits = tag.strip_prefix('#')?.as_bytes();
    let mut bytes = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = pair.iter().try_fold(0, |byte, digit| {
            let value = char::from(*digit).to_digit(16).filter(|_| !digit.is_ascii_uppercase())?;
            Some(byte << 4 | u8::try_from(value).ok()?)
        })?;
    }
    Some(Token::from_bytes(bytes))
}

/// `locked_by` for this holder with this end, shortened to fit.
pub(crate) fn locked_by(holder: &str, tag: &str) -> String {
    let holder: String = holder.chars().take(LOCKED_BY_CHARS - RELEASED.len()).collect();
    holder + tag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(locked_by: String) -> Row {
        Row { name: "job".into(), locked_by, locked_at_us: 7, lock_until_us: 9, now_us: 8 }
    }

    #[test]
    fn a_token_is_found_at_the_end_of_locked_by_and_nowhere_else() {
        let token = Token::random();
        for holder in ["", "host", "a#b", "é", &"ß".repeat(300)] {
            let row = row(locked_by(holder, &tag(token)));
            assert!(row.locked_by.chars().count() <= LOCKED_BY_CHARS);
            assert_eq!(row.parts(), (&*holder.chars().take(222).collect::<String>(), Some(token)));
        }
        let digits = &tag(token)[1..];
        for java in ["", "host", digits, &format!("host#{}", &digits[1..]), &format!("#{}", "é".repeat(16)), "#"] {
            assert_eq!(row(java.to_owned()).parts(), (java, None));
        }
        assert_eq!(row(format!("host#{}", "A".repeat(32))).parts().1, None);
    }

    #[test]
    fn a_lock_of_java_has_a_token_that_changes_with_who_and_when() {
        let one = row("host".into());
        let other = Row { locked_at_us: 8, ..one.clone() };
        assert_eq!(one.record().token, one.record().token);
        assert_ne!(one.record().token, other.record().token);
        assert_ne!(one.record().token, row("other".into()).record().token);
        assert!(!Row { locked_at_us: 0, ..one }.record().token.is_nobody());
    }

    #[test]
    fn a_released_lock_is_nobodys() {
        let row = row(locked_by("host", RELEASED));
        assert!(row.is_released() && row.token().is_some_and(|it| it.is_nobody()));
        assert!(row.previous(Token::random()).is_none() && row.in_the_way_of(Token::random()).is_none());
    }
}
