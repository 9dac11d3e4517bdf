//! ShedLock's table on PostgreSQL.

use sqlx::{AssertSqlSafe, PgConnection, Postgres, Row as _, postgres::PgRow};

use super::pooler::query;
use crate::{
    lease::store::{Acquired, Answer, Claim, Grant, Release, Renewal},
    sql::{
        ShedLockStatements,
        shedlock::ops::{Columns, Place, RELEASED, Row, locked_by, tag},
        units::{fence, micros},
    },
    value::{key::Key, token::Token},
};

/// The clock, as ShedLock writes it: UTC in a column without a time zone. Read once for each statement.
const CLOCK: &str = "clock AS MATERIALIZED (SELECT timezone('utc', clock_timestamp()) AS now)";

/// Microseconds since 1970, at most `LAST_US`: other programs may write infinite times, which are no numbers.
fn us(time: &str) -> String {
    let finite = format!("least(greatest({time}, timestamp '1970-01-01'), timestamp '9999-12-31')");
    format!("(extract(epoch FROM {finite}) * 1000000)::bigint")
}

/// The columns of [`Row`].
fn columns() -> String {
    format!(
        "l.name::text AS name, l.locked_by::text AS locked_by, {} AS locked_at_us, {} AS lock_until_us, {} AS now_us",
        us("l.locked_at"),
        us("l.lock_until"),
        us("clock.now")
    )
}

fn row(row: &PgRow) -> sqlx::Result<Row> {
    Ok(Row {
        name: row.try_get("name")?,
        locked_by: row.try_get("locked_by")?,
        locked_at_us: row.try_get("locked_at_us")?,
        lock_until_us: row.try_get("lock_until_us")?,
        now_us: row.try_get("now_us")?,
    })
}

/// The answer of a row that says whether something was done, and whether the token still holds the lock.
fn scoped(row: &PgRow) -> sqlx::Result<Answer> {
    Ok(match (row.try_get("done")?, row.try_get("held")?) {
        (true, _) => Answer::Done,
        (false, true) => Answer::Busy,
        (false, false) => Answer::Gone,
    })
}

impl ShedLockStatements for Postgres {
    async fn shedlock_columns(conn: &mut PgConnection, place: Place<'_>) -> sqlx::Result<Columns> {
        let table = place.table;
        let rows = query(
            "SELECT format_type(atttypid, NULL) AS type, atttypmod FROM pg_attribute
             WHERE attrelid = to_regclass($1) AND attname IN ('lock_until', 'locked_at') AND NOT attisdropped",
        )
        .bind(table.quoted('"'))
        .fetch_all(conn)
        .await?;
        if rows.len() < 2 {
            return Ok(Columns::Missing);
        }
        let mut decimals = 6;
        for row in &rows {
            let type_name: String = row.try_get("type")?;
            if type_name != "timestamp without time zone" {
                let hint = "the times in ShedLock's table must be `timestamp` without a time zone, as ShedLock \
                            documents it: alter both columns to `timestamp USING … AT TIME ZONE 'UTC'` while no lock \
                            is held";
                return Ok(Columns::Unfit { hint, found: format!("a time in `{table}` is a {type_name}") });
            }
            // -1 stands for the greatest precision.
            decimals = decimals.min(u32::try_from(row.try_get::<i32, _>("atttypmod")?).unwrap_or(6));
        }
        Ok(Columns::with_decimals(decimals))
    }

