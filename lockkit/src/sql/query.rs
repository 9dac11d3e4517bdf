//! The queries of row locks and versions, and the clauses that every database shares except for quotes and
//! placeholders.

use std::{
    fmt::{self, Write},
    hash::{DefaultHasher, Hasher},
};

use sqlx::{Arguments, Database, Encode, Type};

use crate::{
    policy::Wait,
    sql::{
        Dialect,
        ident::{Ident, TableName},
    },
    value::error::{BoxError, Error},
};

/// The values that a statement binds, with the types that they are sent as.
pub struct Values<DB: Database> {
    pub(crate) arguments: DB::Arguments,
    pub(crate) types: Vec<DB::TypeInfo>,
}

impl<DB: Database> Values<DB> {
    pub(crate) fn new() -> Self {
        Self { arguments: DB::Arguments::default(), types: Vec::new() }
    }

    pub(crate) fn add<'v, T>(&mut self, value: T) -> Result<(), BoxError>
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        let type_info = value.produces().unwrap_or_else(T::type_info);
        self.arguments.add(value)?;
        self.types.push(type_info);
        Ok(())
    }

    /// Adds a value that is compared with `column`. [`Error::InvalidOption`] for NULL: NULL equals nothing in SQL, so
    /// no row would ever match.
    pub(crate) fn add_compared<'v, T>(&mut self, option: &'static str, column: &Ident, value: T) -> Result<(), Error>
    where
        DB: Dialect,
        T: Encode<'v, DB> + Type<DB>,
    {
        let cannot_bind = |err: BoxError| Error::InvalidOption {
            option,
            reason: format!("has a value for `{column}` that cannot be sent to the database: {err}"),
        };
        let is_null = value.encode_by_ref(&mut DB::ArgumentBuffer::default()).map_err(cannot_bind)?;
        if is_null.is_null() {
            let reason = format!(
                "compares `{column}` with NULL, which equals nothing in SQL, so no row would match; unwrap the \
                 `Option` first, or choose the rows by another column"
            );
            return Err(Error::InvalidOption { option, reason });
        }
        self.add(value).map_err(cannot_bind)
    }

    pub(crate) fn len(&self) -> usize {
        self.types.len()
    }
}

impl<DB: Dialect> Values<DB> {
    /// A hash of the values, as the driver prints them. 0 if the driver fails to.
    pub(crate) fn hash(&self) -> u64 {
        struct Hash(DefaultHasher);

        impl Write for Hash {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }

        let mut hash = Hash(DefaultHasher::new());
        write!(hash, "{:?}", self.arguments).ok().map(|()| hash.0.finish()).unwrap_or_default()
    }
}

impl<DB: Dialect> Clone for Values<DB> {
    fn clone(&self) -> Self {
        Self { arguments: self.arguments.clone(), types: self.types.clone() }
    }
}

impl<DB: Database> fmt::Debug for Values<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").field("types", &self.types).finish_non_exhaustive()
    }
}

/// The selection of a row lock. The values are bound in the order of the columns. Without `by` it selects the first
/// rows in an order, with a limit.
#[derive(Debug, Clone)]
pub struct RowQuery {
    pub(crate) table: TableName,
    pub(crate) by: Vec<By>,
    pub(crate) order_by: Vec<Ident>,
    pub(crate) limit: Option<u32>,
    pub(crate) skip_locked: bool,
    pub(crate) strength: Strength,
    pub(crate) wait: Wait,
    pub(crate) columns: Columns,
}

/// A column and the number of values that are compared with it.
#[derive(Debug, Clone)]
pub(crate) struct By {
    pub(crate) column: Ident,
    pub(crate) values: usize,
}

/// Which columns a row lock returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// All of them.
    All,
    /// None: the rows are only counted.
    None,
}

/// How strong a row lock is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strength {
    /// Blocks writers.
    Share,
    /// Blocks writers and other locks of this kind.
    Update,
    /// Also blocks transactions that only reference the row's key.
    KeyChange,
}

/// The row of a versioned read or write. The values are bound in the order of the columns.
#[derive(Debug, Clone)]
pub struct VersionQuery {
    pub(crate) table: TableName,
    pub(crate) by: Vec<By>,
    pub(crate) version: Ident,
}

/// The columns of a versioned save, and its row.
#[derive(Debug, Clone)]
pub struct SaveQuery {
    pub(crate) row: VersionQuery,
    pub(crate) columns: Vec<Ident>,
}

/// The WHERE clause that compares each column with its bound values, starting at placeholder number `first`.
pub(super) fn matching(by: &[By], first: usize, quote: char, placeholder: fn(usize) -> String) -> String {
    let mut next = first;
    let terms: Vec<_> = by
        .iter()
        .map(|By { column, values }| {
            let marks: Vec<_> = (next..next + values).map(placeholder).collect();
            next += values;
            match &*marks {
                [one] => format!("{quote}{column}{quote} = {one}"),
                many => format!("{quote}{column}{quote} IN ({})", many.join(", ")),
            }
        })
        .collect();
    terms.join(" AND ")
}

/// The WHERE clause of a row lock. Empty where only the order selects the rows.
pub(super) fn filter(query: &RowQuery, quote: char, placeholder: fn(usize) -> String) -> String {
    if query.by.is_empty() {
        return String::new();
    }
    format!("WHERE {}", matching(&query.by, 1, quote, placeholder))
}

/// The UPDATE that writes the columns of a row and increments its version, if the row has the version that is bound
/// last, as number `last`.
pub(super) fn save(query: &SaveQuery, last: usize, quote: char, placeholder: fn(usize) -> String) -> String {
    let SaveQuery { row: VersionQuery { table, by, version }, columns } = query;
    let values =
        columns.iter().zip(1..).map(|(column, mark)| format!("{quote}{column}{quote} = {}", placeholder(mark)));
    let step = format!("{quote}{version}{quote} = {quote}{version}{quote} + 1");
    format!(
        "UPDATE {} SET {} WHERE {} AND {quote}{version}{quote} = {}",
        table.quoted(quote),
        values.chain([step]).collect::<Vec<_>>().join(", "),
        matching(by, columns.len() + 1, quote, placeholder),
        placeholder(last),
    )
}

/// The ORDER BY and LIMIT clauses of a row lock.
pub(super) fn order_and_limit(query: &RowQuery, quote: char) -> String {
    let columns: Vec<_> = query.order_by.iter().map(|it| format!("{quote}{it}{quote}")).collect();
    let limit = query.limit.map(|it| format!(" LIMIT {it}")).unwrap_or_default();
    format!("ORDER BY {}{limit}", columns.join(", "))
}

/// The step in microseconds of a timestamp column's precision, derived from trailing zeros. `micros` is the expression
/// for the timestamp's microseconds.
pub(super) fn timestamp_step(micros: &str) -> String {
    let zeros: Vec<_> = [1_000_000, 100_000, 10_000, 1000, 100, 10]
        .iter()
        .map(|step| format!("WHEN {micros} % {step} = 0 THEN {step}"))
        .collect();
    format!("CASE {} ELSE 1 END", zeros.join(" "))
}
