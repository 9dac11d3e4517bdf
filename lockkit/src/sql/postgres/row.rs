//! Row locks on PostgreSQL.
//!
//! A partial index serves if it has all rows that `by` selects. Only the planner knows that, and it scans a small table
//! whatever indexes exist. So if the catalogue has such an index and no other that serves, the plan is queried a second
//! time with `enable_seqscan` off, for this transaction and until the answer. The same holds for indexes with another
//! collation or type than the value's, of tables that inherit, and of partitions.
//!
//! For a queue without `by`, the server locks a row when it returns it, after the sort, so only the returned rows are
//! locked.

use sqlx::{
    Arguments, PgConnection, Postgres, Row,
    postgres::{PgRow, PgTypeInfo},
};

use super::{FIRST_OF_USERS, holder, lock_timeout, placeholder, pooler, typed};
use crate::{
    policy::Wait,
    sql::{
        Access, By, Columns, Plan, RowQuery, RowStatements, Strength, Values,
        query::{filter, order_and_limit},
    },
    value::{holder::LockHolder, key::Key},
};

impl RowStatements for Postgres {
    fn row_text(query: &RowQuery, values: &Values<Self>) -> String {
        selection(query, &values.types, "")
    }

    async fn row_plan(conn: &mut PgConnection, query: &RowQuery, values: &Values<Self>) -> sqlx::Result<Plan> {
        let known = catalogued(conn, query, values).await?;
        match known {
            Some(Catalogued { is_view: true, .. }) => return Ok(Plan::View),
            Some(Catalogued { is_served: true, is_unique, .. }) => {
                return Ok(Plan::Served(Access { is_one_row: is_unique, ..Access::default() }));
            }
            _ => {}
        }
        let plan = explain(conn, query, values).await?;
        let candidates = known.map(|it| it.candidates).unwrap_or_default();
        if !candidates.is_empty() {
            // Only the planner can judge these indexes, and it would scan a small table.
            let was: String = pooler::query(
                "WITH was AS MATERIALIZED (
                     SELECT current_setting('enable_seqscan') AS v
                 )
                 SELECT v, set_config('enable_seqscan', 'off', true) FROM was",
            )
            .fetch_one(&mut *conn)
            .await?
            .try_get(0)?;
            let forced = explain(conn, query, values).await?;
            pooler::query("SELECT set_config('enable_seqscan', $1, true)").bind(was).execute(&mut *conn).await?;
            if is_served_by(&candidates, &forced, query.by.is_empty()) {
                return Ok(Plan::ServedOnce(Access::default()));
            }
        }
        Ok(Plan::Scan(plan.join("; ")))
    }

    async fn row_lock(
        conn: &mut PgConnection,
        query: &RowQuery,
        values: Values<Self>,
        access: &Access,
    ) -> sqlx::Result<Vec<PgRow>> {
        if let Some(locked) = lock_free_row(conn, query, &values, access).await? {
            return Ok(locked);
        }
        let Values { mut arguments, types } = values;
        let strength = strength(query);
        let skip = if query.skip_locked { "SKIP LOCKED" } else { "" };
        let sql = match query.wait {
            Wait::Unbounded => format!("{} {strength} OF r {skip}", selection(query, &types, "")),
            Wait::Never => {
                let never = if query.skip_locked { skip } else { "NOWAIT" };
                format!("{} {strength} OF r {never}", selection(query, &types, ""))
            }
            Wait::AtMost(_) => {
                // One message: set the bound, lock, restore the old bound. The last filter depends on no row, so it is
                // evaluated once and first. It counts `locked`, which locks every row, and then restores the bound.
                let bound = arguments.len() + 1;
                let select = selection(query, &types, "bound, ");
                arguments.add(lock_timeout(query.wait)).map_err(sqlx::Error::Encode)?;
                format!(
                    "WITH was AS MATERIALIZED (
                         SELECT current_setting('lock_timeout') AS v
                     ), bound AS MATERIALIZED (
                         SELECT set_config('lock_timeout', ${bound}, true) FROM was
                     ), locked AS MATERIALIZED (
                         {select} {strength} OF r {skip}
                     ), restored AS MATERIALIZED (
                         SELECT set_config('lock_timeout', was.v, true) AS v
                         FROM was, (SELECT count(*) AS n FROM locked) AS c
                         WHERE c.n >= 0
                     )
                     SELECT locked.* FROM locked WHERE (SELECT v FROM restored) IS NOT NULL"
                )
            }
        };
        pooler::fetch_all(conn, sql, arguments).await
    }

    async fn row_holder(conn: &mut PgConnection, table: &Key) -> sqlx::Result<Option<LockHolder>> {
        // PostgreSQL marks a locked row in the table itself, so row locks are not listed. But a session that locks or
        // writes rows holds one of these table locks. A prepared transaction has no session.
        let name = table.split('.').map(|it| format!("\"{it}\"")).collect::<Vec<_>>().join(".");
        let rows = pooler::query(
            "SELECT
                 l.pid::bigint AS id,
                 a.usename::text AS user_name,
                 host(a.client_addr) AS host,
                 nullif(a.application_name, '') AS application,
                 (extract(epoch FROM clock_timestamp() - a.xact_start) * 1000000)::bigint AS age_us
             FROM (
                 SELECT DISTINCT pid
                 FROM pg_locks
                 WHERE locktype = 'relation' AND granted AND mode IN ('RowShareLock', 'RowExclusiveLock')
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                   AND relation = to_regclass($1)
                   AND pid IS DISTINCT FROM pg_backend_pid()
                 LIMIT 2
             ) AS l LEFT JOIN pg_stat_activity AS a USING (pid)",
        )
        .bind(name)
        .fetch_all(conn)
        .await?;
        match &*rows {
            [row] if row.try_get::<Option<i64>, _>("id")?.is_some() => holder(row).map(Some),
            _ => Ok(None),
        }
    }

    fn row_plan_is_old(_err: &sqlx::Error) -> bool {
        false
    }
}

