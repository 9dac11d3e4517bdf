//! What is found to harm locks, as data.

use serde::Serialize;

/// How bad a finding is, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// To know, and nothing to mend.
    Note,
    /// Locks work, until something else goes wrong.
    Warn,
    /// Locks do not work, or do not exclude.
    Fail,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at, in a word.
    pub check: &'static str,
    /// What is wrong, and what it does to locks.
    pub what: String,
    /// The statement that mends it.
    pub mend: Option<String>,
}

impl Finding {
    /// A finding that nothing mends.
    pub fn new(level: Level, check: &'static str, what: impl Into<String>) -> Self {
        Self { level, check, what: what.into(), mend: None }
    }

    /// The same, with the statement that mends it.
    #[must_use]
    pub fn mend(mut self, statement: impl Into<String>) -> Self {
        self.mend = Some(statement.into());
        self
    }
}

/// How a statement finds its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// By an index.
    Index,
    /// It reads a whole table or index, in the database's words.
    Scan(String),
}
