//! The name of a table or column: the only text that may become part of a statement.

use std::fmt;

use crate::error::{Error, Result};

/// A checked table or column name.
///
/// Letters, digits and underscores of ASCII, not starting with a digit, at most 63 bytes (PostgreSQL's limit,
/// the smallest of the three). What passes cannot end a quoted identifier, so a dialect may splice it into SQL
/// between its quotes; this type is the one way there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Ident(String);

impl Ident {
    /// Checks `name`; [`Error::InvalidIdentifier`] says what is wrong with it.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let refuse = |reason| Err(Error::InvalidIdentifier { name: name.escape_debug().take(100).collect(), reason });
        if name.is_empty() {
            return refuse("it is empty");
        }
        if name.len() > 63 {
            return refuse("it is longer than 63 bytes");
        }
        if name.starts_with(|c: char| c.is_ascii_digit()) {
            return refuse("it starts with a digit");
        }
        if name.contains('.') {
            return refuse(
                "give the bare name of the table; choose its schema on the connection (search_path, or USE)",
            );
        }
        if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return refuse("only ASCII letters, digits and `_` are allowed");
        }
        Ok(Self(name.to_owned()))
    }

    /// The bare name.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Ident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_could_end_a_quoted_name_passes() {
        for good in ["t_items", "T", "_x9", "order"] {
            assert!(Ident::new(good).is_ok(), "{good}");
        }
        let long = "x".repeat(64);
        for bad in ["", "a b", "a.b", "a;b", "a\"b", "a`b", "a'b", "tâble", "9a", "a\0", "a-b", "a$b", &long] {
            assert!(matches!(Ident::new(bad), Err(Error::InvalidIdentifier { .. })), "{bad}");
        }
    }
}
