//! ShedLock's table on SQLite, with times in milliseconds since 1970.

use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    lease::store::{Acquired, Answer, Claim, Grant, Release, Renewal},
    sql::{
        ShedLockStatements,
        shedlock::ops::{Columns, Place, RELEASED, Row, locked_by, tag},
        units::{fence, micros},
    },
    value::{key::Key, token::Token},
};

/// The clock in milliseconds. It is constant during a statement, and is read after the wait for the write lock.
const NOW_MS: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

/// Microseconds since 1970. Other programs may write a fraction, or more than a number of microseconds can be.
fn us(time: &str) -> String {
    format!("CAST({time} * 1000 AS INTEGER)")
}

/// Selects rows of [`Row`].
fn select(place: Place<'_>, condition: &str) -> String {
    format!(
        "SELECT name, locked_by, {at} AS locked_at_us, {until} AS lock_until_us, {NOW_MS} * 1000 AS now_us
         FROM {table}
         WHERE {condition}",
        at = us("locked_at"),
        until = us("lock_until"),
        table = place.table.quoted('`'),
    )
}

fn row(row: &SqliteRow) -> sqlx::Result<Row> {
    Ok(Row {
        name: row.try_get("name")?,
        locked_by: row.try_get("locked_by")?,
        locked_at_us: row.try_get("locked_at_us")?,
        lock_until_us: row.try_get("lock_until_us")?,
        now_us: row.try_get("now_us")?,
    })
}

/// Microseconds as milliseconds, rounded up.
fn millis(micros: i64) -> i64 {
    micros.saturating_add(999) / 1000
}

impl ShedLockStatements for Sqlite {
    async fn shedlock_columns(_conn: &mut SqliteConnection, _place: Place<'_>) -> sqlx::Result<Columns> {
        Ok(Columns::Fit { step_us: 1000 })
    }

    async fn shedlock_acquire(
        conn: &mut SqliteConnection,
        _grammar: (),
        place: Place<'_>,
        claim: &Claim,
    ) -> sqlx::Result<Acquired> {
        let found = sqlx::query(AssertSqlSafe(select(place, "name = ?"))).bind(claim.key.as_str());
        let before = found.fetch_optional(&mut *conn).await?.as_ref().map(row).transpose()?;
        if let Some(left) = before.as_ref().and_then(|it| it.in_the_way_of(claim.token)) {
            return Ok(Acquired::Held { free_in: Some(left) });
        }
        if let Some(before) = &before {
            before.check_fence(place)?;
        }
        // Takes the row that was read, if it is still the same.
        let sql = format!(
            "INSERT INTO {table} (name, lock_until, locked_at, locked_by) VALUES (?1, {NOW_MS} + ?4, {NOW_MS}, ?2)
             ON CONFLICT (name) DO UPDATE SET
                 locked_at = CASE WHEN substr(locked_by, -33) = ?3 THEN locked_at ELSE max({NOW_MS}, locked_at + 1) END,
                 lock_until = max(CASE WHEN substr(locked_by, -33) = ?3 THEN lock_until ELSE 0 END, {NOW_MS} + ?4),
                 locked_by = ?2
             WHERE locked_by = ?5 AND {at} = ?6
               AND (lock_until <= {NOW_MS} OR substr(locked_by, -33) IN (?3, '{RELEASED}'))
             RETURNING {at}",
            at = us("locked_at"),
            table = place.table.quoted('`'),
        );
        // Reads all rows: the statement commits when it ends.
        let granted: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(claim.key.as_str())
            .bind(locked_by(&claim.holder, &tag(claim.token)))
            .bind(tag(claim.token))
            .bind(millis(micros(claim.ttl)))
            .bind(before.as_ref().map(|it| it.locked_by.clone()))
            .bind(before.as_ref().map(|it| it.locked_at_us))
            .fetch_all(conn)
            .await?;
        let Some(granted) = granted.first() else { return Ok(Acquired::Held { free_in: None }) };
        let previous = before.and_then(|it| it.previous(claim.token));
        Ok(Acquired::Granted(Grant::from(fence(*granted)).after(previous)))
    }

