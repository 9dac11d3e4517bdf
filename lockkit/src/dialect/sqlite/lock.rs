//! Row locks and named locks on SQLite.

use sqlx::{
    AssertSqlSafe, Row, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::{placeholder, take_write_lock};
use crate::{
    dialect::{
        Columns, NamedOps, RowOps, RowQuery,
        query::{matching, order_and_limit},
    },
    key::Key,
    policy::Wait,
};

impl RowOps for Sqlite {
    async fn row_lock(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        arguments: SqliteArguments,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let no_op = format!("DELETE FROM `{}` WHERE 0", query.table);
        take_write_lock(conn, query.wait, no_op).await?;
        sqlx::query_with(AssertSqlSafe(selection(query)), arguments).fetch_all(conn).await
    }

    async fn row_scan(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        arguments: &SqliteArguments,
    ) -> sqlx::Result<Option<String>> {
        // An EXPLAIN does not notice that another connection has made an index; a statement that runs does.
        let table = &query.table;
        sqlx::query(AssertSqlSafe(format!("SELECT 1 FROM `{table}` LIMIT 0"))).execute(&mut *conn).await?;
        let sql = format!("EXPLAIN QUERY PLAN {}", selection(query));
        let explain = sqlx::query_with(AssertSqlSafe(sql), arguments.clone()).persistent(false);
        let rows = explain.fetch_all(conn).await?;
        let steps = rows.iter().map(|it| it.try_get("detail")).collect::<sqlx::Result<Vec<String>>>()?;
        Ok(steps.iter().any(|it| it.starts_with("SCAN")).then(|| steps.join("; ")))
    }
}

fn selection(query: &RowQuery) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {columns} FROM `{}` AS r WHERE {} {}",
        query.table,
        matching(&query.by, 1, '`', placeholder),
        order_and_limit(query, '`'),
    )
}

impl NamedOps for Sqlite {
    async fn named_lock(conn: &mut SqliteConnection, _key: &Key, wait: Wait) -> sqlx::Result<bool> {
        take_write_lock(conn, wait, "DELETE FROM lockkit_lease WHERE 0".to_owned()).await?;
        Ok(true)
    }
}
