//! Versions of rows on PostgreSQL.

use sqlx::{Arguments, Column, PgConnection, Postgres, Row, TypeInfo, postgres::PgRow};

use super::{placeholder, pooler, typed};
use crate::{
    sql::{
        SaveQuery, Values, VersionQuery, VersionStatements,
        ident::Ident,
        query::{matching, save, timestamp_step},
        version::ops::{VersionKind, bind_expected, parse_version},
    },
    value::version::Version,
};

impl VersionStatements for Postgres {
    async fn version_read(
        conn: &mut PgConnection,
        query: &VersionQuery,
        values: Values<Self>,
    ) -> sqlx::Result<Option<(PgRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('"');
        let sql = format!(
            "SELECT *, \"{version}\"::text AS lockkit_version FROM {table} WHERE {} {}",
            matching(by, 1, '"', placeholder),
            typed(&values.types),
        );
        let Some(row) = pooler::fetch_all(conn, sql, values.arguments).await?.pop() else {
            return Ok(None);
        };
        let kind = match row.try_column(version.as_str())?.type_info().name() {
            "INT2" | "INT4" | "INT8" => VersionKind::Number,
            "TIMESTAMP" | "TIMESTAMPTZ" => VersionKind::Timestamp,
            _ => VersionKind::Other,
        };
        let version = parse_version(kind, row.try_get("lockkit_version")?)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut PgConnection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('"');
        let Values { mut arguments, types } = values;
        let (last, filter) = (types.len() + 1, matching(by, 1, '"', placeholder));
        let next = match expected {
            Version::Number(_) => format!("\"{version}\" + 1"),
            Version::Timestamp(_) => format!(
                "greatest(clock_timestamp(), \"{version}\"::timestamptz + interval '1 microsecond' * {})",
                timestamp_step(&format!("(extract(microseconds FROM \"{version}\")::bigint)")),
            ),
        };
        let current = has_version(version, expected, last);
        bind_expected::<Self>(&mut arguments, expected)?;
        let sql = format!(
            "UPDATE {table} SET \"{version}\" = {next} WHERE {filter} AND {current} RETURNING \"{version}\"::text {}",
            typed(&types),
        );
        let row = pooler::fetch_all(conn, sql, arguments).await?.pop();
        let text: Option<Option<String>> = row.map(|it| it.try_get(0)).transpose()?;
        text.map(|it| parse_version(VersionKind::of(expected), it)).transpose()
    }

    async fn version_save(
        conn: &mut PgConnection,
        query: &SaveQuery,
        values: Values<Self>,
        expected: i64,
    ) -> sqlx::Result<bool> {
        let Values { mut arguments, types } = values;
        let sql = format!("{} {}", save(query, types.len() + 1, '"', placeholder), typed(&types));
        arguments.add(expected).map_err(sqlx::Error::Encode)?;
        let done = pooler::execute(conn, sql, arguments).await?;
        Ok(done.rows_affected() > 0)
    }

    async fn version_delete(
        conn: &mut PgConnection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> sqlx::Result<bool> {
        let VersionQuery { table, by, version } = query;
        let table = table.quoted('"');
        let Values { mut arguments, types } = values;
        let last = types.len() + 1;
        let current = has_version(version, expected, last);
        bind_expected::<Self>(&mut arguments, expected)?;
        let filter = matching(by, 1, '"', placeholder);
        let sql = format!("DELETE FROM {table} WHERE {filter} AND {current} {}", typed(&types));
        let done = pooler::execute(conn, sql, arguments).await?;
        Ok(done.rows_affected() > 0)
    }
}

/// Compares the column with the expected version, bound as value number `mark`. A timestamp is compared as text, which
/// is exact; a float would not be.
fn has_version(column: &Ident, expected: &Version, mark: usize) -> String {
    match expected {
        Version::Number(_) => format!("\"{column}\" = ${mark}"),
        Version::Timestamp(_) => format!("\"{column}\"::text = ${mark}"),
    }
}
