//! Detects a pooler in transaction mode between this process and PostgreSQL, such as `PgBouncer`, and sends statements
//! so that they work through it.
//!
//! A pooler in transaction mode lends a server session for one transaction only. sqlx prepares each statement by name
//! and runs it by that name in a later message, and the pooler may send that message to another session. In that
//! session the name is unknown, or belongs to *another* client's statement. An unnamed statement is prepared and run in
//! two messages as well. So behind such a pooler lockkit sends its own statements as plain text in one message.
//! Statements with values of the caller's types are unnamed and run in a transaction, which stays in one session.
//!
//! The mode must be known before the first statement, since a wrong statement that runs causes no error. sqlx sends
//! `extra_float_digits` when it connects, and `PgBouncer` does not forward it. So lockkit queries `pg_settings`, once
//! per host, port, database and process, whether that setting came from the client. A connection does not know its
//! pool, so the answer holds for the whole process.

use std::{
    borrow::Cow,
    collections::HashSet,
    fmt::Write,
    sync::{
        LazyLock,
        atomic::{AtomicU8, Ordering},
    },
};

use sqlx::{
    Arguments, AssertSqlSafe, Connection, PgConnection, Pool, Postgres, Row, SqlSafeStr, SqlStr,
    error::{BoxDynError, DatabaseError},
    postgres::{PgArguments, PgQueryResult, PgRow, PgTransactionManager},
    raw_sql,
};

use sqlx_core::transaction::TransactionManager;

use crate::mutex::Mutex;

/// Whether a pooler is in use. One answer for the whole process, because a connection does not know its pool.
static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);

const UNKNOWN: u8 = 0;
const MET: u8 = 1;
const TOLD_YES: u8 = 2;
const TOLD_NO: u8 = 3;

/// The servers and databases that were already probed.
static ASKED: LazyLock<Mutex<HashSet<Target>>> = LazyLock::new(Mutex::default);

/// Host, port and database.
type Target = (String, u16, Option<String>);

/// Tells lockkit whether a pooler in transaction mode stands between this process and PostgreSQL.
///
/// Without this call lockkit probes once for each database, when it first takes a connection from a pool: `PgBouncer`
/// does not forward a setting (`extra_float_digits`) that sqlx sends with every connection. Once a pooler is found,
/// this process prepares none of lockkit's statements by name.
///
/// Call it with `true` at start when lockkit's first statement may run in your own transaction (`pool.begin()`) or
/// behind a pooler other than `PgBouncer`. Call it with `false` where the pooler is in session mode or supports
/// prepared statements (`PgBouncer` with `max_prepared_statements`).
///
/// sqlx prepares *your* statements by name, whatever `statement_cache_capacity` is. Behind a pooler without support for
/// prepared statements they can fail, or run another client's statement. Use `query(…).persistent(false)` in a
/// transaction, or a pooler with that support.
///
/// # Example
/// ```
/// lockkit::dialect::behind_pooler(true);
/// ```
pub fn behind_pooler(is_there: bool) {
    KNOWN.store(if is_there { TOLD_YES } else { TOLD_NO }, Ordering::Relaxed);
}

fn is_met() -> bool {
    matches!(KNOWN.load(Ordering::Relaxed), MET | TOLD_YES)
}

fn meet() {
    // An explicit setting by the user stays.
    let _ = KNOWN.compare_exchange(UNKNOWN, MET, Ordering::Relaxed, Ordering::Relaxed);
}

