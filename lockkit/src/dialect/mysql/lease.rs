//! Leases on MySQL and MariaDB.

use std::time::Duration;

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row, mysql::MySqlRow};

use crate::{
    dialect::{Dialect, LeaseOps, micros},
    error::Fault,
    key::Key,
    store::{Acquired, Claim, Held, Scoped, Token},
};

/// Bit 63 of the answer says that the lease is held; the rest is then the time left.
const HELD: u64 = 1 << 63;

/// Takes the lease or says how long it is held, in the OK packet alone.
///
/// Assignments run from left to right and see the values already assigned, so their order matters. Should the
/// statement wait for the row after all, its clock is older than the grant, which only makes the lease shorter.
macro_rules! acquire {
    ($source:literal) => {
        concat!(
            "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
             INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
             SELECT ?, ?, ?, LAST_INSERT_ID(", now!(), "), ", now!(), ", ", now!(), " + ? ", $source, "
             ON DUPLICATE KEY UPDATE
                 fence = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN LAST_INSERT_ID(lockkit_lease.fence)
                     WHEN lockkit_lease.expires_us <= ", now!(), "
                         THEN LAST_INSERT_ID(GREATEST(lockkit_lease.fence + 1, ", now!(), "))
                     ELSE lockkit_lease.fence
                         + 0 * LAST_INSERT_ID((1 << 63) | (lockkit_lease.expires_us - ", now!(), "))
                 END,
                 acquired_us = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.acquired_us
                     WHEN lockkit_lease.expires_us <= ", now!(), " THEN ", now!(), "
                     ELSE lockkit_lease.acquired_us
                 END,
                 renewals = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.renewals + 1
                     WHEN lockkit_lease.expires_us <= ", now!(), " THEN 0
                     ELSE lockkit_lease.renewals
                 END,
                 holder = IF(lockkit_lease.expires_us <= ", now!(), ", VALUES(holder), lockkit_lease.holder),
                 token = IF(lockkit_lease.expires_us <= ", now!(), ", VALUES(token), lockkit_lease.token),
                 expires_us = IF(lockkit_lease.token <=> VALUES(token), VALUES(expires_us), lockkit_lease.expires_us)"
        )
    };
}

/// MariaDB refuses to wait by the setting at the front; MySQL, where INSERT has no such setting, by first locking the
/// row with NOWAIT in the same statement. The name is bound twice on both.
const ACQUIRE: &str = acquire!(
    "/*!80000 FROM (SELECT 1 AS one) AS o LEFT JOIN lockkit_lease AS l ON l.name = */ /*M! FROM DUAL WHERE */
     ? /*M! IS NOT NULL */ /*!80000 FOR UPDATE OF l NOWAIT */"
);

/// Without that lock. Looking for a row that is not there yet locks the gap around it, so two first grants of
/// neighbouring names can deadlock; the insert alone cannot.
const ACQUIRE_NEW: &str = acquire!("FROM DUAL WHERE ? IS NOT NULL");

async fn acquire(conn: &mut MySqlConnection, sql: &'static str, claim: &Claim) -> sqlx::Result<u64> {
    let done = sqlx::query(sql)
        .bind(claim.key.as_bytes())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.holder.as_bytes())
        .bind(micros(claim.ttl))
        .bind(claim.key.as_bytes())
        .execute(conn)
        .await?;
    Ok(done.last_insert_id())
}

impl LeaseOps for MySql {
    async fn lease_acquire(conn: &mut MySqlConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        let answer = match acquire(conn, ACQUIRE, claim).await {
            Err(err) if Self::fault(&err) == Fault::Deadlock => acquire(conn, ACQUIRE_NEW, claim).await?,
            answer => answer?,
        };
        if answer & HELD == 0 {
            return Ok(Acquired::Granted(answer.into()));
        }
        Ok(Acquired::Held { free_in: Some(Duration::from_micros(answer & !HELD)), by: None })
    }

    async fn lease_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = ? AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_bytes())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE (
                 SELECT name FROM lockkit_lease
                 WHERE name = ? AND token = ? AND expires_us > ",
            now!(),
            "
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l ON l.name = mine.name
             SET l.expires_us = GREATEST(l.expires_us, ",
            now!(),
            " + ?), l.renewals = l.renewals + 1"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(&mut *conn)
        .await?;
        scoped(conn, done.rows_affected(), key, token).await
    }

    async fn lease_release(conn: &mut MySqlConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE (
                 SELECT name FROM lockkit_lease
                 WHERE name = ? AND token = ? AND expires_us > ",
            now!(),
            "
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l ON l.name = mine.name
             SET l.token = NULL, l.expires_us = 0"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(&mut *conn)
        .await?;
        scoped(conn, done.rows_affected(), key, token).await
    }

    async fn lease_pin(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = GREATEST(expires_us, ",
            now!(),
            " + ?), renewals = renewals + 1
             WHERE name = ? AND token = ? AND expires_us > ",
            now!()
        ))
        .bind(micros(ttl))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut MySqlConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = ? AND token = ? AND expires_us > ",
            now!()
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut MySqlConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name >= ? AND LEFT(name, LENGTH(?)) = ? AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT ?"
        ))
        .bind(prefix.as_bytes())
        .bind(prefix.as_bytes())
        .bind(prefix.as_bytes())
        .bind(limit)
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut MySqlConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A DELETE by expiry alone would lock every row that it reads, so the names are read first, without locks.
        let names: Vec<Vec<u8>> = sqlx::query_scalar(concat!(
            "SELECT name FROM lockkit_lease
             WHERE expires_us < ",
            now!(),
            " - ? AND fence < ",
            now!(),
            " - ?
             ORDER BY name
             LIMIT ?"
        ))
        .bind(micros(retention))
        .bind(micros(retention))
        .bind(limit)
        .fetch_all(&mut *conn)
        .await?;
        if names.is_empty() {
            return Ok(0);
        }
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let sql = format!(
            concat!(
                "DELETE FROM lockkit_lease
                 WHERE expires_us < ",
                now!(),
                " - ? AND fence < ",
                now!(),
                " - ? AND name IN ({})"
            ),
            vec!["?"; names.len()].join(", "),
        );
        let mut delete = sqlx::query(AssertSqlSafe(sql)).bind(micros(retention)).bind(micros(retention));
        for name in names {
            delete = delete.bind(name);
        }
        Ok(delete.execute(conn).await?.rows_affected())
    }
}

fn held(row: &MySqlRow) -> sqlx::Result<Held> {
    // Text in VARBINARY columns is bytes to the driver.
    let text = |column| row.try_get::<Vec<u8>, _>(column).map(|it| String::from_utf8_lossy(&it).into_owned());
    crate::dialect::held(
        &text("name")?,
        row.try_get("token")?,
        text("holder")?,
        row.try_get("fence")?,
        row.try_get("acquired_us")?,
        row.try_get("left_us")?,
        row.try_get("renewals")?,
    )
}

/// No row was changed: was the lease lost, or is its row locked by a transaction that pins it?
async fn scoped(conn: &mut MySqlConnection, changed: u64, key: &Key, token: Token) -> sqlx::Result<Scoped> {
    if changed > 0 {
        return Ok(Scoped::Done);
    }
    let held = MySql::lease_look(conn, key).await?;
    Ok(if held.is_some_and(|it| it.token == token) { Scoped::Busy } else { Scoped::Gone })
}
