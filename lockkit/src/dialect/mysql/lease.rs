//! Leases on MySQL and MariaDB.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row, mysql::MySqlRow};

use crate::{
    dialect::{
        Dialect, LeaseOps, duration, fence,
        lease::{HeldRow, asked, given_back, lease_acquire_in_order, prefix_end},
        micros,
    },
    error::Fault,
    key::Key,
    store::{Acquired, AcquiredAll, Claim, Grant, Held, Previous, Release, Renewal, Scoped, Token},
};

// What holds a lease, in the record locks of InnoDB
// (https://dev.mysql.com/doc/refman/8.4/en/innodb-locks-set.html): a transaction that pins it has a shared lock on the
// token's entry in its index, and on nothing else, because a shared lock that the index alone can answer does not touch
// the row. Renewals write the row and not the index. Those who take the lease or free it write both.

/// Bit 63 of the answer says that the lease is held; the rest is then the time left.
const HELD: u64 = 1 << 63;

/// Bit 62 of the answer says that the lease was taken over; whom from stands in the row.
const TAKEN_OVER: u64 = 1 << 62;

/// Whether the row's lease was not given back by the one who held it last.
macro_rules! kept {
    () => {
        "(lockkit_lease.token IS NOT NULL AND LEFT(lockkit_lease.token, 8) <> REPEAT(CHAR(0), 8))"
    };
}

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
                 previous_holder = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > ", now!(), "
                         THEN lockkit_lease.previous_holder
                     WHEN ", kept!(), " THEN lockkit_lease.holder
                 END,
                 previous_fence = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > ", now!(), "
                         THEN lockkit_lease.previous_fence
                     WHEN ", kept!(), " THEN lockkit_lease.fence
                 END,
                 previous_expires_us = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > ", now!(), "
                         THEN lockkit_lease.previous_expires_us
                     WHEN ", kept!(), " THEN lockkit_lease.expires_us
                 END,
                 fence = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN LAST_INSERT_ID(lockkit_lease.fence)
                     WHEN lockkit_lease.expires_us <= ", now!(), " AND ", kept!(), "
                         THEN GREATEST(lockkit_lease.fence + 1, ", now!(), ")
                             + 0 * LAST_INSERT_ID((1 << 62) | GREATEST(lockkit_lease.fence + 1, ", now!(), "))
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
/// row, and the token's entry if it is to be taken over, with NOWAIT in the same statement. The name is bound twice on both.
const ACQUIRE: &str = acquire!(
    "/*!80000 FROM (SELECT 1 AS one) AS o LEFT JOIN lockkit_lease AS l ON l.name = */ /*M! FROM DUAL WHERE */
     ? /*M! IS NOT NULL */
     /*!80000 LEFT JOIN lockkit_lease AS t FORCE INDEX (lockkit_token)
         ON t.token = l.token AND l.expires_us <= TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
     FOR UPDATE OF l, t NOWAIT */"
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

/// The leases that a statement is about, as rows: one parameter, whatever their number. The index is named because a
/// table of few rows would be scanned, and rows that others have locked waited for.
macro_rules! asked {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (
             name  VARCHAR(510) CHARACTER SET ascii PATH '$[0]',
             token CHAR(32) CHARACTER SET ascii PATH '$[1]',
             ttl   BIGINT PATH '$[2]'
         )) AS asked STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(asked.name)
         WHERE l.token = UNHEX(asked.token) AND l.expires_us > "
    };
}

/// As [`asked`], for leases that are given back.
macro_rules! returned {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (
             name     VARCHAR(510) CHARACTER SET ascii PATH '$[0]',
             token    CHAR(32) CHARACTER SET ascii PATH '$[1]',
             min_hold BIGINT PATH '$[2]',
             nobody   CHAR(32) CHARACTER SET ascii PATH '$[3]'
         )) AS asked STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(asked.name)"
    };
}

/// The tokens among those asked for that hold their lease.
async fn held_of(conn: &mut MySqlConnection, asked: &str) -> sqlx::Result<HashSet<Vec<u8>>> {
    let sql =
        concat!("SELECT l.token FROM ", returned!(), " WHERE l.token = UNHEX(asked.token) AND l.expires_us > ", now!());
    Ok(sqlx::query_scalar(sql).bind(asked).fetch_all(conn).await?.into_iter().collect())
}

