//! Row locks on MySQL and MariaDB.
//!
//! InnoDB locks what it reads, and the optimizer reads a small table completely even if an index serves. So a lock
//! names the indexes that EXPLAIN considered (`FORCE INDEX`) and stays correct whatever size the table has later. If an
//! index is gone, the server refuses the statement, and the plan is checked again.
//!
//! MySQL scans an index that has all selected columns on a table of a few rows, forced or not. So a lock that only
//! counts rows reads a small column that no index has. Where one index has every column, the values are joined to the
//! table one by one: not for text, because a column may consider two texts equal, nor with a limit or `skip_locked`.
//!
//! A sort would lock the table. So a queue without `by` forces an index that begins with the first column of the order
//! and whose plan has no `filesort`.

use sqlx::{
    AssertSqlSafe, MySql, MySqlConnection, Row, TypeInfo,
    mysql::{MySqlDatabaseError, MySqlRow},
};

use super::{
    bounded, holder, placeholder, shared,
    text::{for_each, named},
};
use crate::{
    policy::Wait,
    sql::{
        Access, By, Columns, Plan, RowQuery, RowStatements, Strength, Values,
        ident::Ident,
        query::{filter, order_and_limit},
    },
    value::{holder::LockHolder, key::Key},
};

impl RowStatements for MySql {
    fn row_text(query: &RowQuery, values: &Values<Self>) -> String {
        // The types are part of the text: an index on text cannot look up a number.
        let mut types: Vec<_> = values.types.iter().map(TypeInfo::name).collect();
        types.dedup();
        format!("{} /* {} */", selection(query, &Access::default(), ""), types.join(", "))
    }

    async fn row_plan(conn: &mut MySqlConnection, query: &RowQuery, values: &Values<Self>) -> sqlx::Result<Plan> {
        if query.by.is_empty() {
            return queue_plan(conn, query, values).await;
        }
        let Some(free) = explain(conn, query, values, &Access::default()).await? else {
            return Ok(Plan::NoRows);
        };
        if free.is_derived && is_view(conn, query).await? {
            return Ok(Plan::View);
        }
        if free.keys.is_empty() {
            return Ok(judged(free, Access::default()));
        }
        // The optimizer prefers a scan on a small table even where an index could serve. The index is forced even if
        // the optimizer would choose it today: the choice depends on the table's size, which can change.
        let keys: Vec<_> = free.keys.split(',').map(quoted).collect();
        let mut access = Access { force: format!(" FORCE INDEX ({})", keys.join(", ")), ..Access::default() };
        // MySQL scans an index that contains all selected columns instead of looking up several values in it.
        let many = query.by.iter().any(|it| it.values > 1);
        if many && query.columns == Columns::None {
            access.columns = Some(uncovered(conn, query).await?);
        }
        let forced = match explain(conn, query, values, &access).await {
            Ok(Some(forced)) => forced,
            Ok(None) => return Ok(Plan::NoRows),
            // The indexes of a view's table cannot be named.
            Err(err) if Self::row_plan_is_old(&err) => return Ok(judged(free, Access::default())),
            Err(err) => return Err(err),
        };
        // The index may contain all selected columns even so, and then the plan depends on the number of rows. A join
        // always looks the values up. It is not used for text, because a column may treat two different texts as equal,
        // nor where the order decides which rows are locked.
        let integers = values.types.iter().all(|it| it.name().contains("INT"));
        if many && forced.is_covered && integers && query.limit.is_none() && !query.skip_locked {
            let joined = Access { joined: true, columns: None, ..access.clone() };
            if explain(conn, query, values, &joined).await?.is_some_and(|it| !is_scan(&it)) {
                return Ok(Plan::Served(joined));
            }
        }
        Ok(judged(forced, access))
    }

    async fn row_lock(
        conn: &mut MySqlConnection,
        query: &RowQuery,
        values: Values<Self>,
        access: &Access,
    ) -> sqlx::Result<Vec<MySqlRow>> {
        let (before, hint) = bounded(query.wait);
        let strength = match query.strength {
            Strength::Share => shared(),
            Strength::Update | Strength::KeyChange => "FOR UPDATE".to_owned(),
        };
        let waiting = match query.wait {
            _ if query.skip_locked => "SKIP LOCKED",
            Wait::Never => "NOWAIT",
            Wait::AtMost(_) | Wait::Unbounded => "",
        };
        let sql = format!("{before}{} {strength} {waiting}", selection(query, access, &hint));
        sqlx::query_with(AssertSqlSafe(sql), values.arguments).fetch_all(conn).await
    }

