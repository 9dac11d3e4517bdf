//! Names of tables and columns: the only text from the caller that becomes part of a statement.

use std::fmt;

use crate::value::error::{Error, Result};

/// A checked table or column name.
///
/// ASCII letters, digits and underscores, not starting with a digit, at most 63 bytes (the limit of PostgreSQL, the
/// smallest of the three). Such a name cannot end a quoted identifier, so a dialect may splice it into SQL between its
/// quotes. This type is the only way to do so.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Ident(String);

impl Ident {
    /// Checks `name`. [`Error::InvalidIdentifier`] says what is wrong with it.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let refuse = |reason| Err(invalid(name, reason));
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
            return refuse("a column is named without its table");
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

fn invalid(name: &str, reason: &'static str) -> Error {
    Error::InvalidIdentifier { name: name.escape_debug().take(100).collect(), reason }
}

/// A checked table name, with a schema if one was given: `items` or `app.items`.
///
/// The schema is a schema on PostgreSQL, a database on MySQL and MariaDB, and an attached file on SQLite.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TableName {
    schema: Option<Ident>,
    name: Ident,
}

impl TableName {
    /// Checks both parts of `name`. [`Error::InvalidIdentifier`] says what is wrong with it.
    pub(crate) fn new(name: &str) -> Result<Self> {
        if name.matches('.').count() > 1 {
            return Err(invalid(name, "it has more than a schema and a name; write `app.items`"));
        }
        match name.split_once('.') {
            None => Ok(Self { schema: None, name: Ident::new(name)? }),
            Some((schema, table)) => Ok(Self { schema: Some(Ident::new(schema)?), name: Ident::new(table)? }),
        }
    }

    /// The schema; `None` stands for the connection's own.
    pub(crate) fn schema(&self) -> Option<&str> {
        self.schema.as_ref().map(Ident::as_str)
    }

    /// The name without its schema.
    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The name with each part quoted, for use in a statement.
    pub(crate) fn quoted(&self, quote: char) -> String {
        let Self { schema, name } = self;
        match schema {
            None => format!("{quote}{name}{quote}"),
            Some(schema) => format!("{quote}{schema}{quote}.{quote}{name}{quote}"),
        }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.schema {
            None => self.name.fmt(f),
            Some(schema) => write!(f, "{schema}.{}", self.name),
        }
    }
}

/// Text is a name that needs no escape between its quotes, or is refused in words that can be shown. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_identifier(name: &str) {
    let is_name = |it: &str| {
        let is_word = it.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_');
        (1..=63).contains(&it.len()) && is_word && !it.as_bytes()[0].is_ascii_digit()
    };
    assert_eq!(Ident::new(name).is_ok(), is_name(name), "{name:?}");
    let parts: Vec<_> = name.split('.').collect();
    let table = TableName::new(name);
    assert_eq!(table.is_ok(), parts.len() <= 2 && parts.iter().all(|it| is_name(it)), "{name:?}");
    let shown = table.err().map(|err| err.to_string()).unwrap_or_default();
    assert!(!shown.contains(char::is_control), "{shown:?}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_a_name_that_needs_no_escape_or_is_refused(
            name in "([a-zA-Z0-9_.\"`'; \\\\$é\u{0}]|\\PC){0,70}|[a-z_][a-z0-9_]{0,65}(\\.[a-z]{1,3}){0,2}",
        ) {
            check_identifier(&name);
        }
    }

    #[test]
    fn each_part_of_a_table_name_has_quotes_of_its_own() {
        assert_eq!(TableName::new("t").unwrap().quoted('"'), "\"t\"");
        assert_eq!(TableName::new("app.t").unwrap().quoted('`'), "`app`.`t`");
        assert_eq!(TableName::new("app.t").unwrap().to_string(), "app.t");
        for bad in ["", ".", "app.", ".t", "a.b.c", "a\".t", "a.`t", "1a.t", "a .t"] {
            assert!(matches!(TableName::new(bad), Err(Error::InvalidIdentifier { .. })), "{bad}");
        }
    }

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
