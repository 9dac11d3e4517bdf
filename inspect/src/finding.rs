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

impl Plan {
    /// Whether a statement can be planned without being run: it begins with `SELECT`, `UPDATE`, `DELETE`, `INSERT`,
    /// `REPLACE` or `WITH`, and has no NUL. Other words, such as `ANALYZE`, could be options of the server's EXPLAIN,
    /// and sqlx never ends with a NUL in a text for SQLite.
    pub fn is_for(statement: &str) -> bool {
        if statement.contains('\0') {
            return false;
        }
        let word: String = statement.trim_start().chars().take_while(char::is_ascii_alphabetic).collect();
        ["select", "update", "delete", "insert", "replace", "with"].contains(&&*word.to_ascii_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_statement_that_is_not_an_option_is_planned() {
        for statement in ["select 1", " UPDATE t SET a = 1", "with x as (select 1) select * from x"] {
            assert!(Plan::is_for(statement), "{statement}");
        }
        for statement in [
            "ANALYZE DELETE FROM t",
            "(ANALYZE) SELECT 1",
            "VERBOSE SELECT 1",
            "/**/ SELECT 1",
            "",
            "selects",
            "select \0",
        ] {
            assert!(!Plan::is_for(statement), "{statement}");
        }
    }
}
