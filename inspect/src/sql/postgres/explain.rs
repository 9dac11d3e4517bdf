//! Who waits for whom on PostgreSQL. The first session that waits for a row holds a lock on its place in the table, and
//! the others wait for that lock, so the row can be read.

use std::collections::HashMap;

use lockkit::Key;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Result, Row, postgres::PgRow};

use crate::{Session, Waits, sql::columns::Columns, waits::sessions_of};

/// In a transaction and without names for statements, so that it works behind a pooler and leaves no setting behind.
pub(super) async fn waits(conn: &mut PgConnection, keys: &[Key]) -> Result<Waits> {
    let mut tx = conn.begin().await?;
    // Reading a row must not wait for the ALTER TABLE that is looked for.
    sqlx::raw_sql("SET LOCAL lock_timeout = '200ms'").execute(&mut *tx).await?;
    let names = names(&mut tx, keys).await?;
    // `waitstart` is there from PostgreSQL 14 on.
    let rows = sqlx::query(
        "SELECT
             w.pid::bigint AS waiter,
             (extract(epoch FROM clock_timestamp()
                 - coalesce((to_jsonb(w) ->> 'waitstart')::timestamptz, a.query_start)) * 1000)::bigint AS waits_ms,
             w.locktype,
             coalesce(w.relation, t.relation)::regclass::text AS table_name,
             format('(%s,%s)', coalesce(w.page, t.page), coalesce(w.tuple, t.tuple)) AS place,
             w.classid::bigint << 32 | w.objid::bigint AS number,
             pg_blocking_pids(w.pid)::bigint[] AS holders
         FROM pg_locks AS w
         JOIN pg_stat_activity AS a ON a.pid = w.pid
         LEFT JOIN LATERAL (
             SELECT t.relation, t.page, t.tuple
             FROM pg_locks AS t
             WHERE t.pid = w.pid AND t.locktype = 'tuple' AND t.granted AND w.locktype = 'transactionid'
             LIMIT 1
         ) AS t ON true
         WHERE NOT w.granted AND a.datname = current_database()
         ORDER BY waits_ms DESC, w.pid",
    );
    let rows = rows.persistent(false).fetch_all(&mut *tx).await?;
    let mut places = Places::default();
    let mut waits = Vec::new();
    for row in rows {
        let lock = lock(&mut tx, &row, &names, &mut places).await?;
        let mut holders: Vec<i64> = row.try_get("holders")?;
        // A group of parallel workers is named once for each.
        holders.sort_unstable();
        holders.dedup();
        waits.push(Columns(&row).wait(lock, holders)?);
    }
    let unseen = sqlx::query_scalar(
        "SELECT format('%I may not see what other users do: GRANT pg_monitor TO %I;', current_user, current_user)
         WHERE NOT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')",
    );
    let unseen = unseen.persistent(false).fetch_all(&mut *tx).await?;
    tx.rollback().await?;
    Ok(Waits { sessions: sessions(conn, &sessions_of(&waits)).await?, waits, unseen })
}

/// The rows that were read, by table and place. After one that cannot be read no other is tried: a lock on the table
/// would make each of them wait.
#[derive(Debug, Default)]
struct Places {
    read: HashMap<(String, String), Option<String>>,
    is_refused: bool,
}

/// What the numbers of advisory locks mean.
async fn names(conn: &mut PgConnection, keys: &[Key]) -> Result<HashMap<i64, String>> {
    let keys: Vec<&str> = keys.iter().map(Key::as_str).collect();
    let rows = sqlx::query(
        "SELECT
             ('x' || left(encode(sha256(convert_to('lockkit:' || kind || ':' || k, 'UTF8')), 'hex'), 16))
                 ::bit(64)::bigint,
             kind || ' lock ' || k
         FROM unnest($1::text[]) AS k, unnest(ARRAY['named', 'session']) AS kind",
    );
    let rows = rows.bind(keys).persistent(false).fetch_all(conn).await?;
    rows.iter().map(|it| Ok((it.try_get(0)?, it.try_get(1)?))).collect()
}

