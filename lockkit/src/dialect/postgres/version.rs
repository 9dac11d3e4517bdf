//! Versions of rows on PostgreSQL.

use sqlx::{
    Arguments, Column, PgConnection, Postgres, Row, TypeInfo,
    postgres::{PgArguments, PgRow},
};

use super::{placeholder, pooler};
use crate::{
    dialect::{
        SaveQuery, VersionOps, VersionQuery, parse_version,
        query::{matching, save, timestamp_step},
    },
    version::Version,
};

impl VersionOps for Postgres {
    async fn version_read(
        conn: &mut PgConnection,
        query: &VersionQuery,
        arguments: PgArguments,
    ) -> sqlx::Result<Option<(PgRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let sql = format!(
            "SELECT *, \"{version}\"::text AS lockkit_version FROM \"{table}\" WHERE {}",
            matching(by, 1, '"', placeholder),
        );
        let Some(row) = pooler::fetch_all(conn, sql, arguments).await?.pop() else {
            return Ok(None);
        };
        let text: String = row.try_get("lockkit_version")?;
        let is_number = row.try_column(version.as_str())?.type_info().name().starts_with("INT");
        let version = parse_version(is_number, text)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut PgConnection,
        query: &VersionQuery,
        mut arguments: PgArguments,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let (last, filter) = (arguments.len() + 1, matching(by, 1, '"', placeholder));
        let (next, current) = match expected {
            Version::Number(_) => (format!("\"{version}\" + 1"), format!("\"{version}\" = ${last}")),
            // The text is exact where a float would not be.
            Version::Timestamp(_) => (
                format!(
                    "greatest(clock_timestamp(), \"{version}\"::timestamptz + interval '1 microsecond' * {})",
                    timestamp_step(&format!("(extract(microseconds FROM \"{version}\")::bigint)")),
                ),
                format!("\"{version}\"::text = ${last}"),
            ),
        };
        match expected {
            Version::Number(number) => arguments.add(*number),
            Version::Timestamp(text) => arguments.add(text.clone()),
        }
        .map_err(sqlx::Error::Encode)?;
        let sql = format!(
            "UPDATE \"{table}\" SET \"{version}\" = {next} WHERE {filter} AND {current} RETURNING \"{version}\"::text"
        );
        let row = pooler::fetch_all(conn, sql, arguments).await?.pop();
        let text: Option<String> = row.map(|it| it.try_get(0)).transpose()?;
        text.map(|it| parse_version(matches!(expected, Version::Number(_)), it)).transpose()
    }

    async fn version_save(
        conn: &mut PgConnection,
        query: &SaveQuery,
        mut arguments: PgArguments,
        expected: i64,
    ) -> sqlx::Result<bool> {
        let sql = save(query, arguments.len() + 1, '"', placeholder);
        arguments.add(expected).map_err(sqlx::Error::Encode)?;
        let done = pooler::execute(conn, sql, arguments).await?;
        Ok(done.rows_affected() > 0)
    }
}
