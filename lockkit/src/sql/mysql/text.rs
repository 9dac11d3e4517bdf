//! The texts of statements: one for each of the two servers where their grammars differ, with the values at named
//! places.
//!
//! A statement on a connection of a pool is sent in the grammar of the pool's server, which the first connection of the
//! pool reports (`server`). A connection that the caller hands in reports nothing: sqlx 0.9 keeps the version of the
//! handshake private, and a request would be one more round trip. So a statement there has one text for both servers,
//! and [`for_each`] and [`settings_on_maria`] write the few clauses that differ. No other file has version comments:
//! MariaDB runs the text of `/*M! … */` and skips that of `/*!80000 … */`; MySQL does the opposite
//! (<https://mariadb.com/kb/en/comment-syntax/>, <https://dev.mysql.com/doc/refman/8.4/en/comments.html>).

use std::sync::Arc;

use sqlx::{
    AssertSqlSafe, Decode, Encode, MySql, Row, SqlSafeStr, SqlStr, Type,
    mysql::{MySqlArguments, MySqlRow},
    query::{Map, Query},
};

use crate::{sql::history::hex, value::key::Key};

/// Which words a server understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grammar {
    MySql,
    MariaDb,
}

/// Refuses to wait for a row, in front of a statement on MariaDB. MySQL has no such setting for a statement that
/// writes.
pub(super) const AT_ONCE: &str = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR";

#[cfg(feature = "shedlock")]
impl Grammar {
    /// [`AT_ONCE`] where the server has it.
    pub(super) fn at_once(self) -> &'static str {
        match self {
            Self::MySql => "",
            Self::MariaDb => AT_ONCE,
        }
    }
}

/// A statement with its values at named places, such as `:name`, or `:names[3]` for [`Each`] of three. The same name
/// may stand at several places.
pub(super) struct Statement {
    /// With `?` for each name. Shared, because each query clones it.
    text: SqlStr,
    names: Vec<String>,
}

impl Statement {
    /// Replaces the names by placeholders. A colon in quotes begins no name.
    pub(super) fn new(statement: &str) -> Self {
        let (mut text, mut names) = (String::with_capacity(statement.len()), Vec::new());
        let (mut rest, mut quote) = (statement, None);
        while let Some(at) = rest.find(['\'', '`', ':']) {
            let (before, mark) = (&rest[..at], rest.as_bytes()[at] as char);
            text.push_str(before);
            rest = &rest[at + 1..];
            let length = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_').unwrap_or(rest.len());
            match quote {
                None if mark == ':' && length > 0 => {
                    names.push(rest[..length].to_owned());
                    rest = &rest[length..];
                    let list = rest.strip_prefix('[').and_then(|it| it.split_once(']'));
                    let list = list.and_then(|(number, after)| Some((number.parse().ok()?, after)));
                    let (marks, after) = list.unwrap_or((1, rest));
                    text.push_str(&vec!["?"; marks].join(", "));
                    rest = after;
                    continue;
                }
                None if mark != ':' => quote = Some(mark),
                Some(open) if open == mark => quote = None,
                None | Some(_) => {}
            }
            text.push(mark);
        }
        text.push_str(rest);
        Self { text: AssertSqlSafe(Arc::<str>::from(text)).into_sql_str(), names }
    }

    /// The query, with each value bound at all places that name it.
    pub(super) fn with(&self, values: &[(&str, &dyn Value)]) -> Query<'static, MySql, MySqlArguments> {
        self.names.iter().fold(sqlx::query(self.text.clone()), |query, name| {
            let value = values.iter().find(|(it, _)| it == name);
            value.expect("BUG: the statement names a value that it is not given").1.bind(query)
        })
    }

    /// As [`with`](Self::with), for the only column of the rows.
    pub(super) fn scalar<T>(
        &self,
        values: &[(&str, &dyn Value)],
    ) -> Map<'static, MySql, impl FnMut(MySqlRow) -> sqlx::Result<T> + Send + use<T>, MySqlArguments>
    where
        T: for<'r> Decode<'r, MySql> + Type<MySql> + Send + Unpin,
    {
        self.with(values).try_map(|row: MySqlRow| row.try_get(0))
    }
}

/// A value of a statement.
pub(super) trait Value: Sync {
    fn bind<'q>(&self, query: Query<'q, MySql, MySqlArguments>) -> Query<'q, MySql, MySqlArguments>;
}

