//! The kinds of locks that `#[with_lock(…)]` takes.

use std::fmt;

use proc_macro2::Ident;

use crate::diagnostics::{Known, list, meant};

/// A kind of lock: the first word between the parentheses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    Lease,
    Row,
    Named,
    Session,
    Version,
    Idempotent,
}

impl Strategy {
    /// All, in the order in which errors and the documentation list them.
    pub(crate) const ALL: [Self; 6] =
        [Self::Lease, Self::Row, Self::Named, Self::Session, Self::Version, Self::Idempotent];

    /// The word that asks for it.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Row => "row",
            Self::Named => "named",
            Self::Session => "session",
            Self::Version => "version",
            Self::Idempotent => "idempotent",
        }
    }

    /// What other libraries call it.
    const fn other_names(self) -> &'static [&'static str] {
        match self {
            Self::Lease => &["distributed", "leases"],
            Self::Row => &["pessimistic", "for_update", "rows"],
            Self::Named => &["advisory"],
            Self::Session => &["leader"],
            Self::Version => &["optimistic", "versioned"],
            Self::Idempotent => &["idempotency", "once"],
        }
    }

    /// The strategy that this word asks for.
    pub(crate) fn of(word: &Ident) -> Option<Self> {
        Self::ALL.into_iter().find(|it| word == it.word())
    }

    /// The word of the strategy that was probably meant.
    pub(crate) fn meant(word: &str) -> Option<&'static str> {
        let known = Self::ALL.map(|it| -> Known { (it.word(), it.other_names()) });
        // `RowLock` and `row_lock`, as the types are called.
        let short = word.to_lowercase();
        let short = short.strip_suffix("lock").map(|it| it.trim_end_matches('_'));
        short.and_then(|it| meant(it, &known)).or_else(|| meant(word, &known))
    }

    /// What to call instead for a lock that has no attribute: permits, readers and writers.
    pub(crate) fn by_hand(word: &str) -> Option<String> {
        let call = match word.to_lowercase().as_str() {
            "semaphore" | "permit" | "permits" => "semaphore(key, permits)",
            "rw" | "rwlock" | "read" | "reader" | "shared" | "share" => "rw(key).read()",
            "write" | "writer" => "rw(key).write()",
            _ => return None,
        };
        Some(format!(
            "the attribute takes no permits, readers or writers; call `leases.{call}.run(async |lease| …)` in the \
             function"
        ))
    }

    /// "`lease`, `row`, … or `version`".
    pub(crate) fn any() -> String {
        list(&Self::ALL.map(Self::word), "or")
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_other_libraries_is_understood() {
        assert_eq!(Strategy::meant("LEASE"), Some("lease"));
        assert_eq!(Strategy::meant("RowLock"), Some("row"));
        assert_eq!(Strategy::meant("advisory_lock"), Some("named"));
        assert_eq!(Strategy::meant("lock"), None);
        for strategy in Strategy::ALL {
            for other in strategy.other_names() {
                assert!(Strategy::ALL.iter().all(|it| it.word() != *other), "{other}");
                assert_eq!(Strategy::meant(other), Some(strategy.word()));
            }
        }
    }
}
