//! Leases on SQLite.
//!
//! SQLite cannot return the columns as they were before an UPDATE. So a claim first reads the previous holder, and
//! takes the row only if its fence is unchanged. While the last claims of a pool found leases that were new or
//! released, which have no holder to tell of, a statement that takes only these goes first: one request instead of two.
//! There is one writer at a time, so a renewal cuts an expiry that was written ahead of the clock in the same
//! statement.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{
    Arguments, Row, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::NOW;
use crate::{
    lease::{
        life::state::Pin,
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Previous, Release, Renewal},
    },
    sql::{
        Driver, LeaseStatements,
        lease::{
            FENCES, Found, HeldRow, LastClaims, PAGE, granted, lease_acquire_in_order, leases_found, prefix_end,
            previous, releases_json, ttls_json,
        },
        statement::statement,
        units::{duration, fence, micros},
    },
    value::{error::Fault, key::Key, token::Token},
};

/// Assigns the expiry of a grant or renewal: the ttl from now, or the old expiry if that is later and was not written
/// ahead of the clock.
fn expires(ttl: &str) -> String {
    let until = format!("min(expires_us, coalesce({NOW} + ttl_us, expires_us))");
    format!(
        "expires_us = max({until}, {NOW} + {ttl}),
         ttl_us = CASE WHEN {until} > {NOW} + {ttl} THEN ttl_us ELSE {ttl} END"
    )
}

/// As [`expires`], of a renewal, which also corrects a time of the grant that was written ahead of the clock.
fn lives(ttl: &str) -> String {
    format!(
        "{expires},
         acquired_us = acquired_us - max(0, coalesce(expires_us - ttl_us - {NOW}, 0))",
        expires = expires(ttl)
    )
}

/// Ends an INSERT of claims: it takes also leases that were released.
fn or_released() -> String {
    format!(
        "ON CONFLICT (name) DO UPDATE SET
             fence = max(fence + {FENCES}, {NOW}), acquired_us = {NOW}, renewals = 0,
             token = excluded.token, holder = excluded.holder, expires_us = excluded.expires_us,
             ttl_us = excluded.ttl_us
         WHERE expires_us <= {NOW} AND token IS NULL"
    )
}

/// Whether the last holder of the row's lease did not release it: a token without an owner begins with eight zeros.
const KEPT: &str = "token >= x'0000000000000001'";

/// The rest of the least holding time.
fn left(min_hold: &str) -> String {
    format!("({min_hold} - max(0, {NOW} - acquired_us))")
}

/// The row of a lease before it is acquired.
struct Before {
    holder: String,
    fence: i64,
    token: Option<Vec<u8>>,
    expires_us: i64,
}

impl LeaseStatements for Sqlite {
    const BATCHES_NEW: bool = true;

    async fn lease_acquire(
        conn: &mut SqliteConnection,
        _grammar: (),
        claim: &Claim,
        last: &LastClaims,
    ) -> sqlx::Result<Acquired> {
        if last.were_of_released() {
            let text = statement!(
                "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
                 VALUES (?1, ?2, ?3, {NOW}, {NOW}, {NOW} + ?4, ?4)
                 {or_released}
                 RETURNING fence",
                or_released = or_released()
            );
            let taken: Vec<i64> = sqlx::query_scalar_with(text, room_for(4))
                .bind(claim.key.as_str())
                .bind(claim.token.as_bytes().as_slice())
                .bind(&*claim.holder)
                .bind(micros(claim.ttl))
                .fetch_all(&mut *conn)
                .await?;
            if let Some(number) = taken.first() {
                return Ok(Acquired::Granted(granted(fence(*number))));
            }
            last.note(false);
        }
        // Reads the previous holder. The claim compares its fence, which detects a claim of another process in between.
        let before: Option<Before> =
            sqlx::query_as("SELECT holder, fence, token, expires_us FROM lockkit_lease WHERE name = ?1")
                .bind(claim.key.as_str())
                .fetch_optional(&mut *conn)
                .await?
                .map(|(holder, fence, token, expires_us)| Before { holder, fence, token, expires_us });
        let text = statement!(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
             VALUES (?1, ?2, ?3, {NOW}, {NOW}, {NOW} + ?4, ?4)
             ON CONFLICT (name) DO UPDATE SET
                 fence = CASE WHEN token IS ?2 THEN fence ELSE max(fence + {FENCES}, {NOW}) END,
                 acquired_us = CASE WHEN token IS ?2 THEN acquired_us ELSE {NOW} END,
                 renewals = CASE WHEN token IS ?2 THEN renewals + 1 ELSE 0 END,
                 token = ?2, holder = ?3, {expires}
             WHERE (expires_us <= {NOW} AND fence = ?5) OR token IS ?2
             RETURNING fence, {NOW} - ?6 AS expired_us",
            expires = expires("?4")
        );
        let rows = sqlx::query_with(text, room_for(6))
            .bind(claim.key.as_str())
            .bind(claim.token.as_bytes().as_slice())
            .bind(&*claim.holder)
            .bind(micros(claim.ttl))
            .bind(before.as_ref().map(|it| it.fence))
            .bind(before.as_ref().map_or(0, |it| it.expires_us))
            // Reads all rows: the statement commits when it ends, and a driver that stops at the first row misses an
            // error of the commit.
            .fetch_all(&mut *conn)
            .await?;
        if let Some(row) = rows.first() {
            last.note(before.as_ref().is_none_or(|it| it.token.is_none()));
            let fence = fence(row.try_get("fence")?);
            let token = claim.token.as_bytes().as_slice();
            let previous = match before.filter(|it| it.token.as_deref() != Some(token)) {
                Some(Before { holder, fence, token, .. }) => {
                    previous(holder, fence, token.as_deref(), row.try_get("expired_us")?)
                }
                None => None,
            };
            return Ok(Acquired::Granted(granted(fence).after(previous)));
        }
        let held = Self::lease_look(conn, &claim.key).await?;
        Ok(Acquired::Held { free_in: held.map(|it| it.info.expires_in) })
    }

