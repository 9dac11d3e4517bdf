//! Leases on SQLite.

use std::time::Duration;

use sqlx::{
    Row, Sqlite, SqliteConnection,
    sqlite::{SqliteQueryResult, SqliteRow},
};

use crate::{
    dialect::{LeaseOps, fence, micros},
    error::HolderInfo,
    key::Key,
    store::{Acquired, Claim, Held, Scoped, Token},
};

impl LeaseOps for Sqlite {
    async fn lease_acquire(conn: &mut SqliteConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        let numbers: Vec<i64> = sqlx::query_scalar(concat!(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
             VALUES (?1, ?2, ?3, ",
            now!(),
            ", ",
            now!(),
            ", ",
            now!(),
            " + ?4)
             ON CONFLICT (name) DO UPDATE SET
                 fence = CASE WHEN token IS ?2 THEN fence ELSE max(fence + 1, ",
            now!(),
            ") END,
                 acquired_us = CASE WHEN token IS ?2 THEN acquired_us ELSE ",
            now!(),
            " END,
                 renewals = CASE WHEN token IS ?2 THEN renewals + 1 ELSE 0 END,
                 token = ?2, holder = ?3, expires_us = ",
            now!(),
            " + ?4
             WHERE expires_us <= ",
            now!(),
            " OR token IS ?2
             RETURNING fence"
        ))
        .bind(claim.key.as_str())
        .bind(claim.token.as_bytes().as_slice())
        .bind(&*claim.holder)
        .bind(micros(claim.ttl))
        // All of the rows: the statement commits when it ends, and a driver that stops at the first row does not hear
        // of a commit that fails.
        .fetch_all(&mut *conn)
        .await?;
        if let Some(number) = numbers.first() {
            return Ok(Acquired::Granted(fence(*number)));
        }
        let by = Self::lease_look(conn, &claim.key).await?.map(|Held { info, .. }| info);
        Ok(Acquired::Held {
            free_in: by.as_ref().map(|it| it.expires_in),
            by: by.map(|it| HolderInfo::new(it.holder, it.fence, it.expires_in)),
        })
    }

    async fn lease_look(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = ?1 AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut SqliteConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = max(expires_us, ",
            now!(),
            " + ?3), renewals = renewals + 1
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(scoped(&done))
    }

    async fn lease_release(conn: &mut SqliteConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(scoped(&done))
    }

    async fn lease_pin(conn: &mut SqliteConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = max(expires_us, ",
            now!(),
            " + ?3), renewals = renewals + 1
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut SqliteConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        Ok(Self::lease_release(conn, key, token).await? == Scoped::Done)
    }

    async fn lease_list(conn: &mut SqliteConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT ?2"
        ))
        .bind(prefix)
        .bind(limit)
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut SqliteConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let done = sqlx::query(concat!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM lockkit_lease
                 WHERE expires_us < ",
            now!(),
            " - ?1 AND fence < ",
            now!(),
            " - ?1
                 ORDER BY name
                 LIMIT ?2
             )"
        ))
        .bind(micros(retention))
        .bind(limit)
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }
}

fn held(row: &SqliteRow) -> sqlx::Result<Held> {
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

fn scoped(done: &SqliteQueryResult) -> Scoped {
    if done.rows_affected() == 1 { Scoped::Done } else { Scoped::Gone }
}
