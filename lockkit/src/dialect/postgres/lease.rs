//! Leases on PostgreSQL.

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row, postgres::PgRow};

use crate::{
    dialect::{LeaseOps, duration, fence, micros},
    error::HolderInfo,
    key::Key,
    store::{Acquired, Claim, Held, Scoped, Token},
};

impl LeaseOps for Postgres {
    async fn lease_acquire(conn: &mut PgConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        // A held lease is only read: an INSERT … ON CONFLICT DO UPDATE … WHERE would lock the row, take a
        // transaction id and wait for the disk each time it fails.
        let row = sqlx::query(concat!(
            "WITH free AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND (expires_us <= ",
            now!(),
            " OR token = $2)
                 FOR NO KEY UPDATE SKIP LOCKED
             ), taken AS (
                 UPDATE lockkit_lease AS l
                 SET fence = CASE WHEN l.token = $2 THEN l.fence ELSE greatest(l.fence + 1, ",
            now!(),
            ") END,
                     acquired_us = CASE WHEN l.token = $2 THEN l.acquired_us ELSE ",
            now!(),
            " END,
                     renewals = CASE WHEN l.token = $2 THEN l.renewals + 1 ELSE 0 END,
                     token = $2, holder = $3, expires_us = ",
            now!(),
            " + $4
                 FROM free
                 WHERE l.name = free.name
                 RETURNING l.fence
             ), made AS (
                 INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
                 SELECT $1, $2, $3, ",
            now!(),
            ", ",
            now!(),
            ", ",
            now!(),
            " + $4
                 WHERE NOT EXISTS (SELECT FROM lockkit_lease WHERE name = $1)
                 ON CONFLICT DO NOTHING
                 RETURNING fence
             )
             SELECT true AS granted, fence, '' AS holder, 0::bigint AS left_us FROM taken
             UNION ALL
             SELECT true, fence, '', 0 FROM made
             UNION ALL
             SELECT false, fence, holder, expires_us - ",
            now!(),
            " FROM lockkit_lease
             WHERE name = $1 AND NOT EXISTS (SELECT FROM taken) AND NOT EXISTS (SELECT FROM made)"
        ))
        .bind(claim.key.as_str())
        .bind(claim.token.as_bytes().as_slice())
        .bind(&*claim.holder)
        .bind(micros(claim.ttl))
        .fetch_optional(conn)
        .await?;
        let Some(row) = row else {
            // Another process made the row at this moment.
            return Ok(Acquired::Held { free_in: None, by: None });
        };
        let number = fence(row.try_get("fence")?);
        if row.try_get("granted")? {
            return Ok(Acquired::Granted(number));
        }
        let left = duration(row.try_get("left_us")?);
        if left.is_zero() {
            // Expired, but somebody has the row locked.
            return Ok(Acquired::Held { free_in: None, by: None });
        }
        let by = HolderInfo::new(row.try_get("holder")?, number, left);
        Ok(Acquired::Held { free_in: Some(left), by: Some(by) })
    }

    async fn lease_look(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = $1 AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut PgConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let row = sqlx::query(concat!(
            "WITH mine AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            "
                 FOR NO KEY UPDATE SKIP LOCKED
             ), renewed AS (
                 UPDATE lockkit_lease AS l SET expires_us = greatest(l.expires_us, ",
            now!(),
            " + $3), renewals = l.renewals + 1
                 FROM mine WHERE l.name = mine.name
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM renewed) AS done,
                 EXISTS (SELECT FROM lockkit_lease WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            ") AS held"
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .fetch_one(conn)
        .await?;
        scoped(&row)
    }

    async fn lease_release(conn: &mut PgConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        // Not waiting for the disk is safe here: a release that a crash undoes is one that waits out its ttl.
        let row = sqlx::query(concat!(
            "WITH mine AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            "
                   AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
                 FOR NO KEY UPDATE SKIP LOCKED
             ), freed AS (
                 UPDATE lockkit_lease AS l SET token = NULL, expires_us = 0
                 FROM mine WHERE l.name = mine.name
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM freed) AS done,
                 EXISTS (SELECT FROM lockkit_lease WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            ") AS held"
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .fetch_one(conn)
        .await?;
        scoped(&row)
    }

    async fn lease_pin(conn: &mut PgConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = greatest(expires_us, ",
            now!(),
            " + $3), renewals = renewals + 1
             WHERE name = $1 AND token = $2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut PgConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = $1 AND token = $2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut PgConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE starts_with(name, $1) AND name >= $1 AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT $2"
        ))
        .bind(prefix)
        .bind(i64::from(limit))
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut PgConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let done = sqlx::query(concat!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM lockkit_lease
                 WHERE expires_us < ",
            now!(),
            " - $1 AND fence < ",
            now!(),
            " - $1
                 ORDER BY name
                 LIMIT $2
                 FOR UPDATE SKIP LOCKED
             )"
        ))
        .bind(micros(retention))
        .bind(i64::from(limit))
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }
}

fn held(row: &PgRow) -> sqlx::Result<Held> {
    crate::dialect::held(
        row.try_get("name")?,
        row.try_get("token")?,
        row.try_get("holder")?,
        row.try_get("fence")?,
        row.try_get("acquired_us")?,
        row.try_get("left_us")?,
        row.try_get("renewals")?,
    )
}

fn scoped(row: &PgRow) -> sqlx::Result<Scoped> {
    Ok(match (row.try_get("done")?, row.try_get("held")?) {
        (true, _) => Scoped::Done,
        (false, true) => Scoped::Busy,
        (false, false) => Scoped::Gone,
    })
}
