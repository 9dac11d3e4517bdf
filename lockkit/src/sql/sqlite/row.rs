//! Row locks on SQLite.
//!
//! The plan counts as it is. A scan of a partial index counts as an index if `by` has one column; a filter on further
//! ones does not show in the plan.

use sqlx::{AssertSqlSafe, Row, Sqlite, SqliteConnection, sqlite::SqliteRow};

use super::{placeholder, take_write_lock};
use crate::{
    policy::Wait,
    sql::{
        Access, Columns, Plan, RowQuery, RowStatements, Values,
        query::{filter, order_and_limit},
    },
    value::{holder::LockHolder, key::Key},
};

impl RowStatements for Sqlite {
    fn row_text(query: &RowQuery, _values: &Values<Self>) -> String {
        selection(query)
    }

    async fn row_plan(conn: &mut SqliteConnection, query: &RowQuery, values: &Values<Self>) -> sqlx::Result<Plan> {
        // An EXPLAIN does not detect an index that another connection has created; running a statement does.
        let look = format!("SELECT 1 FROM {} LIMIT 0", query.table.quoted('`'));
        sqlx::query(AssertSqlSafe(look)).execute(&mut *conn).await?;
        let is_view = sqlx::query_scalar(
            "SELECT type = 'view' FROM pragma_table_list(?1)
             WHERE ?2 IS NULL OR lower(schema) = lower(?2)
             ORDER BY schema <> 'temp', schema <> 'main'
             LIMIT 1",
        )
        .bind(query.table.name())
        .bind(query.table.schema())
        .fetch_optional(&mut *conn)
        .await?;
        if is_view.unwrap_or(false) {
            return Ok(Plan::View);
        }
        let sql = format!("EXPLAIN QUERY PLAN {}", selection(query));
        let explain = sqlx::query_with(AssertSqlSafe(sql), values.arguments.clone()).persistent(false);
        let rows = explain.fetch_all(&mut *conn).await?;
        let steps = rows.iter().map(|it| it.try_get("detail")).collect::<sqlx::Result<Vec<String>>>()?;
        for step in &steps {
            let is_scan = step.starts_with("SCAN");
            let is_served = match reads_partial_index(conn, query, step).await? {
                // An index that delivers the order allows the read to stop at the limit.
                _ if query.by.is_empty() => !step.contains("TEMP B-TREE"),
                // The values match all rows of a partial index. A further column would filter some of them out.
                true if is_scan && query.by.len() > 1 => false,
                // Other values are not in the partial index.
                true => return Ok(Plan::ServedOnce(Access::default())),
                false => !is_scan,
            };
            if !is_served {
                return Ok(Plan::Scan(steps.join("; ")));
            }
        }
        Ok(Plan::Served(Access::default()))
    }

    async fn row_lock(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        values: Values<Self>,
        _access: &Access,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let no_op = format!("DELETE FROM {} WHERE 0", query.table.quoted('`'));
        let select = selection(query);
        if query.wait == Wait::Unbounded {
            let sql = format!("{no_op}; {select}");
            return sqlx::query_with(AssertSqlSafe(sql), values.arguments).fetch_all(conn).await;
        }
        take_write_lock(conn, query.wait, no_op).await?;
        sqlx::query_with(AssertSqlSafe(select), values.arguments).fetch_all(conn).await
    }

    async fn row_holder(_conn: &mut SqliteConnection, _table: &Key) -> sqlx::Result<Option<LockHolder>> {
        Ok(None)
    }

    fn row_plan_is_old(_err: &sqlx::Error) -> bool {
        false
    }
}

/// Whether this step of a plan reads a partial index.
async fn reads_partial_index(conn: &mut SqliteConnection, query: &RowQuery, step: &str) -> sqlx::Result<bool> {
    let Some((_, index)) = step.split_once(" INDEX ") else {
        return Ok(false);
    };
    // The columns that are looked up follow the name.
    let name = index.rsplit_once(" (").map_or(index, |(name, _)| name);
    sqlx::query_scalar("SELECT count(*) > 0 FROM pragma_index_list(?1, ?2) WHERE name IN (?3, ?4) AND partial")
        .bind(query.table.name())
        .bind(query.table.schema())
        .bind(index)
        .bind(name)
        .fetch_one(conn)
        .await
}

fn selection(query: &RowQuery) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {columns} FROM {} AS r {} {}",
        query.table.quoted('`'),
        filter(query, '`', placeholder),
        order_and_limit(query, '`'),
    )
}