    async fn lease_acquire_all(
        conn: &mut SqliteConnection,
        grammar: (),
        claims: &[Claim],
    ) -> sqlx::Result<AcquiredAll> {
        lease_acquire_in_order::<Self>(conn, grammar, claims).await
    }

    async fn lease_acquire_each(
        conn: &mut SqliteConnection,
        _grammar: (),
        claims: &[Claim],
    ) -> sqlx::Result<Vec<Option<Acquired>>> {
        let Some(Claim { holder, .. }) = claims.first() else { return Ok(Vec::new()) };
        let asked = ttls_json(claims.iter().map(|it| (&it.key, &it.token, it.ttl)));
        // Leases that were released, or have no row. The others may have a previous holder.
        let taken = sqlx::query_as(statement!(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
             SELECT CAST(unhex(value ->> 0) AS TEXT), unhex(value ->> 1), ?2, {NOW}, {NOW},
                 {NOW} + (value ->> 2), value ->> 2
             FROM json_each(?1)
             WHERE true
             {or_released}
             RETURNING name, fence",
            or_released = or_released()
        ));
        let taken: Vec<(String, i64)> = taken.bind(&asked).bind(&**holder).fetch_all(&mut *conn).await?;
        let grant = |(name, number)| (name, Acquired::Granted(granted(fence(number))));
        let mut answers: HashMap<_, _> = taken.into_iter().map(grant).collect();
        if answers.len() < claims.len() {
            let held = sqlx::query_as(statement!(
                "SELECT l.name, l.expires_us - {NOW}
                 FROM json_each(?1) AS asked
                 JOIN lockkit_lease AS l ON l.name = CAST(unhex(asked.value ->> 0) AS TEXT)
                 WHERE l.token <> unhex(asked.value ->> 1) AND l.expires_us > {NOW}
                   AND coalesce(l.expires_us - l.ttl_us <= {NOW}, true)"
            ))
            .bind(&asked)
            .fetch_all(conn)
            .await;
            let held: Vec<(String, i64)> = match held {
                // What was taken stays taken. The others are sent alone.
                Err(err) if Self::fault(&err) == Fault::Contended => Vec::new(),
                held => held?,
            };
            answers
                .extend(held.into_iter().map(|(name, left)| (name, Acquired::Held { free_in: Some(duration(left)) })));
        }
        Ok(claims.iter().map(|it| answers.remove(it.key.as_str())).collect())
    }

    async fn lease_look(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Option<LeaseRecord>> {
        let row = sqlx::query(statement!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE name = ?1 AND token IS NOT NULL AND expires_us > {NOW}",
            columns = columns()
        ))
        .bind(key.as_str())
        .fetch_optional(&mut *conn)
        .await?;
        Ok(leases_found::<Self>(conn, row.iter().map(found)).await?.pop())
    }