    async fn row_holder(conn: &mut MySqlConnection, table: &Key) -> sqlx::Result<Option<LockHolder>> {
        // On MySQL a session that locks rows also has an intention lock on the table. MariaDB does not list these
        // locks.
        let (schema, table) = table.rsplit_once('.').map_or((None, &**table), |(schema, table)| (Some(schema), table));
        let look = named!(
            "SELECT DISTINCT CAST(p.ID AS SIGNED) AS id, CAST(p.USER AS CHAR) AS user, CAST(p.HOST AS CHAR) AS host
             FROM {sessions}
             LIMIT 2",
            sessions = for_each(
                "performance_schema.processlist AS p
                 JOIN performance_schema.threads AS t ON t.PROCESSLIST_ID = p.ID
                 JOIN performance_schema.data_locks AS l ON l.THREAD_ID = t.THREAD_ID
                     AND l.LOCK_TYPE = 'TABLE' AND l.LOCK_STATUS = 'GRANTED'
                 WHERE p.ID <> CONNECTION_ID()
                   AND l.OBJECT_SCHEMA = COALESCE(:schema, DATABASE()) AND l.OBJECT_NAME = :table",
                "information_schema.PROCESSLIST AS p WHERE COALESCE(:schema, :table) IS NULL"
            )
        );
        let rows = look.with(&[("schema", &schema.map(str::to_owned)), ("table", &table)]).fetch_all(conn).await?;
        match &*rows {
            [row] => holder(row).map(Some),
            _ => Ok(None),
        }
    }

    fn row_plan_is_old(err: &sqlx::Error) -> bool {
        // 1176: no such index. 1054: no such column.
        let number = err.as_database_error().and_then(|it| it.try_downcast_ref::<MySqlDatabaseError>());
        number.is_some_and(|it| matches!(it.number(), 1176 | 1054))
    }
}

/// How the server finds the rows.
struct Explained {
    access: String,
    /// The indexes that the optimizer considered, separated by commas.
    keys: String,
    /// Whether the index contains all selected columns.
    is_covered: bool,
    /// Whether all matching rows are read and sorted.
    is_sorted: bool,
    /// Whether something is computed first, such as the rows of a view.
    is_derived: bool,
    plan: String,
}

fn is_scan(step: &Explained) -> bool {
    matches!(&*step.access, "ALL" | "index")
}

fn judged(step: Explained, access: Access) -> Plan {
    if is_scan(&step) { Plan::Scan(step.plan) } else { Plan::Served(access) }
}

/// How the server finds the first rows in an order.
async fn queue_plan(conn: &mut MySqlConnection, query: &RowQuery, values: &Values<MySql>) -> sqlx::Result<Plan> {
    // Forces an index that delivers the order. Otherwise the optimizer would sort a small table, and lock all of its
    // rows.
    let keys: Vec<String> = sqlx::query_scalar(
        "SELECT CAST(INDEX_NAME AS CHAR) FROM information_schema.STATISTICS
         WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ? AND SEQ_IN_INDEX = 1 AND COLUMN_NAME = ?",
    )
    .bind(query.table.schema())
    .bind(query.table.name())
    .bind(query.order_by.first().map(Ident::as_str))
    .fetch_all(&mut *conn)
    .await?;
    // One index at a time: given all of them, the optimizer could choose one that does not deliver the order.
    for key in keys {
        let access = Access { force: format!(" FORCE INDEX ({})", quoted(&key)), ..Access::default() };
        match explain(conn, query, values, &access).await {
            Ok(Some(step)) if step.access != "ALL" && !step.is_sorted => return Ok(Plan::Served(access)),
            Ok(None) => return Ok(Plan::NoRows),
            // The index is invisible to the optimizer.
            Err(err) if !MySql::row_plan_is_old(&err) => return Err(err),
            Ok(Some(_)) | Err(_) => {}
        }
    }
    if is_view(conn, query).await? {
        return Ok(Plan::View);
    }
    let found = explain(conn, query, values, &Access::default()).await?;
    Ok(found.map_or(Plan::NoRows, |it| Plan::Scan(it.plan)))
}

