//! What `doctor` finds, as data. Knows no database and no terminal.

use serde::Serialize;

/// How bad it is, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// To know, and nothing to mend.
    Note,
    /// Locks work, until something else goes wrong.
    Warn,
    /// Locks do not work, or do not exclude.
    Fail,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// What was looked at, in a word.
    pub(crate) check: &'static str,
    /// What is wrong, and what it does to locks.
    pub(crate) what: String,
    /// The statement that mends it.
    pub(crate) mend: Option<String>,
}

impl Finding {
    pub(crate) fn new(level: Level, check: &'static str, what: impl Into<String>) -> Self {
        Self { level, check, what: what.into(), mend: None }
    }

    pub(crate) fn mend(mut self, statement: impl Into<String>) -> Self {
        self.mend = Some(statement.into());
        self
    }
}

/// How a statement finds its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plan {
    Index,
    /// It reads a whole table or index, in the database's words.
    Scan(String),
}