/// Probes for a pooler before the first statement on this database. One round trip, without a prepared statement.
pub(super) async fn look_for(conn: &mut PgConnection, pool: &Pool<Postgres>) {
    if KNOWN.load(Ordering::Relaxed) != UNKNOWN {
        return;
    }
    let options = pool.connect_options();
    let target = (options.get_host().to_owned(), options.get_port(), options.get_database().map(str::to_owned));
    if ASKED.lock().contains(&target) {
        return;
    }
    // sqlx sets it at the start of every session.
    let sql = "SELECT source = 'client' AS is_ours FROM pg_catalog.pg_settings WHERE name = 'extra_float_digits'";
    let asked = raw_sql(sql).fetch_one(conn).await;
    // An error is left to the next statement, which fails in the same way; the probe runs again after it.
    if let Ok(is_ours) = asked.and_then(|row| row.try_get::<bool, _>("is_ours")) {
        ASKED.lock().insert(target);
        if !is_ours {
            meet();
        }
    }
}

/// Whether the error says that a prepared statement was looked up, or created, in another session. Nothing was
/// executed.
fn is_lost_statement(err: &sqlx::Error) -> bool {
    has_code(err, &["42P05", "26000"])
}

/// As [`is_lost_statement`], or another client's statement of that name takes other values. Only for statements whose
/// values always have the same types: for others, the error has other causes too.
fn is_lost_own_statement(err: &sqlx::Error) -> bool {
    is_lost_statement(err) || has_code(err, &["08P01"])
}

fn has_code(err: &sqlx::Error, codes: &[&str]) -> bool {
    err.as_database_error().and_then(DatabaseError::code).is_some_and(|it| codes.contains(&&*it))
}

/// The answer to a statement that was sent by its name. `None` when a pooler lost the name and nothing was executed:
/// the caller then sends the statement unnamed.
fn unless_lost<T>(
    conn: &PgConnection,
    answer: sqlx::Result<T>,
    is_lost: fn(&sqlx::Error) -> bool,
) -> Option<sqlx::Result<T>> {
    match answer {
        Err(err) if is_lost(&err) => {
            meet();
            // The failed statement has aborted the transaction.
            in_a_transaction(conn).then_some(Err(err))
        }
        answer => Some(answer),
    }
}

fn in_a_transaction(conn: &PgConnection) -> bool {
    PgTransactionManager::get_transaction_depth(conn) > 0
}

/// One of lockkit's own statements, with values of lockkit's own types.
pub(super) fn query<'q>(sql: impl SqlSafeStr) -> Statement<'q> {
    // No statement has more values.
    Statement { sql: sql.into_sql_str(), values: Vec::with_capacity(8) }
}

/// A statement made by [`query`]. Used like sqlx's.
#[must_use = "a statement does nothing until it is executed"]
pub(super) struct Statement<'q> {
    sql: SqlStr,
    values: Vec<Value<'q>>,
}

impl<'q> Statement<'q> {
    pub(super) fn bind(mut self, value: impl Into<Value<'q>>) -> Self {
        self.values.push(value.into());
        self
    }

    pub(super) async fn fetch_all(self, conn: &mut PgConnection) -> sqlx::Result<Vec<PgRow>> {
        if !is_met() {
            let named = sqlx::query_with(self.sql.clone(), self.arguments()?).fetch_all(&mut *conn).await;
            if let Some(answer) = unless_lost(conn, named, is_lost_own_statement) {
                return answer;
            }
        }
        raw_sql(AssertSqlSafe(self.text()?)).fetch_all(conn).await
    }

    pub(super) async fn fetch_optional(self, conn: &mut PgConnection) -> sqlx::Result<Option<PgRow>> {
        Ok(self.fetch_all(conn).await?.pop())
    }

    pub(super) async fn fetch_one(self, conn: &mut PgConnection) -> sqlx::Result<PgRow> {
        self.fetch_optional(conn).await?.ok_or(sqlx::Error::RowNotFound)
    }

    pub(super) async fn execute(self, conn: &mut PgConnection) -> sqlx::Result<PgQueryResult> {
        if !is_met() {
            let named = sqlx::query_with(self.sql.clone(), self.arguments()?).execute(&mut *conn).await;
            if let Some(answer) = unless_lost(conn, named, is_lost_own_statement) {
                return answer;
            }
        }
        raw_sql(AssertSqlSafe(self.text()?)).execute(conn).await
    }

