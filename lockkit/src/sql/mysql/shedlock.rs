//! ShedLock's table on MySQL and MariaDB.

use sqlx::{MySql, MySqlConnection, Row as _, mysql::MySqlRow};

use super::text::{Grammar, Statement};
use crate::{
    lease::store::{Acquired, Answer, Claim, Grant, Release, Renewal},
    sql::{
        Driver, ShedLockStatements,
        shedlock::ops::{Columns, Place, RELEASED, Row, locked_by, tag},
        units::micros,
    },
    value::{error::Fault, fence::Fence, key::Key, token::Token},
};

/// Microseconds since 1970. Other programs may write a zero date, which is no number.
fn us(time: &str) -> String {
    format!("IFNULL(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {time}), 0)")
}

/// The server's clock in UTC, cut to the precision of the columns, as ShedLock writes it. It is constant during a
/// statement.
fn now(place: Place<'_>) -> String {
    format!("UTC_TIMESTAMP({})", 6 - place.step_us.ilog10())
}

/// Selects rows of [`Row`]. The text is converted because a column may have any character set.
fn select(place: Place<'_>, condition: &str) -> Statement {
    Statement::new(&format!(
        "SELECT CONVERT(l.name USING utf8mb4) AS name, CONVERT(l.locked_by USING utf8mb4) AS locked_by,
             {at} AS locked_at_us, {until} AS lock_until_us, {now} AS now_us
         FROM {table} AS l
         WHERE {condition}",
        at = us("l.locked_at"),
        until = us("l.lock_until"),
        now = us("UTC_TIMESTAMP(6)"),
        table = place.table.quoted('`'),
    ))
}

fn row(row: &MySqlRow) -> sqlx::Result<Row> {
    Ok(Row {
        name: row.try_get("name")?,
        locked_by: row.try_get("locked_by")?,
        locked_at_us: row.try_get("locked_at_us")?,
        lock_until_us: row.try_get("lock_until_us")?,
        now_us: row.try_get("now_us")?,
    })
}