async fn is_view(conn: &mut MySqlConnection, query: &RowQuery) -> sqlx::Result<bool> {
    let found: Option<bool> = sqlx::query_scalar(
        "SELECT TABLE_TYPE = 'VIEW' FROM information_schema.TABLES
         WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ?",
    )
    .bind(query.table.schema())
    .bind(query.table.name())
    .fetch_optional(conn)
    .await?;
    Ok(found.unwrap_or(false))
}

/// How the server finds the rows of the table. `None` if it does not need to read any.
async fn explain(
    conn: &mut MySqlConnection,
    query: &RowQuery,
    values: &Values<MySql>,
    access: &Access,
) -> sqlx::Result<Option<Explained>> {
    // EXPLAIN runs without the locking clause: MariaDB's EXPLAIN of a locking read by key waits for the row itself.
    let explain = AssertSqlSafe(format!("EXPLAIN FORMAT=TRADITIONAL {}", selection(query, access, "")));
    let explain = sqlx::query_with(explain, values.arguments.clone()).persistent(false);
    let mut found: Option<Explained> = None;
    let mut is_derived = false;
    for row in explain.fetch_all(conn).await? {
        let text = |column| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
        let (table, access, keys, extra) = (text("table")?, text("type")?, text("possible_keys")?, text("Extra")?);
        // Steps without a table name of their own are skipped: the values of a join are meant to be read one after
        // another, and for a view its tables are listed too.
        if table.is_empty() || table.starts_with('<') {
            is_derived |= table.starts_with("<derived");
            continue;
        }
        let has = |what| extra.split("; ").any(|it| it == what);
        let (is_covered, is_sorted) = (has("Using index"), has("Using filesort"));
        let plan = format!("type={access}, possible_keys={keys}, extra={extra}");
        let step = Explained { access, keys, is_covered, is_sorted, is_derived: false, plan };
        // A scan in any step decides.
        if found.as_ref().is_none_or(|it| is_scan(&step) && !is_scan(it)) {
            found = Some(step);
        }
    }
    Ok(found.map(|it| Explained { is_derived, ..it }))
}

/// A small column that is in no index. All columns if every column is in some index.
async fn uncovered(conn: &mut MySqlConnection, query: &RowQuery) -> sqlx::Result<String> {
    // MariaDB opens every table of the server unless both the database and the table are compared with values.
    let find = named!(
        "SELECT CAST(c.COLUMN_NAME AS CHAR)
         FROM information_schema.COLUMNS AS c
         WHERE c.TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND c.TABLE_NAME = :table
         AND c.EXTRA NOT LIKE '%GENERATED%'
         AND NOT EXISTS (
             SELECT 1 FROM information_schema.STATISTICS AS s
             WHERE s.TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND s.TABLE_NAME = :table
               AND s.COLUMN_NAME = c.COLUMN_NAME
         )
         ORDER BY
             c.NUMERIC_PRECISION IS NULL AND c.DATETIME_PRECISION IS NULL,
             COALESCE(c.CHARACTER_OCTET_LENGTH, 0),
             c.ORDINAL_POSITION
         LIMIT 1"
    );
    let find = find.scalar(&[("schema", &query.table.schema().map(str::to_owned)), ("table", &query.table.name())]);
    let column: Option<String> = find.fetch_optional(conn).await?;
    Ok(column.map_or_else(|| "r.*".to_owned(), |it| format!("r.{} AS locked", quoted(&it))))
}

fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

fn selection(query: &RowQuery, access: &Access, hint: &str) -> String {
    let Access { force, columns, joined, is_one_row: _ } = access;
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => columns.as_deref().unwrap_or("1 AS locked"),
    };
    let order = order_and_limit(query, '`');
    let table = format!("{} AS r{force}", query.table.quoted('`'));
    if !joined {
        return format!("SELECT {hint}{columns} FROM {table} {} {order}", filter(query, '`', placeholder));
    }
    let (mut values, mut matches) = (Vec::new(), Vec::new());
    for (number, By { column, values: count }) in query.by.iter().enumerate() {
        let all = vec!["SELECT ? AS lockkit_value"; *count].join(" UNION ALL ");
        values.push(format!("({all}) AS lockkit_{number} STRAIGHT_JOIN "));
        matches.push(format!("r.`{column}` = lockkit_{number}.lockkit_value"));
    }
    format!("SELECT {hint}{columns} FROM {}{table} WHERE {} {order}", values.concat(), matches.join(" AND "))
}