    async fn shedlock_look(conn: &mut SqliteConnection, place: Place<'_>, key: &Key) -> sqlx::Result<Option<Row>> {
        let held = format!("name = ? AND lock_until > {NOW_MS} AND substr(locked_by, -33) <> '{RELEASED}'");
        let held = sqlx::query(AssertSqlSafe(select(place, &held))).bind(key.as_str());
        held.fetch_optional(conn).await?.as_ref().map(row).transpose()
    }

    async fn shedlock_renew(
        conn: &mut SqliteConnection,
        _grammar: (),
        place: Place<'_>,
        renewals: &[Renewal],
    ) -> sqlx::Result<Vec<Answer>> {
        let sql = format!(
            "UPDATE {table} SET lock_until = max(lock_until, {NOW_MS} + ?3)
             WHERE name = ?1 AND substr(locked_by, -33) = ?2 AND lock_until > {NOW_MS}",
            table = place.table.quoted('`'),
        );
        let mut answers = Vec::with_capacity(renewals.len());
        for Renewal { key, token, ttl } in renewals {
            let done = sqlx::query(AssertSqlSafe(sql.clone()))
                .bind(key.as_str())
                .bind(tag(*token))
                .bind(millis(micros(*ttl)))
                .execute(&mut *conn)
                .await?;
            answers.push(answer(done.rows_affected()));
        }
        Ok(answers)
    }

    async fn shedlock_release(
        conn: &mut SqliteConnection,
        _grammar: (),
        place: Place<'_>,
        release: &Release,
    ) -> sqlx::Result<Answer> {
        let sql = format!(
            "UPDATE {table}
             SET lock_until = max({NOW_MS}, locked_at + ?3),
                 locked_by = substr(locked_by, 1, length(locked_by) - 33)
                     || CASE WHEN ?3 > 0 AND locked_at + ?3 > {NOW_MS} THEN ?4 ELSE '{RELEASED}' END
             WHERE name = ?1 AND substr(locked_by, -33) = ?2 AND lock_until > {NOW_MS}",
            table = place.table.quoted('`'),
        );
        let done = sqlx::query(AssertSqlSafe(sql))
            .bind(release.key.as_str())
            .bind(tag(release.token))
            .bind(millis(micros(release.min_hold)))
            .bind(tag(Token::nobody()))
            .execute(conn)
            .await?;
        Ok(answer(done.rows_affected()))
    }

    async fn shedlock_take_away(
        conn: &mut SqliteConnection,
        _grammar: (),
        place: Place<'_>,
        row: &Row,
    ) -> sqlx::Result<bool> {
        let sql = format!(
            "UPDATE {table} SET lock_until = max({NOW_MS}, locked_at), locked_by = ?4
             WHERE name = ?1 AND locked_by = ?2 AND {at} = ?3 AND lock_until > {NOW_MS}",
            at = us("locked_at"),
            table = place.table.quoted('`'),
        );
        let done = sqlx::query(AssertSqlSafe(sql))
            .bind(row.name.as_str())
            .bind(row.locked_by.as_str())
            .bind(row.locked_at_us)
            .bind(locked_by(&row.locked_by, RELEASED))
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn shedlock_list(
        conn: &mut SqliteConnection,
        place: Place<'_>,
        prefix: &str,
        limit: u32,
    ) -> sqlx::Result<Vec<Row>> {
        let held = format!(
            "substr(name, 1, length(?1)) = ?1 AND lock_until > {NOW_MS} AND substr(locked_by, -33) <> '{RELEASED}'
             ORDER BY name
             LIMIT ?2"
        );
        let rows = sqlx::query(AssertSqlSafe(select(place, &held))).bind(prefix).bind(limit).fetch_all(conn).await?;
        rows.iter().map(row).collect()
    }
}

fn answer(rows: u64) -> Answer {
    if rows > 0 { Answer::Done } else { Answer::Gone }
}
