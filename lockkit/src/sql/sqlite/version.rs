//! Versions of rows on SQLite.

use sqlx::{Arguments, AssertSqlSafe, Row, Sqlite, SqliteConnection, sqlite::SqliteRow};

use super::placeholder;
use crate::{
    sql::{
        SaveQuery, Values, VersionQuery, VersionStatements,
        ident::Ident,
        query::{matching, save},
        version::ops::{VersionKind, bind_expected, parse_version},
    },
    value::version::Version,
};

impl VersionStatements for Sqlite {
    async fn version_read(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        values: Values<Self>,
    ) -> sqlx::Result<Option<(SqliteRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('`');
        let sql = format!(
            "SELECT *, CAST(`{version}` AS TEXT) AS lockkit_version, {} AS lockkit_kind FROM {table} WHERE {}",
            kind_of(version),
            matching(by, 1, '`', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), values.arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let kind = match row.try_get("lockkit_kind")? {
            "integer" => VersionKind::Number,
            "timestamp" => VersionKind::Timestamp,
            _ => VersionKind::Other,
        };
        let version = parse_version(kind, row.try_get("lockkit_version")?)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('`');
        let filter = matching(by, 1, '`', placeholder);
        let Values { mut arguments, .. } = values;
        let next = match expected {
            Version::Number(_) => format!("`{version}` + 1"),
            Version::Timestamp(_) => format!(
                "max(strftime('%Y-%m-%d %H:%M:%f', 'now'),
                     strftime('%Y-%m-%d %H:%M:%f', `{version}`, '+0.001 seconds'))"
            ),
        };
        let current = has_version(version, expected);
        bind_expected::<Self>(&mut arguments, expected)?;
        let sql = format!(
            "UPDATE {table} SET `{version}` = {next} WHERE {filter} AND {current}
             RETURNING CAST(`{version}` AS TEXT)"
        );
        // Reads all rows, so that an error of the commit is returned.
        let texts: Vec<Option<String>> = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_all(conn).await?;
        texts.into_iter().next().map(|it| parse_version(VersionKind::of(expected), it)).transpose()
    }

    async fn version_save(
        conn: &mut SqliteConnection,
        query: &SaveQuery,
        values: Values<Self>,
        expected: i64,
    ) -> sqlx::Result<bool> {
        let Values { mut arguments, types } = values;
        let sql = save(query, types.len() + 1, '`', placeholder);
        arguments.add(expected).map_err(sqlx::Error::Encode)?;
        let done = sqlx::query_with(AssertSqlSafe(sql), arguments).execute(conn).await?;
        Ok(done.rows_affected() > 0)
    }

    async fn version_delete(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> sqlx::Result<bool> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('`');
        let Values { mut arguments, .. } = values;
        let current = has_version(version, expected);
        bind_expected::<Self>(&mut arguments, expected)?;
        let sql = format!("DELETE FROM {table} WHERE {} AND {current}", matching(by, 1, '`', placeholder));
        let done = sqlx::query_with(AssertSqlSafe(sql), arguments).execute(conn).await?;
        Ok(done.rows_affected() > 0)
    }
}

/// Compares the column with the expected version, which is the next bound value. A timestamp is compared as text.
fn has_version(column: &Ident, expected: &Version) -> String {
    match expected {
        Version::Number(_) => format!("`{column}` = ?"),
        Version::Timestamp(_) => format!("CAST(`{column}` AS TEXT) = ?"),
    }
}

/// The type of the value in a row, because SQLite's columns have no fixed type. A text is a timestamp if SQLite can
/// parse it; a bump would turn any other text into NULL.
fn kind_of(version: &Ident) -> String {
    format!(
        "CASE typeof(`{version}`)
             WHEN 'integer' THEN 'integer'
             WHEN 'text' THEN
                 iif(`{version}` LIKE '____-%' AND julianday(`{version}`) IS NOT NULL, 'timestamp', 'other')
             ELSE 'other'
         END"
    )
}