fn strength(query: &RowQuery) -> &'static str {
    match query.strength {
        Strength::Share => "FOR SHARE",
        Strength::Update => "FOR NO KEY UPDATE",
        Strength::KeyChange => "FOR UPDATE",
    }
}

/// Locks the only row that matches, if it is free. A bound costs nothing then: setting and restoring it takes half as
/// long as the lock. `None` if the row is locked or missing, or there may be several.
async fn lock_free_row(
    conn: &mut PgConnection,
    query: &RowQuery,
    values: &Values<Postgres>,
    access: &Access,
) -> sqlx::Result<Option<Vec<PgRow>>> {
    let is_bounded = matches!(query.wait, Wait::AtMost(_)) && !query.skip_locked;
    let is_one_row = access.is_one_row && query.by.iter().all(|it| it.values == 1) && query.limit != Some(0);
    if !is_bounded || !is_one_row {
        return Ok(None);
    }
    // Counts the rows, because the unique index may have been dropped since the plan was made. The count is no
    // condition on a row, so it is evaluated first.
    let (table, filter) = (query.table.quoted('"'), filter(query, '"', placeholder));
    let sql = format!(
        "SELECT {} FROM {table} AS r {filter} AND (SELECT count(*) FROM {table} {filter}) = 1 {} OF r SKIP LOCKED {}",
        columns(query),
        strength(query),
        typed(&values.types),
    );
    let rows = pooler::fetch_all(conn, sql, values.arguments.clone()).await?;
    Ok(Some(rows).filter(|it| !it.is_empty()))
}

/// The catalogue's data on the table of a row lock.
///
/// The catalogue decides where it can, because a plan can mislead. The planner prefers a scan on a small table even
/// where an index could serve. An index that only serves the order, or a value that matches nothing, can hide a scan.
struct Catalogued {
    is_view: bool,
    is_served: bool,
    /// Whether at most one row has these values, because of a unique index.
    is_unique: bool,
    /// The indexes that only the planner can judge, named as in a plan.
    candidates: Vec<String>,
}

