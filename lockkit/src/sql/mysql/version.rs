//! Versions of rows on MySQL and MariaDB.

use sqlx::{Arguments, AssertSqlSafe, Column, MySql, MySqlConnection, Row, TypeInfo, mysql::MySqlRow};

use super::placeholder;
use crate::{
    sql::{
        SaveQuery, Values, VersionQuery, VersionStatements,
        ident::Ident,
        query::{matching, save, timestamp_step},
        version::ops::{VersionKind, bind_expected, parse_version},
    },
    value::version::Version,
};

impl VersionStatements for MySql {
    async fn version_read(
        conn: &mut MySqlConnection,
        query: &VersionQuery,
        values: Values<Self>,
    ) -> sqlx::Result<Option<(MySqlRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('`');
        let sql = format!(
            "SELECT r.*, CAST(r.`{version}` AS CHAR) AS lockkit_version FROM {table} AS r WHERE {}",
            matching(by, 1, '`', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), values.arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let kind = match row.try_column(version.as_str())?.type_info().name() {
            // The driver's name for TINYINT(1).
            "BOOLEAN" => VersionKind::Number,
            name if name.contains("INT") => VersionKind::Number,
            "DATETIME" | "TIMESTAMP" => VersionKind::Timestamp,
            _ => VersionKind::Other,
        };
        let version = parse_version(kind, row.try_get("lockkit_version")?)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut MySqlConnection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('`');
        let filter = matching(by, 1, '`', placeholder);
        let Values { mut arguments, .. } = values;
        let again = arguments.clone();
        let next = match expected {
            Version::Number(_) => format!("`{version}` + 1"),
            Version::Timestamp(_) => {
                let step = timestamp_step(&format!("MICROSECOND(`{version}`)"));
                format!("GREATEST(UTC_TIMESTAMP(6), `{version}` + INTERVAL {step} MICROSECOND)")
            }
        };
        let current = has_version(version, expected);
        bind_expected::<Self>(&mut arguments, expected)?;
        let sql = format!("UPDATE {table} SET `{version}` = {next} WHERE {filter} AND {current}");
        let done = sqlx::query_with(AssertSqlSafe(sql), arguments).execute(&mut *conn).await?;
        match expected {
            _ if done.rows_affected() == 0 => Ok(None),
            Version::Number(number) => Ok(number.checked_add(1).map(Version::Number)),
            Version::Timestamp(_) => {
                let sql = format!("SELECT CAST(`{version}` AS CHAR) FROM {table} WHERE {filter}");
                let text = sqlx::query_scalar_with(AssertSqlSafe(sql), again).fetch_one(conn).await?;
                Ok(Some(Version::Timestamp(text)))
            }
        }
    }

    async fn version_save(
        conn: &mut MySqlConnection,
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
        conn: &mut MySqlConnection,
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
        Version::Timestamp(_) => format!("CAST(`{column}` AS CHAR) = ?"),
    }
}