impl<T: for<'q> Encode<'q, MySql> + Type<MySql> + Sync> Value for T {
    fn bind<'q>(&self, query: Query<'q, MySql, MySqlArguments>) -> Query<'q, MySql, MySqlArguments> {
        query.bind(self)
    }
}

/// The values of a list.
pub(super) struct Each<'v, T>(pub(super) &'v [T]);

impl<T: for<'q> Encode<'q, MySql> + Type<MySql> + Sync> Value for Each<'_, T> {
    fn bind<'q>(&self, query: Query<'q, MySql, MySqlArguments>) -> Query<'q, MySql, MySqlArguments> {
        self.0.iter().fold(query, Query::bind)
    }
}

/// A statement in the grammar of each server.
pub(super) struct Texts {
    pub(super) mysql: Statement,
    pub(super) maria: Statement,
}

impl Texts {
    pub(super) fn of(&self, grammar: Grammar) -> &Statement {
        match grammar {
            Grammar::MySql => &self.mysql,
            Grammar::MariaDb => &self.maria,
        }
    }
}

/// One statement for both servers, formatted at its first use and kept for the life of the process.
macro_rules! named {
    ($($text:tt)*) => {{
        static TEXT: std::sync::LazyLock<$crate::sql::mysql::text::Statement> =
            std::sync::LazyLock::new(|| $crate::sql::mysql::text::Statement::new(&format!($($text)*)));
        &*TEXT
    }};
}

/// A statement in the grammar of each server, made at its first use and kept for the life of the process.
macro_rules! texts {
    (mysql: $mysql:expr, maria: $maria:expr $(,)?) => {{
        static TEXTS: std::sync::LazyLock<$crate::sql::mysql::text::Texts> =
            std::sync::LazyLock::new(|| $crate::sql::mysql::text::Texts {
                mysql: $crate::sql::mysql::text::Statement::new(&$mysql),
                maria: $crate::sql::mysql::text::Statement::new(&$maria),
            });
        &*TEXTS
    }};
}

pub(super) use {named, texts};

/// A clause in the words of each server, for a connection whose server is not known. Both name the same values in the
/// same order, which are bound once: each server counts the placeholders of its own words.
pub(super) fn for_each(mysql: &str, maria: &str) -> String {
    let maria = Statement::new(maria);
    debug_assert_eq!(Statement::new(mysql).names, maria.names);
    format!("/*!80000 {mysql} */ /*M! {} */", maria.text.as_str())
}

/// Settings in front of a statement, which only MariaDB has, for a connection whose server is not known.
pub(super) fn settings_on_maria(settings: &str) -> String {
    format!("/*M! SET STATEMENT {settings} FOR */ ")
}

/// A key as a literal, for messages of several statements, which take no bound values, and for other clients.
pub(super) fn literal(key: &Key) -> String {
    format!("X'{}'", hex(key.as_bytes()))
}

#[cfg(test)]
mod tests {
    use sqlx::{Arguments, Execute};

    use super::*;

    #[test]
    fn a_value_is_bound_wherever_it_is_named() {
        let statement =
            Statement::new("UPDATE t SET a = :new, b = :new WHERE `a:b` = :old_1 AND c <> ':new' AND d = '12:00'");
        let mut query = statement.with(&[("old_1", &1_i64), ("new", &b"x".as_slice())]);
        let arguments = query.take_arguments().unwrap().unwrap();
        assert_eq!(query.sql().as_str(), "UPDATE t SET a = ?, b = ? WHERE `a:b` = ? AND c <> ':new' AND d = '12:00'");
        assert_eq!(arguments.len(), 3);
        assert_eq!(statement.names, ["new", "new", "old_1"]);
    }

    #[test]
    fn a_list_has_a_place_for_each_value() {
        let statement = Statement::new("SELECT a[1] FROM t WHERE a IN (:all[3]) AND b = :b");
        let arguments = statement.with(&[("all", &Each(&[1_i64, 2, 3])), ("b", &4_i64)]).take_arguments();
        assert_eq!(statement.text.as_str(), "SELECT a[1] FROM t WHERE a IN (?, ?, ?) AND b = ?");
        assert_eq!(arguments.unwrap().unwrap().len(), 4);
    }

    #[test]
    fn a_value_in_the_words_of_each_server_is_bound_once() {
        let statement = Statement::new(&format!("SELECT {} LIMIT :most", for_each("a = :a", ":a = b")));
        assert_eq!(statement.text.as_str(), "SELECT /*!80000 a = ? */ /*M! ? = b */ LIMIT ?");
        assert_eq!(statement.names, ["a", "most"]);
    }
}
