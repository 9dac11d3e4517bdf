//! Row locks and named locks on SQLite.

use sqlx::{AssertSqlSafe, Row, Sqlite, SqliteConnection, sqlite::SqliteRow};

use super::{placeholder, take_write_lock};
use crate::{
    dialect::{
        Access, Columns, NamedOps, Plan, RowOps, RowQuery, Sharing, Values,
        query::{matching, order_and_limit},
    },
    error::LockHolder,
    key::Key,
    policy::Wait,
};

impl RowOps for Sqlite {
    fn row_text(query: &RowQuery, _values: &Values<Self>) -> String {
        selection(query)
    }

    async fn row_plan(conn: &mut SqliteConnection, query: &RowQuery, values: &Values<Self>) -> sqlx::Result<Plan> {
        // An EXPLAIN does not notice that another connection has made an index; a statement that runs does.
        let table = &query.table;
        sqlx::query(AssertSqlSafe(format!("SELECT 1 FROM `{table}` LIMIT 0"))).execute(&mut *conn).await?;
        let sql = format!("EXPLAIN QUERY PLAN {}", selection(query));
        let explain = sqlx::query_with(AssertSqlSafe(sql), values.arguments.clone()).persistent(false);
        let rows = explain.fetch_all(conn).await?;
        let steps = rows.iter().map(|it| it.try_get("detail")).collect::<sqlx::Result<Vec<String>>>()?;
        if steps.iter().any(|it| it.starts_with("SCAN")) {
            return Ok(Plan::Scan(steps.join("; ")));
        }
        Ok(Plan::Served(Access::default()))
    }

    async fn row_lock(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        values: Values<Self>,
        _access: &Access,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let no_op = format!("DELETE FROM `{}` WHERE 0", query.table);
        take_write_lock(conn, query.wait, no_op).await?;
        sqlx::query_with(AssertSqlSafe(selection(query)), values.arguments).fetch_all(conn).await
    }

    async fn row_holder(_conn: &mut SqliteConnection, _table: &Key) -> sqlx::Result<Option<LockHolder>> {
        Ok(None)
    }

    fn row_plan_is_old(_err: &sqlx::Error) -> bool {
        false
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
    async fn named_lock(conn: &mut SqliteConnection, _key: &Key, _sharing: Sharing, wait: Wait) -> sqlx::Result<bool> {
        take_write_lock(conn, wait, "DELETE FROM lockkit_lease WHERE 0".to_owned()).await?;
        Ok(true)
    }

    async fn named_holder(_conn: &mut SqliteConnection, _key: &Key) -> sqlx::Result<Option<LockHolder>> {
        Ok(None)
    }
}