    async fn shedlock_acquire(
        conn: &mut PgConnection,
        _grammar: (),
        place: Place<'_>,
        claim: &Claim,
    ) -> sqlx::Result<Acquired> {
        let sql = format!(
            "WITH {CLOCK}, free AS MATERIALIZED (
                 SELECT l.name, l.locked_by, l.locked_at, l.lock_until, right(l.locked_by, 33) = $3 AS own
                 FROM {table} AS l CROSS JOIN clock
                 WHERE l.name = $1 AND (l.lock_until <= clock.now OR right(l.locked_by, 33) IN ($3, '{RELEASED}'))
                     AND l.locked_at < timestamp '9999-12-31'
                 FOR UPDATE OF l SKIP LOCKED
             ), taken AS (
                 UPDATE {table} AS l
                 SET locked_at = CASE WHEN free.own THEN l.locked_at
                         ELSE greatest(clock.now, l.locked_at + $5::bigint * interval '1 microsecond') END,
                     lock_until = greatest(
                         CASE WHEN free.own THEN l.lock_until END, clock.now + $4::bigint * interval '1 microsecond'),
                     locked_by = $2
                 FROM free CROSS JOIN clock
                 WHERE l.name = free.name
                 RETURNING {granted} AS fence, free.name, free.locked_by, free.locked_at, free.lock_until
             ), made AS (
                 INSERT INTO {table} AS l (name, lock_until, locked_at, locked_by)
                 SELECT $1, clock.now + $4::bigint * interval '1 microsecond', clock.now, $2 FROM clock
                 WHERE NOT EXISTS (SELECT FROM {table} WHERE name = $1)
                 ON CONFLICT DO NOTHING
                 RETURNING {granted} AS fence, l.name, '' AS locked_by, l.locked_at, l.lock_until
             )
             SELECT l.fence, {columns} FROM taken AS l CROSS JOIN clock
             UNION ALL
             SELECT l.fence, {columns} FROM made AS l CROSS JOIN clock
             UNION ALL
             SELECT NULL, {columns} FROM {table} AS l CROSS JOIN clock
             WHERE l.name = $1 AND NOT EXISTS (SELECT FROM taken) AND NOT EXISTS (SELECT FROM made)",
            table = place.table.quoted('"'),
            granted = us("l.locked_at"),
            columns = columns(),
        );
        let found = query(AssertSqlSafe(sql))
            .bind(claim.key.as_str())
            .bind(locked_by(&claim.holder, &tag(claim.token)))
            .bind(tag(claim.token))
            .bind(micros(claim.ttl))
            .bind(place.step_us)
            .fetch_optional(conn)
            .await?;
        let Some(found) = found else {
            // Another process inserted the row concurrently.
            return Ok(Acquired::Held { free_in: None });
        };
        let before = row(&found)?;
        if let Some(granted) = found.try_get("fence")? {
            return Ok(Acquired::Granted(Grant::from(fence(granted)).after(before.previous(claim.token))));
        }
        if let Some(left) = before.in_the_way_of(claim.token) {
            return Ok(Acquired::Held { free_in: Some(left) });
        }
        before.check_fence(place)?;
        // A free row is locked by another transaction.
        Ok(Acquired::Held { free_in: None })
    }

    async fn shedlock_look(conn: &mut PgConnection, place: Place<'_>, key: &Key) -> sqlx::Result<Option<Row>> {
        let sql = format!(
            "WITH {CLOCK} SELECT {columns} FROM {table} AS l CROSS JOIN clock
             WHERE l.name = $1 AND l.lock_until > clock.now AND right(l.locked_by, 33) <> '{RELEASED}'",
            table = place.table.quoted('"'),
            columns = columns(),
        );
        query(AssertSqlSafe(sql)).bind(key.as_str()).fetch_optional(conn).await?.as_ref().map(row).transpose()
    }

    async fn shedlock_renew(
        conn: &mut PgConnection,
        _grammar: (),
        place: Place<'_>,
        renewals: &[Renewal],
    ) -> sqlx::Result<Vec<Answer>> {
        let names: Vec<_> = renewals.iter().map(|it| it.key.as_str()).collect();
        let tags: Vec<_> = renewals.iter().map(|it| tag(it.token)).collect();
        let ttls: Vec<_> = renewals.iter().map(|it| micros(it.ttl)).collect();
        let sql = format!(
            "WITH {CLOCK}, asked AS MATERIALIZED (
                 SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[])
                     WITH ORDINALITY AS a (name, tag, ttl, number)
             ), mine AS MATERIALIZED (
                 SELECT l.name, a.ttl, a.number
                 FROM {table} AS l
                 JOIN asked AS a ON l.name = a.name AND right(l.locked_by, 33) = a.tag
                 CROSS JOIN clock
                 WHERE l.lock_until > clock.now
                 ORDER BY l.name
                 FOR NO KEY UPDATE OF l SKIP LOCKED
             ), renewed AS (
                 UPDATE {table} AS l
                 SET lock_until = greatest(l.lock_until, clock.now + mine.ttl * interval '1 microsecond')
                 FROM mine CROSS JOIN clock
                 WHERE l.name = mine.name
                 RETURNING mine.number
             )
             SELECT r.number IS NOT NULL AS done, l.name IS NOT NULL AS held
             FROM asked AS a
             CROSS JOIN clock
             LEFT JOIN renewed AS r USING (number)
             LEFT JOIN {table} AS l ON l.name = a.name AND right(l.locked_by, 33) = a.tag AND l.lock_until > clock.now
             ORDER BY a.number",
            table = place.table.quoted('"'),
        );
        let tags: Vec<_> = tags.iter().map(String::as_str).collect();
        let rows = query(AssertSqlSafe(sql)).bind(names).bind(tags).bind(ttls).fetch_all(conn).await?;
        rows.iter().map(scoped).collect()
    }

    async fn shedlock_release(
        conn: &mut PgConnection,
        _grammar: (),
        place: Place<'_>,
        release: &Release,
    ) -> sqlx::Result<Answer> {
        // The time is that of ShedLock's own unlock, and never before `locked_at`. So a later grant to Java has no
        // earlier `locked_at` either, and fences rise across it.
        let sql = format!(
            "WITH {CLOCK}, mine AS MATERIALIZED (
                 SELECT l.name, l.locked_at + $3::bigint * interval '1 microsecond' AS least
                 FROM {table} AS l CROSS JOIN clock
                 WHERE l.name = $1 AND right(l.locked_by, 33) = $2 AND l.lock_until > clock.now
                 FOR UPDATE OF l SKIP LOCKED
             ), freed AS (
                 UPDATE {table} AS l
                 SET lock_until = greatest(clock.now, mine.least),
                     locked_by = left(l.locked_by, -33)
                         || CASE WHEN $3::bigint > 0 AND mine.least > clock.now THEN $4 ELSE '{RELEASED}' END
                 FROM mine CROSS JOIN clock
                 WHERE l.name = mine.name
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM freed) AS done,
                 EXISTS (
                     SELECT FROM {table} AS l CROSS JOIN clock
                     WHERE l.name = $1 AND right(l.locked_by, 33) = $2 AND l.lock_until > clock.now
                 ) AS held",
            table = place.table.quoted('"'),
        );
        let done = query(AssertSqlSafe(sql))
            .bind(release.key.as_str())
            .bind(tag(release.token))
            .bind(micros(release.min_hold))
            .bind(tag(Token::nobody()))
            .fetch_one(conn)
            .await?;
        scoped(&done)
    }

    async fn shedlock_take_away(
        conn: &mut PgConnection,
        _grammar: (),
        place: Place<'_>,
        row: &Row,
    ) -> sqlx::Result<bool> {
        let sql = format!(
            "WITH {CLOCK}, mine AS MATERIALIZED (
                 SELECT l.name FROM {table} AS l CROSS JOIN clock
                 WHERE l.name = $1 AND l.locked_by = $2 AND {locked_at_us} = $3 AND l.lock_until > clock.now
                 FOR UPDATE OF l SKIP LOCKED
             )
             UPDATE {table} AS l SET lock_until = greatest(clock.now, l.locked_at), locked_by = $4
             FROM mine CROSS JOIN clock
             WHERE l.name = mine.name",
            table = place.table.quoted('"'),
            locked_at_us = us("l.locked_at"),
        );
        let done = query(AssertSqlSafe(sql))
            .bind(row.name.as_str())
            .bind(row.locked_by.as_str())
            .bind(row.locked_at_us)
            .bind(locked_by(&row.locked_by, RELEASED))
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn shedlock_list(
        conn: &mut PgConnection,
        place: Place<'_>,
        prefix: &str,
        limit: u32,
    ) -> sqlx::Result<Vec<Row>> {
        let sql = format!(
            "WITH {CLOCK} SELECT {columns} FROM {table} AS l CROSS JOIN clock
             WHERE left(l.name, char_length($1)) = $1 AND l.lock_until > clock.now
               AND right(l.locked_by, 33) <> '{RELEASED}'
             ORDER BY l.name COLLATE \"C\"
             LIMIT $2",
            table = place.table.quoted('"'),
            columns = columns(),
        );
        let rows = query(AssertSqlSafe(sql)).bind(prefix).bind(i64::from(limit)).fetch_all(conn).await?;
        rows.iter().map(row).collect()
    }
}