async fn catalogued(
    conn: &mut PgConnection,
    query: &RowQuery,
    values: &Values<Postgres>,
) -> sqlx::Result<Option<Catalogued>> {
    let mut first_value = 0;
    let mut by = Vec::new();
    for By { column, values: count } in &query.by {
        by.push((column.as_str(), values.types.get(first_value).map_or(0, known_type)));
        first_value += count;
    }
    let is_queue = by.is_empty();
    let (columns, types): (Vec<_>, Vec<_>) =
        if is_queue { query.order_by.iter().map(|it| (it.as_str(), 0)).unzip() } else { by.into_iter().unzip() };
    // An index serves if it looks up one of the columns; for a queue, if it has the order of the columns, forwards or
    // backwards. It does not serve if its collation or sort order is not the column's, nor if it cannot compare a value
    // of this type: the planner may convert that value, or else every row. Tables that inherit from this one have their
    // own indexes.
    let row = pooler::query(
        "SELECT
             t.relkind IN ('v', 'm'),
             whole AND coalesce(i.serve, false),
             whole AND coalesce(i.identify, false),
             ARRAY (
                 WITH RECURSIVE tree (id) AS (
                     SELECT t.oid UNION SELECT c.inhrelid FROM pg_inherits AS c JOIN tree ON c.inhparent = tree.id
                 )
                 SELECT quote_ident(x.relname)
                 FROM tree
                 JOIN pg_index AS i ON i.indrelid = tree.id
                 JOIN pg_class AS x ON x.oid = i.indexrelid
                 LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                 WHERE i.indisvalid AND (i.indpred IS NOT NULL OR a.attname = ANY ($2))
             )
         FROM pg_class AS t
         CROSS JOIN LATERAL (
             SELECT t.relkind = 'p' OR NOT EXISTS (SELECT FROM pg_inherits AS c WHERE c.inhparent = t.oid) AS whole
         ) AS w
         CROSS JOIN LATERAL (
             SELECT
                 bool_or(CASE
                     WHEN $3 THEN m.amname = 'btree'
                         AND (names[1:cardinality($2)] = $2 OR i.indisunique AND names = ($2)[1:cardinality(names)])
                         AND (
                             SELECT min(k.bits) = max(k.bits) AND max(k.bits) IN (0, 3)
                             FROM unnest(i.indoption) WITH ORDINALITY AS k (bits, n)
                             WHERE k.n <= cardinality($2)
                         )
                     ELSE names[1] = ANY ($2)
                 END) AS serve,
                 bool_or(NOT $3 AND i.indisunique AND i.indimmediate AND names <@ $2) AS identify
             FROM pg_index AS i
             JOIN pg_class AS x ON x.oid = i.indexrelid
             JOIN pg_am AS m ON m.oid = x.relam
             CROSS JOIN LATERAL (
                 SELECT array_agg(CASE WHEN k.collating = a.attcollation AND CASE
                     WHEN $3 THEN c.opcfamily IN (
                         SELECT d.opcfamily FROM pg_opclass AS d
                         WHERE d.opcmethod = c.opcmethod AND d.opcintype = c.opcintype AND d.opcdefault
                     )
                     ELSE EXISTS (
                         SELECT FROM unnest($2, $4) AS v (name, type)
                         JOIN pg_amop AS o ON o.amopfamily = c.opcfamily
                         JOIN pg_operator AS p ON p.oid = o.amopopr AND p.oprname = '='
                         JOIN pg_type AS y ON y.oid = o.amoprighttype
                         WHERE v.name = a.attname AND (v.type = 0 OR v.type = y.oid::bigint OR y.typtype = 'p')
                     )
                 END THEN a.attname::text END ORDER BY k.n) AS names
                 FROM unnest(i.indkey::int2[], i.indclass::oid[], i.indcollation::oid[])
                     WITH ORDINALITY AS k (number, class, collating, n)
                 JOIN pg_opclass AS c ON c.oid = k.class
                 LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number
                 WHERE k.n <= i.indnkeyatts
             ) AS columns
             WHERE i.indrelid = t.oid AND i.indisvalid AND i.indpred IS NULL
         ) AS i
         WHERE t.oid = to_regclass($1)",
    )
    .bind(query.table.quoted('"'))
    .bind(columns)
    .bind(is_queue)
    .bind(types)
    .fetch_optional(conn)
    .await?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(Catalogued {
        is_view: row.try_get(0)?,
        is_served: row.try_get(1)?,
        is_unique: row.try_get(2)?,
        candidates: row.try_get(3)?,
    }))
}

/// The number of a built-in type. Zero for another type, which is compared with itself.
fn known_type(type_info: &PgTypeInfo) -> i64 {
    type_info.oid().filter(|it| it.0 < FIRST_OF_USERS).map_or(0, |it| it.0.into())
}

/// The lines of the plan.
async fn explain(conn: &mut PgConnection, query: &RowQuery, values: &Values<Postgres>) -> sqlx::Result<Vec<String>> {
    let explain = format!("EXPLAIN (COSTS OFF) {}", Postgres::row_text(query, values));
    let rows = pooler::fetch_all(conn, explain, values.arguments.clone()).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Whether the plan reads only these indexes, and either looks rows up in each or needs all of its rows. For a queue,
/// the indexes must deliver the order.
fn is_served_by(indexes: &[String], plan: &[String], is_queue: bool) -> bool {
    let (mut reads, mut looks_up, mut filters) = (0, false, false);
    for step in plan.iter().map(|it| it.trim_start_matches([' ', '-', '>'])) {
        let is_index_scan = step.starts_with("Index ") && step.contains(" using ");
        let is_bitmap_scan = step.starts_with("Bitmap Index ");
        if is_index_scan || step.starts_with("Bitmap Heap ") {
            if filters && !looks_up {
                return false;
            }
            (looks_up, filters) = (false, false);
        }
        if is_index_scan || is_bitmap_scan {
            let mut names = indexes.iter();
            if !names.any(|it| step.contains(&format!(" using {it} on ")) || step.ends_with(&format!(" on {it}"))) {
                return false;
            }
            reads += 1;
        }
        let has = |what: &[&str]| what.iter().any(|it| step.starts_with(it));
        if has(&["Seq Scan", "Parallel Seq Scan"]) || is_queue && has(&["Sort", "Incremental Sort"]) {
            return false;
        }
        looks_up |= step.starts_with("Index Cond");
        filters |= step.starts_with("Filter");
    }
    reads > 0 && (looks_up || !filters)
}

fn columns(query: &RowQuery) -> &'static str {
    match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    }
}

/// The selection without its locking clause. `before` is joined to the table.
fn selection(query: &RowQuery, types: &[PgTypeInfo], before: &str) -> String {
    format!(
        "SELECT {} FROM {before}{} AS r {} {} {}",
        columns(query),
        query.table.quoted('"'),
        filter(query, '"', placeholder),
        order_and_limit(query, '"'),
        typed(types),
    )
}