/// The lock that a session waits for, as people call it.
async fn lock(
    conn: &mut PgConnection,
    wait: &PgRow,
    names: &HashMap<i64, String>,
    places: &mut Places,
) -> Result<String> {
    let kind: String = wait.try_get("locktype")?;
    let table: Option<String> = wait.try_get("table_name")?;
    Ok(match (&*kind, table) {
        ("advisory", _) => {
            let number: i64 = wait.try_get("number")?;
            names.get(&number).cloned().unwrap_or_else(|| format!("advisory lock {number}"))
        }
        ("tuple" | "transactionid", Some(table)) => match row_at(conn, &table, wait.try_get("place")?, places).await? {
            Some(row) => format!("{table} ({row})"),
            None => format!("a row of {table}"),
        },
        ("transactionid", None) => "the end of a transaction".to_owned(),
        (kind, Some(table)) => format!("{kind} {table}"),
        (kind, None) => kind.to_owned(),
    })
}

/// The primary key of the row at this place, if the user may read it.
async fn row_at(conn: &mut PgConnection, table: &str, place: String, places: &mut Places) -> Result<Option<String>> {
    let at = (table.to_owned(), place);
    if let Some(row) = places.read.get(&at) {
        return Ok(row.clone());
    }
    if places.is_refused {
        return Ok(None);
    }
    // The server has quoted the name.
    let text = format!(
        "SELECT (
             SELECT string_agg(a.attname || '=' || coalesce(to_jsonb(r) ->> a.attname, 'NULL'), ', ' ORDER BY a.attnum)
             FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
             WHERE i.indrelid = $1::regclass AND i.indisprimary
         )
         FROM {table} AS r
         WHERE r.ctid = $2::tid"
    );
    let mut savepoint = conn.begin().await?;
    let row = sqlx::query_scalar(AssertSqlSafe(text)).bind(table).bind(&at.1).persistent(false);
    let row = match row.fetch_optional(&mut *savepoint).await {
        Ok(row) => row.flatten(),
        Err(sqlx::Error::Database(_)) => {
            places.is_refused = true;
            None
        }
        Err(err) => return Err(err),
    };
    savepoint.rollback().await?;
    places.read.insert(at, row.clone());
    Ok(row)
}

async fn sessions(conn: &mut PgConnection, ids: &[i64]) -> Result<Vec<Session>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    // The prepared transactions are one session, because the server does not tell which of them holds a lock.
    let rows = sqlx::query(
        "SELECT
             pid::bigint AS id,
             concat_ws(' ', usename || coalesce('@' || host(client_addr), ''), nullif(application_name, '')) AS name,
             (extract(epoch FROM clock_timestamp() - xact_start) * 1000)::bigint AS transaction_ms,
             coalesce(state, 'not visible') AS state,
             CASE WHEN state IS NULL THEN '' ELSE query END AS statement,
             format('SELECT pg_terminate_backend(%s);', pid) AS end_by
         FROM pg_stat_activity
         WHERE pid = ANY ($1)
         UNION ALL
         SELECT
             $2,
             'prepared: ' || string_agg(gid, ', ' ORDER BY prepared),
             (extract(epoch FROM clock_timestamp() - min(prepared)) * 1000)::bigint,
             'prepared',
             '',
             string_agg(format('ROLLBACK PREPARED %L;', gid), ' ' ORDER BY prepared)
         FROM pg_prepared_xacts
         WHERE database = current_database()
         HAVING count(*) > 0 AND $2 = ANY ($1)",
    );
    let rows = rows.bind(ids).bind(PREPARED).persistent(false).fetch_all(conn).await?;
    rows.iter().map(|row| Columns(row).session()).collect()
}

/// What the server calls the holder of a lock that belongs to no session.
const PREPARED: i64 = 0;
