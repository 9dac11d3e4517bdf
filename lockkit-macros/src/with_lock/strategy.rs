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
}

impl Strategy {
    /// All, in the order in which errors and the documentation list them.
    pub(crate) const ALL: [Self; 5] = [Self::Lease, Self::Row, Self::Named, Self::Session, Self::Version];

    /// The word that asks for it.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Row => "row",
            Self::Named => "named",
            Self::Session => "session",
            Self::Version => "version",
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
        }
    }

    /// The strategy that this word asks for.
    pub(crate) fn of(word: &Ident) -> Option<Self> {
        Self::ALL.into_iter().find(|it| word == it.word())
    }

    /// The word of the strategy that was probably meant.
    pub(crate) fn meant(word: &str) -> Option<&'static str> {
        meant(word, &Self::ALL.map(|it| -> Known { (it.word(), it.other_names()) }))
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
        for strategy in Strategy::ALL {
            for other in strategy.other_names() {
                assert!(Strategy::ALL.iter().all(|it| it.word() != *other), "{other}");
                assert_eq!(Strategy::meant(other), Some(strategy.word()));
            }
        }
    }
}