    fn arguments(&self) -> sqlx::Result<PgArguments> {
        let mut arguments = PgArguments::default();
        // Their bytes, with a key of some 60: one allocation for most statements.
        arguments.reserve(self.values.len(), 128);
        for value in &self.values {
            value.add_to(&mut arguments).map_err(sqlx::Error::Encode)?;
        }
        Ok(arguments)
    }

    /// The statement with its values spliced in. In lockkit's statements `$` occurs only in front of the number of a
    /// value.
    fn text(&self) -> sqlx::Result<String> {
        let mut parts = self.sql.as_str().split('$');
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let digits = part.len() - part.trim_start_matches(|it: char| it.is_ascii_digit()).len();
            let number: usize = part[..digits].parse().unwrap_or(0);
            let value = number.checked_sub(1).and_then(|it| self.values.get(it));
            text.push_str(&value.expect("BUG: a statement names a value that was not bound").text()?);
            text.push_str(&part[digits..]);
        }
        Ok(text)
    }
}

/// A value of one of the types that lockkit's own statements use.
pub(super) enum Value<'q> {
    Bool(bool),
    Int(i32),
    Long(i64),
    Text(Option<Cow<'q, str>>),
    Bytes(&'q [u8]),
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    Texts(Vec<&'q str>),
    ManyBytes(Vec<&'q [u8]>),
}

impl Value<'_> {
    fn add_to(&self, arguments: &mut PgArguments) -> Result<(), BoxDynError> {
        match self {
            Self::Bool(value) => arguments.add(*value),
            Self::Int(value) => arguments.add(*value),
            Self::Long(value) => arguments.add(*value),
            Self::Text(value) => arguments.add(value.as_deref()),
            Self::Bytes(value) => arguments.add(*value),
            Self::Ints(values) => arguments.add(values.as_slice()),
            Self::Longs(values) => arguments.add(values.as_slice()),
            Self::Texts(values) => arguments.add(values.as_slice()),
            Self::ManyBytes(values) => arguments.add(values.as_slice()),
        }
    }

    /// The value as an SQL expression of the same type.
    fn text(&self) -> sqlx::Result<String> {
        let array = |values: Vec<String>, of: &str| format!("(ARRAY[{}]::{of}[])", values.join(","));
        let numbers = |values: &mut dyn Iterator<Item = String>| values.collect::<Vec<_>>();
        Ok(match self {
            Self::Bool(value) => value.to_string(),
            Self::Int(value) => format!("({value}::integer)"),
            Self::Long(value) => format!("({value}::bigint)"),
            Self::Text(None) => "NULL::text".to_owned(),
            Self::Text(Some(value)) => literal(value)?,
            Self::Bytes(value) => bytes(value),
            Self::Ints(values) => array(numbers(&mut values.iter().map(i32::to_string)), "integer"),
            Self::Longs(values) => array(numbers(&mut values.iter().map(i64::to_string)), "bigint"),
            Self::Texts(values) => array(values.iter().map(|it| literal(it)).collect::<sqlx::Result<_>>()?, "text"),
            Self::ManyBytes(values) => array(values.iter().map(|it| bytes(it)).collect(), "bytea"),
        })
    }
}

/// The text as a literal that means the same for every setting of `standard_conforming_strings` and `backslash_quote`.
fn literal(value: &str) -> sqlx::Result<String> {
    if value.contains('\0') {
        return Err(sqlx::Error::Encode("a text of PostgreSQL cannot have the character NUL".into()));
    }
    Ok(format!("(E'{}'::text)", value.replace('\\', "\\\\").replace('\'', "''")))
}

fn bytes(value: &[u8]) -> String {
    let hex = value.iter().fold(String::new(), |mut text, byte| {
        // Writing to a `String` cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    format!("decode('{hex}', 'hex')")
}

macro_rules! value_from {
    ($($from:ty => |$it:ident| $value:expr),+ $(,)?) => {
        $(impl<'q> From<$from> for Value<'q> {
            fn from($it: $from) -> Self {
                $value
            }
        })+
    };
}

value_from! {
    bool => |it| Self::Bool(it),
    i32 => |it| Self::Int(it),
    i64 => |it| Self::Long(it),
    &'q str => |it| Self::Text(Some(it.into())),
    String => |it| Self::Text(Some(it.into())),
    Option<String> => |it| Self::Text(it.map(Cow::from)),
    &'q [u8] => |it| Self::Bytes(it),
    [i32; 4] => |it| Self::Ints(it.to_vec()),
    Vec<i32> => |it| Self::Ints(it),
    Vec<i64> => |it| Self::Longs(it),
    Vec<&'q str> => |it| Self::Texts(it),
    Vec<&'q [u8]> => |it| Self::ManyBytes(it),
}

/// Makes the text of a statement different. sqlx would otherwise run the named statement that this connection has
/// already prepared for the same text, whatever `persistent` is.
const UNNAMED: &str = " /* unnamed */";

/// Runs a statement with values of the caller's types.
pub(super) async fn fetch_all(
    conn: &mut PgConnection,
    sql: String,
    arguments: PgArguments,
) -> sqlx::Result<Vec<PgRow>> {
    if !is_met() {
        let named = sqlx::query_with(AssertSqlSafe(sql.clone()), arguments.clone());
        let named = named.fetch_all(&mut *conn).await;
        if let Some(answer) = unless_lost(conn, named, is_lost_statement) {
            return answer;
        }
    }
    let unnamed = sqlx::query_with(AssertSqlSafe(sql + UNNAMED), arguments).persistent(false);
    if !is_idle(conn).await? {
        return unnamed.fetch_all(conn).await;
    }
    let mut tx = conn.begin().await?;
    let rows = unnamed.fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(rows)
}

/// As [`fetch_all`], but returns the number of changed rows.
pub(super) async fn execute(
    conn: &mut PgConnection,
    sql: String,
    arguments: PgArguments,
) -> sqlx::Result<PgQueryResult> {
    if !is_met() {
        let named = sqlx::query_with(AssertSqlSafe(sql.clone()), arguments.clone());
        let named = named.execute(&mut *conn).await;
        if let Some(answer) = unless_lost(conn, named, is_lost_statement) {
            return answer;
        }
    }
    let unnamed = sqlx::query_with(AssertSqlSafe(sql + UNNAMED), arguments).persistent(false);
    if !is_idle(conn).await? {
        return unnamed.execute(conn).await;
    }
    let mut tx = conn.begin().await?;
    let done = unnamed.execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(done)
}

/// Whether no transaction is open. Detects also a transaction that the application began as text and sqlx does not
/// count: it started before this message.
async fn is_idle(conn: &mut PgConnection) -> sqlx::Result<bool> {
    if in_a_transaction(conn) {
        return Ok(false);
    }
    raw_sql("SELECT now() = statement_timestamp() AS is_idle").fetch_one(conn).await?.try_get("is_idle")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_in_the_text_in_their_places_and_cannot_end_their_literals() {
        let mut statement = query("SELECT $1, $2, $11, $10 FROM t WHERE a = $3 AND b = $4");
        for value in [r"it's \", r"\'; DROP TABLE t; --"] {
            statement = statement.bind(value);
        }
        statement = statement.bind(-1_i64).bind(&b"\x00'"[..]);
        for number in 5..12 {
            statement = statement.bind(number);
        }
        assert_eq!(
            statement.text().expect("no value has NUL"),
            r"SELECT (E'it''s \\'::text), (E'\\''; DROP TABLE t; --'::text), (11::integer), (10::integer) FROM t "
                .to_owned()
                + "WHERE a = (-1::bigint) AND b = decode('0027', 'hex')"
        );
        assert!(query("SELECT $1").bind("a\0b").text().is_err());
    }
}