    async fn lease_cut(conn: &mut SqliteConnection, key: &Key, expires_us: i64, ttl_us: i64) -> sqlx::Result<()> {
        sqlx::query(statement!(
            "UPDATE lockkit_lease
             SET expires_us = {NOW} + ttl_us, acquired_us = acquired_us - (expires_us - ttl_us - {NOW})
             WHERE name = ?1 AND expires_us = ?2 AND ttl_us = ?3 AND expires_us - ttl_us > {NOW}"
        ))
        .bind(key.as_str())
        .bind(expires_us)
        .bind(ttl_us)
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn lease_renew(conn: &mut SqliteConnection, renewals: &[Renewal]) -> sqlx::Result<Vec<Answer>> {
        let done: Vec<Vec<u8>> = sqlx::query_scalar(statement!(
            "UPDATE lockkit_lease
             SET {lives}, renewals = renewals + 1
             FROM (
                 SELECT value ->> 0 AS name, value ->> 1 AS token, value ->> 2 AS ttl FROM json_each(?1)
             ) AS asked
             WHERE lockkit_lease.name = CAST(unhex(asked.name) AS TEXT) AND lockkit_lease.token = unhex(asked.token)
               AND expires_us > {NOW}
             RETURNING token",
            lives = lives("asked.ttl")
        ))
        .bind(ttls_json(renewals.iter().map(|it| (&it.key, &it.token, it.ttl))))
        .fetch_all(conn)
        .await?;
        let done: HashSet<_> = done.iter().map(Vec::as_slice).collect();
        let answer =
            |it: &Renewal| if done.contains(it.token.as_bytes().as_slice()) { Answer::Done } else { Answer::Gone };
        Ok(renewals.iter().map(answer).collect())
    }

    async fn lease_release(
        conn: &mut SqliteConnection,
        _grammar: (),
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> sqlx::Result<Answer> {
        let done = release(conn, key, token, min_hold, Pin::No).await?;
        Ok(if done { Answer::Done } else { Answer::Gone })
    }

    async fn lease_release_unpinned(
        conn: &mut SqliteConnection,
        grammar: (),
        key: &Key,
        token: Token,
    ) -> sqlx::Result<Answer> {
        Self::lease_release(conn, grammar, key, token, Duration::ZERO).await
    }

    async fn lease_release_all(
        conn: &mut SqliteConnection,
        _grammar: (),
        releases: &[Release],
        _pin: Pin,
    ) -> sqlx::Result<Vec<Answer>> {
        let asked = releases_json(releases);
        // The UPDATE can return the names of the rows that it changed, but not the tokens that they had.
        let held: Vec<Vec<u8>> = sqlx::query_scalar(
            "SELECT l.token
             FROM json_each(?1) AS asked
             JOIN lockkit_lease AS l
                 ON l.name = CAST(unhex(asked.value ->> 0) AS TEXT) AND l.token = unhex(asked.value ->> 1)",
        )
        .bind(&asked)
        .fetch_all(&mut *conn)
        .await?;
        let held: HashSet<_> = held.iter().map(Vec::as_slice).collect();
        let done: Vec<String> = sqlx::query_scalar(statement!(
            "UPDATE lockkit_lease
             SET token = CASE WHEN {left} > 0 THEN unhex(asked.nobody) END,
                 expires_us = CASE WHEN {left} > 0 THEN {NOW} + {left} ELSE 0 END,
                 ttl_us = CASE WHEN {left} > 0 THEN {left} ELSE ttl_us END
             FROM (
                 SELECT value ->> 0 AS name, value ->> 1 AS token, value ->> 2 AS min_hold, value ->> 3 AS nobody
                 FROM json_each(?1)
             ) AS asked
             WHERE lockkit_lease.name = CAST(unhex(asked.name) AS TEXT) AND lockkit_lease.token = unhex(asked.token)
               AND expires_us > {NOW}
             RETURNING lockkit_lease.name",
            left = left("asked.min_hold")
        ))
        .bind(asked)
        .fetch_all(conn)
        .await?;
        let done: HashSet<_> = done.iter().map(String::as_str).collect();
        let is_done = |it: &Release| done.contains(it.key.as_str()) && held.contains(it.token.as_bytes().as_slice());
        let answer = |it: &Release| if is_done(it) { Answer::Done } else { Answer::Gone };
        Ok(releases.iter().map(answer).collect())
    }

    async fn lease_pin(conn: &mut SqliteConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(statement!(
            "UPDATE lockkit_lease
             SET {lives}, renewals = renewals + 1
             WHERE name = ?1 AND token = ?2 AND expires_us > {NOW}",
            lives = lives("?3")
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_release_in_tx(
        conn: &mut SqliteConnection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pin: Pin,
    ) -> sqlx::Result<bool> {
        release(conn, key, token, min_hold, pin).await
    }

    async fn lease_list(conn: &mut SqliteConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<LeaseRecord>> {
        let rows = sqlx::query(statement!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE name >= ?1 AND name < ?3 AND substr(name, 1, length(?1)) = ?1
               AND token IS NOT NULL AND expires_us > {NOW}
             ORDER BY name
             LIMIT ?2",
            columns = columns()
        ))
        .bind(prefix)
        .bind(limit)
        .bind(prefix_end(prefix))
        .fetch_all(&mut *conn)
        .await?;
        leases_found::<Self>(conn, rows.iter().map(found)).await
    }

    async fn lease_expired(
        conn: &mut SqliteConnection,
        prefix: &str,
        limit: u32,
    ) -> sqlx::Result<Vec<(Key, Previous)>> {
        let rows = sqlx::query(statement!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE substr(name, 1, length(?1)) = ?1 AND {KEPT} AND expires_us <= {NOW}
             ORDER BY name
             LIMIT ?2",
            columns = columns()
        ));
        let rows = rows.bind(prefix).bind(limit).fetch_all(conn).await?;
        rows.iter().map(|it| Ok(held(it)?.expired())).collect()
    }

    async fn lease_sweep(
        conn: &mut SqliteConnection,
        retention: Duration,
        limit: u32,
        after: &str,
    ) -> sqlx::Result<u64> {
        // Fences above the clock must be kept: the next fence would be made from the clock, and be lower.
        let done = sqlx::query(statement!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM (
                     SELECT name, expires_us, fence FROM lockkit_lease WHERE name > ?3 ORDER BY name LIMIT {PAGE}
                 )
                 WHERE expires_us < {NOW} - ?1 AND fence < {NOW} - ?1 - {FENCES}
                 ORDER BY name
                 LIMIT ?2
             )"
        ))
        .bind(micros(retention))
        .bind(limit)
        .bind(after)
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }

    async fn answers_sweep(conn: &mut SqliteConnection, limit: u32) -> sqlx::Result<u64> {
        let delete = statement!(
            "DELETE FROM lockkit_answer WHERE name IN (
                 SELECT name FROM lockkit_answer WHERE keep_until_us <= {NOW} ORDER BY keep_until_us LIMIT ?1
             )"
        );
        Ok(sqlx::query(delete).bind(limit).execute(conn).await?.rows_affected())
    }

    async fn lease_page_end(conn: &mut SqliteConnection, after: &str) -> sqlx::Result<Option<String>> {
        sqlx::query_scalar(statement!(
            "SELECT name FROM lockkit_lease WHERE name > ?1 ORDER BY name LIMIT 1 OFFSET {PAGE} - 1"
        ))
        .bind(after)
        .fetch_optional(conn)
        .await
    }
}

async fn release(
    conn: &mut SqliteConnection,
    key: &Key,
    token: Token,
    min_hold: Duration,
    pin: Pin,
) -> sqlx::Result<bool> {
    let text = statement!(
        "UPDATE lockkit_lease
         SET token = CASE WHEN {left} > 0 THEN ?4 END,
             expires_us = CASE WHEN {left} > 0 THEN {NOW} + {left} ELSE 0 END,
             ttl_us = CASE WHEN {left} > 0 THEN {left} ELSE ttl_us END
         WHERE name = ?1 AND token = ?2 AND (?5 OR expires_us > {NOW})",
        left = left("?3")
    );
    let done = sqlx::query_with(text, room_for(5))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(min_hold))
        .bind(Token::nobody().as_bytes().as_slice())
        .bind(pin == Pin::Certain)
        .execute(conn)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// No arguments, with room for so many.
fn room_for(values: usize) -> SqliteArguments {
    let mut arguments = SqliteArguments::default();
    arguments.reserve(values, 0);
    arguments
}

/// The columns of a held lease, as [`found`] reads them.
fn columns() -> String {
    format!("name, token, holder, fence, acquired_us, {NOW} AS now_us, expires_us, ttl_us, renewals")
}

fn found(row: &SqliteRow) -> sqlx::Result<Found> {
    Ok(held(row)?.found())
}

fn held(row: &SqliteRow) -> sqlx::Result<HeldRow<'_>> {
    Ok(HeldRow {
        name: row.try_get("name")?,
        token: row.try_get("token")?,
        holder: row.try_get("holder")?,
        fence: row.try_get("fence")?,
        acquired_us: row.try_get("acquired_us")?,
        now_us: row.try_get("now_us")?,
        expires_us: row.try_get("expires_us")?,
        ttl_us: row.try_get("ttl_us")?,
        renewals: row.try_get("renewals")?,
    })
}
