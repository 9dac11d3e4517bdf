//! Versions of rows on SQLite.

use sqlx::{
    Arguments, AssertSqlSafe, Row, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::placeholder;
use crate::{
    dialect::{
        SaveQuery, VersionOps, VersionQuery, parse_version,
        query::{matching, save},
    },
    version::Version,
};

impl VersionOps for Sqlite {
    async fn version_read(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        arguments: SqliteArguments,
    ) -> sqlx::Result<Option<(SqliteRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let sql = format!(
            "SELECT *, CAST(`{version}` AS TEXT) AS lockkit_version, typeof(`{version}`) = 'integer' AS lockkit_number
             FROM `{table}` WHERE {}",
            matching(by, 1, '`', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let version = parse_version(row.try_get("lockkit_number")?, row.try_get("lockkit_version")?)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        mut arguments: SqliteArguments,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let filter = matching(by, 1, '`', placeholder);
        let (next, current) = match expected {
            Version::Number(number) => {
                arguments.add(*number).map_err(sqlx::Error::Encode)?;
                (format!("`{version}` + 1"), format!("`{version}` = ?"))
            }
            Version::Timestamp(text) => {
                arguments.add(text.clone()).map_err(sqlx::Error::Encode)?;
                (
                    format!(
                        "max(strftime('%Y-%m-%d %H:%M:%f', 'now'),
                             strftime('%Y-%m-%d %H:%M:%f', `{version}`, '+0.001 seconds'))"
                    ),
                    format!("CAST(`{version}` AS TEXT) = ?"),
                )
            }
        };
        let sql = format!(
            "UPDATE `{table}` SET `{version}` = {next} WHERE {filter} AND {current}
             RETURNING CAST(`{version}` AS TEXT)"
        );
        // All of the rows, so that the driver hears of a commit that fails.
        let texts: Vec<String> = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_all(conn).await?;
        texts.into_iter().next().map(|it| parse_version(matches!(expected, Version::Number(_)), it)).transpose()
    }

    async fn version_save(
        conn: &mut SqliteConnection,
        query: &SaveQuery,
        mut arguments: SqliteArguments,
        expected: i64,
    ) -> sqlx::Result<bool> {
        let sql = save(query, arguments.len() + 1, '`', placeholder);
        arguments.add(expected).map_err(sqlx::Error::Encode)?;
        let done = sqlx::query_with(AssertSqlSafe(sql), arguments).execute(conn).await?;
        Ok(done.rows_affected() > 0)
    }
}