/// Changes one row without waiting for it. `columns` of the row `l`, chosen by `condition`, are `mine` in the
/// assignments.
fn change(grammar: Grammar, place: Place<'_>, columns: &str, condition: &str, assignments: &str) -> Statement {
    Statement::new(&format!(
        "{at_once}
         UPDATE (
             SELECT l.name{columns} FROM {table} AS l FORCE INDEX (PRIMARY)
             WHERE l.name = :name AND {condition}
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS mine
         STRAIGHT_JOIN {table} AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
         SET {assignments}",
        at_once = grammar.at_once(),
        table = place.table.quoted('`'),
    ))
}

impl ShedLockStatements for MySql {
    async fn shedlock_columns(conn: &mut MySqlConnection, place: Place<'_>) -> sqlx::Result<Columns> {
        let table = place.table;
        // A TIMESTAMP is read and written in the time zone of the session. Java's sessions have the server's default.
        let rows: Vec<(String, i64, i64)> = sqlx::query_as(
            "SELECT LOWER(CAST(DATA_TYPE AS CHAR)), CAST(IFNULL(DATETIME_PRECISION, 0) AS SIGNED),
                 CAST(@@session.time_zone = @@global.time_zone
                     OR IFNULL(CONVERT_TZ('2026-01-15 12:00', @@global.time_zone, @@session.time_zone)
                               = '2026-01-15 12:00'
                         AND CONVERT_TZ('2026-07-15 12:00', @@global.time_zone, @@session.time_zone)
                             = '2026-07-15 12:00', 0)
                     AS SIGNED)
             FROM information_schema.COLUMNS
             WHERE TABLE_SCHEMA = IFNULL(?, DATABASE()) AND TABLE_NAME = ?
               AND COLUMN_NAME IN ('lock_until', 'locked_at')",
        )
        .bind(table.schema())
        .bind(table.name())
        .fetch_all(conn)
        .await?;
        if rows.len() < 2 {
            return Ok(Columns::Missing);
        }
        let mut decimals = 6;
        for (type_name, precision, is_same_zone) in &rows {
            if !["timestamp", "datetime"].contains(&&**type_name) {
                let hint =
                    "the times in ShedLock's table must be `timestamp(3)` or `datetime(3)`, or have more decimals";
                return Ok(Columns::Unfit { hint, found: format!("a time in `{table}` is a {type_name}") });
            }
            if type_name == "timestamp" && *is_same_zone == 0 {
                let hint = "ShedLock's table has columns of the type `timestamp`, and the sessions of this pool have \
                            another time zone than the server's default, which Java's sessions have, so each would \
                            misread the other's times: connect with `MySqlConnectOptions::timezone(None)`, or alter \
                            both columns to `datetime(3)` while no lock is held";
                return Ok(Columns::Unfit { hint, found: format!("`{table}` means another instant in this session") });
            }
            decimals = decimals.min(u32::try_from(*precision).unwrap_or(0));
        }
        Ok(Columns::with_decimals(decimals))
    }

    async fn shedlock_acquire(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        place: Place<'_>,
        claim: &Claim,
    ) -> sqlx::Result<Acquired> {
        let (own, by) = (tag(claim.token), locked_by(&claim.holder, &tag(claim.token)));
        let now = now(place);
        let (name, ttl) = (claim.key.as_str(), micros(claim.ttl));
        let found = select(place, "l.name = :name").with(&[("name", &name)]);
        let Some(found) = found.fetch_optional(&mut *conn).await? else {
            // The OK packet has the fence.
            let insert = Statement::new(&format!(
                "{at_once}
                 INSERT INTO {table} (name, lock_until, locked_at, locked_by)
                 VALUES (:name, TIMESTAMPADD(MICROSECOND, :ttl, {now}),
                     TIMESTAMPADD(MICROSECOND, LAST_INSERT_ID({now_us}), '1970-01-01'), :by)",
                at_once = grammar.at_once(),
                table = place.table.quoted('`'),
                now_us = us(&now),
            ));
            let insert = insert.with(&[("name", &name), ("ttl", &ttl), ("by", &by)]);
            return match insert.execute(conn).await {
                Ok(done) => Ok(Acquired::Granted(Grant::from(Fence::from(done.last_insert_id())))),
                // Another process was faster.
                Err(err) if Self::fault(&err) == Fault::Duplicate => Ok(Acquired::Held { free_in: None }),
                Err(err) => Err(err),
            };
        };
        let before = row(&found)?;
        if let Some(left) = before.in_the_way_of(claim.token) {
            return Ok(Acquired::Held { free_in: Some(left) });
        }
        before.check_fence(place)?;
        // Takes the row that was read, if it is still the same.
        let fence = format!(
            ", LAST_INSERT_ID(IF(RIGHT(l.locked_by, 33) = :own, {at}, GREATEST({now_us}, {at} + :step))) AS fence_us",
            at = us("l.locked_at"),
            now_us = us(&now),
        );
        let same = format!(
            "l.locked_by = :before AND {at} = :before_at
                 AND (l.lock_until <= {now} OR RIGHT(l.locked_by, 33) IN (:own, '{RELEASED}'))",
            at = us("l.locked_at"),
        );
        let until = format!("TIMESTAMPADD(MICROSECOND, :ttl, {now})");
        let is_own = before.token() == Some(claim.token);
        let until = if is_own { format!("GREATEST(l.lock_until, {until})") } else { until };
        let taken = format!(
            "l.locked_at = TIMESTAMPADD(MICROSECOND, mine.fence_us, '1970-01-01'),
             l.lock_until = {until}, l.locked_by = :by"
        );
        let take = change(grammar, place, &fence, &same, &taken).with(&[
            ("own", &own),
            ("step", &place.step_us),
            ("name", &name),
            ("before", &before.locked_by),
            ("before_at", &before.locked_at_us),
            ("ttl", &ttl),
            ("by", &by),
        ]);
        let done = take.execute(conn).await?;
        if done.rows_affected() == 0 {
            return Ok(Acquired::Held { free_in: None });
        }
        let fence = Fence::from(done.last_insert_id());
        Ok(Acquired::Granted(Grant::from(fence).after(before.previous(claim.token))))
    }

    async fn shedlock_look(conn: &mut MySqlConnection, place: Place<'_>, key: &Key) -> sqlx::Result<Option<Row>> {
        let held =
            format!("l.name = :name AND l.lock_until > {} AND RIGHT(l.locked_by, 33) <> '{RELEASED}'", now(place));
        let held = select(place, &held).with(&[("name", &key.as_str())]);
        held.fetch_optional(conn).await?.as_ref().map(row).transpose()
    }

    async fn shedlock_renew(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        place: Place<'_>,
        renewals: &[Renewal],
    ) -> sqlx::Result<Vec<Answer>> {
        let now = now(place);
        let held = format!("RIGHT(l.locked_by, 33) = :own AND l.lock_until > {now}");
        let longer = format!("l.lock_until = GREATEST(l.lock_until, TIMESTAMPADD(MICROSECOND, :ttl, {now}))");
        let renew = change(grammar, place, "", &held, &longer);
        let mut answers = Vec::with_capacity(renewals.len());
        for Renewal { key, token, ttl } in renewals {
            let renew = renew.with(&[("name", &key.as_str()), ("own", &tag(*token)), ("ttl", &micros(*ttl))]);
            let done = renew.execute(&mut *conn).await?;
            answers.push(answer(conn, place, key, *token, done.rows_affected() > 0).await?);
        }
        Ok(answers)
    }

    async fn shedlock_release(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        place: Place<'_>,
        release: &Release,
    ) -> sqlx::Result<Answer> {
        let Release { key, token, min_hold } = release;
        let now = now(place);
        // The time is that of ShedLock's own unlock, and never before `locked_at`. So a later grant to Java has no
        // earlier `locked_at` either, and fences rise across it.
        let least = ", TIMESTAMPADD(MICROSECOND, :min_hold, l.locked_at) AS least, :min_hold AS min_hold";
        let held = format!("RIGHT(l.locked_by, 33) = :own AND l.lock_until > {now}");
        let free = format!(
            "l.lock_until = GREATEST({now}, mine.least),
             l.locked_by = CONCAT(LEFT(l.locked_by, CHAR_LENGTH(l.locked_by) - 33),
                 IF(mine.min_hold > 0 AND mine.least > {now}, :nobody, '{RELEASED}'))"
        );
        let release = change(grammar, place, least, &held, &free).with(&[
            ("min_hold", &micros(*min_hold)),
            ("name", &key.as_str()),
            ("own", &tag(*token)),
            ("nobody", &tag(Token::nobody())),
        ]);
        let done = release.execute(&mut *conn).await?;
        answer(conn, place, key, *token, done.rows_affected() > 0).await
    }

    async fn shedlock_take_away(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        place: Place<'_>,
        row: &Row,
    ) -> sqlx::Result<bool> {
        let now = now(place);
        let same = format!("l.locked_by = :before AND {} = :before_at AND l.lock_until > {now}", us("l.locked_at"));
        let free = format!("l.lock_until = GREATEST({now}, l.locked_at), l.locked_by = :by");
        let take_away = change(grammar, place, "", &same, &free).with(&[
            ("name", &row.name),
            ("before", &row.locked_by),
            ("before_at", &row.locked_at_us),
            ("by", &locked_by(&row.locked_by, RELEASED)),
        ]);
        let done = take_away.execute(conn).await?;
        Ok(done.rows_affected() > 0)
    }

    async fn shedlock_list(
        conn: &mut MySqlConnection,
        place: Place<'_>,
        prefix: &str,
        limit: u32,
    ) -> sqlx::Result<Vec<Row>> {
        let held = format!(
            "CAST(CONVERT(LEFT(l.name, CHAR_LENGTH(:prefix)) USING utf8mb4) AS BINARY) = CAST(:prefix AS BINARY)
               AND l.lock_until > {} AND RIGHT(l.locked_by, 33) <> '{RELEASED}'
             ORDER BY CAST(CONVERT(l.name USING utf8mb4) AS BINARY)
             LIMIT :limit",
            now(place)
        );
        let rows = select(place, &held).with(&[("prefix", &prefix), ("limit", &limit)]);
        rows.fetch_all(conn).await?.iter().map(row).collect()
    }
}

/// The answer to a change that was or was not done. Nothing is changed if the lock is lost, or if another transaction
/// has the row locked.
async fn answer(
    conn: &mut MySqlConnection,
    place: Place<'_>,
    key: &Key,
    token: Token,
    is_done: bool,
) -> sqlx::Result<Answer> {
    if is_done {
        return Ok(Answer::Done);
    }
    let held = MySql::shedlock_look(conn, place, key).await?;
    Ok(if held.is_some_and(|it| it.token() == Some(token)) { Answer::Busy } else { Answer::Gone })
}
