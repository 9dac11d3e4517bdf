//! What an optimistic write compares: the version of a row, and which row it is.

use std::fmt;

/// The value of a row's version column: a number that counts up, or a timestamp that moves forward.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Version {
    /// An integer column. Each update adds one.
    Number(i64),
    /// A timestamp column, in the database's own exact notation. Each update sets it to the current time, or just past
    /// the old value if the clock has not advanced.
    Timestamp(String),
}

impl From<i64> for Version {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<i32> for Version {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Timestamp(text) => f.write_str(text),
        }
    }
}

/// A row: a hash of its database's kind, table, key columns and key. Two rows with one hash share turns, which costs
/// time only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row(pub(crate) u64);