impl LeaseOps for MySql {
    async fn lease_acquire(conn: &mut MySqlConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        let answer = match acquire(conn, ACQUIRE, claim).await {
            Err(err) if Self::fault(&err) == Fault::Deadlock => acquire(conn, ACQUIRE_NEW, claim).await?,
            answer => answer?,
        };
        if answer & HELD != 0 {
            return Ok(Acquired::Held { free_in: Some(Duration::from_micros(answer & !HELD)) });
        }
        let previous = if answer & TAKEN_OVER == 0 { None } else { taken_over(conn, claim).await? };
        Ok(Acquired::Granted(Grant { fence: (answer & !TAKEN_OVER).into(), previous }))
    }

    async fn lease_acquire_all(conn: &mut MySqlConnection, claims: &[Claim]) -> sqlx::Result<AcquiredAll> {
        lease_acquire_in_order::<Self>(conn, claims).await
    }

    async fn lease_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, ",
            now!(),
            " AS now_us, expires_us, renewals
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

    async fn lease_renew(conn: &mut MySqlConnection, renewals: &[Renewal]) -> sqlx::Result<Vec<Scoped>> {
        let sent = Instant::now();
        let asked = asked(renewals);
        let done = sqlx::query(concat!(
            "UPDATE (
                 SELECT l.name, asked.ttl FROM ",
            asked!(),
            now!(),
            "
                 LIMIT 18446744073709551615
                 FOR UPDATE /*!80000 OF l */ SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
             SET l.expires_us = GREATEST(l.expires_us, ",
            now!(),
            " + mine.ttl), l.renewals = l.renewals + 1"
        ))
        .bind(&asked)
        .execute(&mut *conn)
        .await?;
        if done.rows_affected() == renewals.len() as u64 {
            return Ok(vec![Scoped::Done; renewals.len()]);
        }
        let held =
            sqlx::query(concat!("SELECT l.token, l.expires_us - ", now!(), " AS left_us FROM ", asked!(), now!()))
                .bind(&asked)
                .fetch_all(conn)
                .await?;
        let held = held.iter().map(|row| Ok((row.try_get::<Vec<u8>, _>("token")?, row.try_get("left_us")?)));
        let held = held.collect::<sqlx::Result<HashMap<_, i64>>>()?;
        // One that was renewed lives for its ttl from then, so what it has left by now tells it from one that was not.
        let passed = sent.elapsed();
        let answer = |it: &Renewal| match held.get(it.token.as_bytes().as_slice()) {
            None => Scoped::Gone,
            Some(left) if duration(*left) + passed >= it.ttl => Scoped::Done,
            Some(_) => Scoped::Busy,
        };
        Ok(renewals.iter().map(answer).collect())
    }

    async fn lease_release(
        conn: &mut MySqlConnection,
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> sqlx::Result<Scoped> {
        // Looking for the token's entry locks the gaps beside it in REPEATABLE READ, which MariaDB need not do to refuse
        // to wait for it.
        let done = sqlx::query(concat!(
            "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
             UPDATE (
                 SELECT l.name
                 FROM lockkit_lease AS l FORCE INDEX (PRIMARY)
                 /*!80000 STRAIGHT_JOIN lockkit_lease AS t FORCE INDEX (lockkit_token) ON t.token = l.token */
                 WHERE l.name = ? AND l.token = ? AND l.expires_us > ",
            now!(),
            "
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
             SET l.token = IF(l.acquired_us + ? > ",
            now!(),
            ", ?, NULL), l.expires_us = IF(l.acquired_us + ? > ",
            now!(),
            ", l.acquired_us + ?, 0)"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .bind(micros(min_hold))
        .bind(Token::nobody().as_bytes().as_slice())
        .bind(micros(min_hold))
        .bind(micros(min_hold))
        .execute(&mut *conn)
        .await?;
        if done.rows_affected() > 0 {
            return Ok(Scoped::Done);
        }
        // Lost, or locked by a transaction that pins it?
        let held = Self::lease_look(conn, key).await?;
        Ok(if held.is_some_and(|it| it.token == token) { Scoped::Busy } else { Scoped::Gone })
    }

    async fn lease_release_all(conn: &mut MySqlConnection, releases: &[Release]) -> sqlx::Result<Vec<Scoped>> {
        // The UPDATE cannot say which rows it changed, so those that are there are read before it.
        let asked = given_back(releases);
        let held = held_of(conn, &asked).await?;
        let done = sqlx::query(concat!(
            "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
             UPDATE (
                 SELECT l.name, asked.min_hold, asked.nobody FROM ",
            returned!(),
            "
                 /*!80000 STRAIGHT_JOIN lockkit_lease AS t FORCE INDEX (lockkit_token) ON t.token = l.token */
                 WHERE l.token = UNHEX(asked.token) AND l.expires_us > ",
            now!(),
            "
                 LIMIT 18446744073709551615
                 FOR UPDATE /*!80000 OF l, t */ SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
             SET l.token = IF(l.acquired_us + mine.min_hold > ",
            now!(),
            ", UNHEX(mine.nobody), NULL), l.expires_us = IF(l.acquired_us + mine.min_hold > ",
            now!(),
            ", l.acquired_us + mine.min_hold, 0)"
        ))
        .bind(&asked)
        .execute(&mut *conn)
        .await?;
        let busy = if done.rows_affected() < held.len() as u64 { held_of(conn, &asked).await? } else { HashSet::new() };
        let answer = |it: &Release| {
            let token = it.token.as_bytes().as_slice();
            match (held.contains(token), busy.contains(token)) {
                (_, true) => Scoped::Busy,
                (true, false) => Scoped::Done,
                (false, false) => Scoped::Gone,
            }
        };
        Ok(releases.iter().map(answer).collect())
    }

    async fn lease_pin(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        // Only where `begin` made the transaction READ COMMITTED: in REPEATABLE READ the lock would be on the gaps beside
        // the entry, too, and keep others from taking other leases. A token that is NULL is looked for nowhere.
        // The expiry is read beside it, without a lock: reading it from the locked entry would lock the row.
        let current: Option<bool> = sqlx::query_scalar(concat!(
            "SELECT (SELECT l.expires_us > ",
            now!(),
            " FROM lockkit_lease AS l WHERE l.name = ?)
             FROM lockkit_lease AS t FORCE INDEX (lockkit_token)
             WHERE t.token = IF(@lockkit_read_committed, ?, NULL) AND t.name = ?
             LOCK IN SHARE MODE"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .bind(key.as_bytes())
        .fetch_optional(&mut *conn)
        .await?;
        if let Some(current) = current {
            return Ok(current);
        }
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

    async fn lease_give_up(
        conn: &mut MySqlConnection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pinned: bool,
    ) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = IF(acquired_us + ? > ",
            now!(),
            ", ?, NULL), expires_us = IF(acquired_us + ? > ",
            now!(),
            ", acquired_us + ?, 0)
             WHERE name = ? AND token = ? AND (? OR expires_us > ",
            now!(),
            ")"
        ))
        .bind(micros(min_hold))
        .bind(Token::nobody().as_bytes().as_slice())
        .bind(micros(min_hold))
        .bind(micros(min_hold))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .bind(pinned)
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut MySqlConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, ",
            now!(),
            " AS now_us, expires_us, renewals
             FROM lockkit_lease
             WHERE name >= ? AND name < ? AND LEFT(name, LENGTH(?)) = ? AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT ?"
        ))
        .bind(prefix.as_bytes())
        .bind(prefix_end(prefix).into_bytes())
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

/// Whom this claim took the lease over from.
async fn taken_over(conn: &mut MySqlConnection, claim: &Claim) -> sqlx::Result<Option<Previous>> {
    let row = sqlx::query(
        "SELECT previous_holder, previous_fence, acquired_us - previous_expires_us AS expired_us
         FROM lockkit_lease
         WHERE name = ? AND token = ? AND previous_fence IS NOT NULL",
    )
    .bind(claim.key.as_bytes())
    .bind(claim.token.as_bytes().as_slice())
    .fetch_optional(conn)
    .await?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(Previous {
        holder: text(&row, "previous_holder")?,
        fence: fence(row.try_get("previous_fence")?),
        expired_for: duration(row.try_get("expired_us")?),
    }))
}

fn held(row: &MySqlRow) -> sqlx::Result<Held> {
    HeldRow {
        name: &text(row, "name")?,
        token: row.try_get("token")?,
        holder: text(row, "holder")?,
        fence: row.try_get("fence")?,
        acquired_us: row.try_get("acquired_us")?,
        now_us: row.try_get("now_us")?,
        expires_us: row.try_get("expires_us")?,
        renewals: row.try_get("renewals")?,
    }
    .held()
}

/// Text in VARBINARY columns is bytes to the driver.
fn text(row: &MySqlRow, column: &str) -> sqlx::Result<String> {
    Ok(String::from_utf8_lossy(row.try_get(column)?).into_owned())
}
