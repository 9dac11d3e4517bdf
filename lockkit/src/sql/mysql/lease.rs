//! Leases on MySQL and MariaDB.
//!
//! An UPDATE returns its answer in `LAST_INSERT_ID`: the fence, or the time left with bit 63 set. The server does not
//! return which rows an UPDATE changed. So if a renewal changed fewer rows than it names, a second statement reads the
//! expiries; a lease that expires earlier than the UPDATE's own clock plus its ttl was not renewed.
//!
//! A lease that a transaction has pinned must not block other callers. MariaDB refuses to wait by a setting in front of
//! the statement; MySQL has that for reads only, so there the claim locks the row with `NOWAIT` in the same statement.
//! A look for a missing row locks the gap, and two first grants of neighbouring keys can deadlock. The victim repeats
//! the plain insert, which cannot.
//!
//! The previous holder of an expired lease is kept in columns that only a takeover reads again. The clock of a
//! statement is that of its start, so a delayed statement can find a row that was written after it, which is no step of
//! the clock. So the cut after a step back is a statement of its own, which compares the row with what an earlier one
//! read.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{
    MySql, MySqlConnection, Row,
    mysql::{MySqlArguments, MySqlRow},
    query::Query,
};

use super::{
    NOW,
    text::{AT_ONCE, Each, Grammar, Statement, Texts, for_each, named, settings_on_maria, texts},
};
use crate::{
    lease::{
        life::state::Pin,
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Previous, Release, Renewal},
    },
    sql::{
        Driver, LeaseStatements,
        lease::{
            FENCES, Found, HeldRow, LastClaims, PAGE, granted, hex, is_ahead, lease_acquire_in_order, lease_cut,
            leases_found, prefix_end, releases_json, ttls_json,
        },
        units::{duration, fence, micros},
    },
    value::{error::Fault, fence::Fence, key::Key, token::Token},
};

// The record locks that hold a lease (https://dev.mysql.com/doc/refman/8.4/en/innodb-locks-set.html): a transaction
// that pins it has a shared lock on the token's entry in its index, and on nothing else, because a shared lock that the
// index alone can answer does not touch the row. Renewals write the row and not the index. Claims and releases write
// both.

/// Bit 63 of the answer: the lease is held. The other bits are the time left.
const HELD: u64 = 1 << 63;

/// Bit 62 of the answer to a claim that was granted: the lease was taken over. The row contains the previous holder.
const TAKEN_OVER: u64 = 1 << 62;

/// Bit 62 of the answer to a renewal, or to a claim of a held lease: the row was granted or renewed at a later time
/// than now, so the clock was set back since.
const AHEAD: u64 = 1 << 62;

/// Whether the last holder of the row's lease did not release it.
const KEPT: &str = "(lockkit_lease.token IS NOT NULL AND LEFT(lockkit_lease.token, 8) <> REPEAT(CHAR(0), 8))";

/// Takes the lease or reports how long it is held. The OK packet alone carries the answer.
///
/// Assignments run from left to right and see the values already assigned, so their order matters. If the statement
/// waits for the row after all, its clock is older than the grant, which only makes the lease shorter.
fn claim(source: &str) -> String {
    format!(
        "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
         SELECT :name, :token, :holder, LAST_INSERT_ID({NOW}), {NOW}, {NOW} + :ttl, :ttl
         FROM {source}
         ON DUPLICATE KEY UPDATE
             previous_holder = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > {NOW}
                     THEN lockkit_lease.previous_holder
                 WHEN {KEPT} THEN lockkit_lease.holder
             END,
             previous_fence = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > {NOW}
                     THEN lockkit_lease.previous_fence
                 WHEN {KEPT} THEN lockkit_lease.fence
             END,
             previous_expires_us = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) OR lockkit_lease.expires_us > {NOW}
                     THEN lockkit_lease.previous_expires_us
                 WHEN {KEPT} THEN lockkit_lease.expires_us
             END,
             fence = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) THEN LAST_INSERT_ID(lockkit_lease.fence)
                 WHEN lockkit_lease.expires_us <= {NOW} AND {KEPT}
                     THEN GREATEST(lockkit_lease.fence + {FENCES}, {NOW})
                         + 0 * LAST_INSERT_ID((1 << 62) | GREATEST(lockkit_lease.fence + {FENCES}, {NOW}))
                 WHEN lockkit_lease.expires_us <= {NOW}
                     THEN LAST_INSERT_ID(GREATEST(lockkit_lease.fence + {FENCES}, {NOW}))
                 ELSE lockkit_lease.fence
                     + 0 * LAST_INSERT_ID(
                         (1 << 63) | IF(lockkit_lease.expires_us - lockkit_lease.ttl_us > {NOW}, 1 << 62, 0)
                         | (lockkit_lease.expires_us - {NOW}))
             END,
             acquired_us = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.acquired_us
                 WHEN lockkit_lease.expires_us <= {NOW} THEN {NOW}
                 ELSE lockkit_lease.acquired_us
             END,
             renewals = CASE
                 WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.renewals + 1
                 WHEN lockkit_lease.expires_us <= {NOW} THEN 0
                 ELSE lockkit_lease.renewals
             END,
             holder = IF(lockkit_lease.expires_us <= {NOW}, VALUES(holder), lockkit_lease.holder),
             token = IF(lockkit_lease.expires_us <= {NOW}, VALUES(token), lockkit_lease.token),
             expires_us = IF(lockkit_lease.token <=> VALUES(token),
                 GREATEST(
                     LEAST(lockkit_lease.expires_us, COALESCE({NOW} + lockkit_lease.ttl_us, lockkit_lease.expires_us)),
                     VALUES(expires_us)),
                 lockkit_lease.expires_us),
             ttl_us = IF(lockkit_lease.token <=> VALUES(token) AND lockkit_lease.expires_us <= VALUES(expires_us),
                 VALUES(ttl_us), lockkit_lease.ttl_us)"
    )
}

/// A claim that never waits for the row. MySQL's INSERT has no setting for that, so there the claim first locks the row
/// with NOWAIT in the same statement, and also the token's entry if it will take the lease over.
fn acquire() -> &'static Texts {
    texts! {
        mysql: claim(&format!(
            "(SELECT 1 AS one) AS o
             LEFT JOIN lockkit_lease AS l ON l.name = :name
             LEFT JOIN lockkit_lease AS t FORCE INDEX (lockkit_token) ON t.token = l.token AND l.expires_us <= {NOW}
             FOR UPDATE OF l, t NOWAIT"
        )),
        maria: format!("{AT_ONCE} {}", claim("DUAL")),
    }
}

/// A claim without that lock. Locking a row that does not exist yet locks the gap around it, so two first grants of
/// neighbouring names can deadlock; the insert alone cannot.
fn acquire_new() -> &'static Texts {
    texts! {
        mysql: claim("DUAL"),
        maria: format!("{AT_ONCE} {}", claim("DUAL")),
    }
}

/// Takes a lease that was released, or reports how long it is held. The answer is 0 in every other case: the row does
/// not exist, the lease has expired, or this claim holds it. A locked row is 0 on MySQL and an error on MariaDB.
///
/// MySQL's UPDATE has no setting that refuses to wait, so there a subquery in the same statement locks the row first,
/// and skips it if it is locked. The name is in the subquery alone: MySQL would read, lock and wait for a row with a
/// known key before it runs the subquery.
fn acquire_released() -> &'static Texts {
    texts! {
        mysql: format!(
            "UPDATE (
                 SELECT l.name FROM lockkit_lease AS l FORCE INDEX (PRIMARY)
                 WHERE l.name = :name AND {IS_RELEASED}
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
             SET {GRANTED}",
            IS_RELEASED = is_released(),
            GRANTED = granted_to_claim(&next_fence(), ":token", ":ttl"),
        ),
        maria: format!(
            "{AT_ONCE}
             UPDATE lockkit_lease AS l FORCE INDEX (PRIMARY)
             SET {GRANTED}
             WHERE l.name = :name AND {IS_RELEASED}",
            IS_RELEASED = is_released(),
            GRANTED = granted_to_claim(&next_fence(), ":token", ":ttl"),
        ),
    }
}

/// The claims of a batch as rows, in one parameter ([`claims_json`]).
const CLAIM_ROWS: &str = "JSON_TABLE(:asked, '$[*]' COLUMNS (
         number FOR ORDINALITY,
         name   VARCHAR(510) CHARACTER SET ascii PATH '$[0]',
         token  CHAR(32) CHARACTER SET ascii PATH '$[1]',
         ttl    BIGINT PATH '$[2]',
         last   BIGINT PATH '$[3]',
         fence  BIGINT PATH '$[4]'
     )) AS asked STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(asked.name)";

/// JSON rows of name and token in hexadecimal digits, ttl, and the fences of the last grant and of this one.
fn claims_json<'c>(claims: impl Iterator<Item = (&'c Claim, i64, i64)>) -> String {
    let row = |(Claim { key, token, ttl, .. }, last, fence): (&Claim, i64, i64)| {
        let (name, token) = (hex(key.as_bytes()), hex(token.as_bytes()));
        format!(r#"["{name}","{token}",{},{last},{fence}]"#, micros(*ttl))
    };
    format!("[{}]", claims.map(row).collect::<Vec<_>>().join(","))
}

/// As [`acquire_released`], for any number of claims, with fences made from those that the rows had at a look.
fn acquire_each_released() -> &'static Texts {
    texts! { mysql: each_released("OF l"), maria: format!("{AT_ONCE} {}", each_released("")) }
}

fn each_released(locked: &str) -> String {
    format!(
        "UPDATE (
             SELECT l.name, asked.token, asked.ttl, asked.fence
             FROM {CLAIM_ROWS}
             WHERE l.token IS NULL AND l.expires_us <= {NOW} AND l.fence = asked.last
             LIMIT 18446744073709551615
             FOR UPDATE {locked} SKIP LOCKED
         ) AS mine
         STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
         SET {GRANTED}",
        GRANTED = granted_to_claim("mine.fence", "UNHEX(mine.token)", "mine.ttl"),
    )
}

/// Whether the lease was released. If it is held, the OK packet carries how long.
fn is_released() -> String {
    format!(
        "CASE
             WHEN l.token <=> :token THEN 0
             WHEN l.expires_us > {NOW} THEN 0 * LAST_INSERT_ID(
                 (1 << 63) | IF(l.expires_us - l.ttl_us > {NOW}, 1 << 62, 0) | (l.expires_us - {NOW}))
             ELSE l.token IS NULL
         END"
    )
}

/// The place of a row of [`CLAIM_ROWS`] among the claims.
fn place(row: &MySqlRow) -> sqlx::Result<usize> {
    let number: i64 = row.try_get("number")?;
    Ok(usize::try_from(number).unwrap_or(usize::MAX).saturating_sub(1))
}

/// The fence of a grant, which the OK packet carries.
fn next_fence() -> String {
    format!("LAST_INSERT_ID(GREATEST(l.fence + {FENCES}, {NOW}))")
}

/// The assignments that give a released lease to a claim.
fn granted_to_claim(fence: &str, token: &str, ttl: &str) -> String {
    format!(
        "l.previous_holder = NULL, l.previous_fence = NULL, l.previous_expires_us = NULL, l.fence = {fence},
             l.acquired_us = {NOW}, l.renewals = 0, l.holder = :holder, l.token = {token}, l.ttl_us = {ttl},
             l.expires_us = {NOW} + {ttl}"
    )
}

/// A claim in this form.
fn claiming(text: &Statement, claim: &Claim) -> Query<'static, MySql, MySqlArguments> {
    text.with(&[
        ("name", &claim.key.as_bytes()),
        ("token", &claim.token.as_bytes().as_slice()),
        ("holder", &claim.holder.as_bytes()),
        ("ttl", &micros(claim.ttl)),
    ])
}

/// Sends a claim. Returns the answer, and whether the lease had no row.
async fn run_claim(conn: &mut MySqlConnection, text: &Statement, claim: &Claim) -> sqlx::Result<(u64, bool)> {
    let done = claiming(text, claim).execute(conn).await?;
    // Of an INSERT that updates, the server counts two rows.
    Ok((done.last_insert_id(), done.rows_affected() == 1))
}

/// The leases of a renewal as rows, in one parameter for any number of them. The index is named because the server
/// would scan a table of few rows, and wait for rows that others have locked.
fn renewal_rows() -> String {
    format!(
        "JSON_TABLE(:asked, '$[*]' COLUMNS (
             name  VARCHAR(510) CHARACTER SET ascii PATH '$[0]',
             token CHAR(32) CHARACTER SET ascii PATH '$[1]',
             ttl   BIGINT PATH '$[2]'
         )) AS asked STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(asked.name)
         WHERE l.token = UNHEX(asked.token) AND l.expires_us > {NOW}"
    )
}

/// As [`renewal_rows`], for leases to be released.
const RELEASE_ROWS: &str = "JSON_TABLE(:asked, '$[*]' COLUMNS (
         name     VARCHAR(510) CHARACTER SET ascii PATH '$[0]',
         token    CHAR(32) CHARACTER SET ascii PATH '$[1]',
         min_hold BIGINT PATH '$[2]',
         nobody   CHAR(32) CHARACTER SET ascii PATH '$[3]'
     )) AS asked STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(asked.name)";

/// The requested tokens that hold their lease.
async fn held_of(conn: &mut MySqlConnection, asked: &str) -> sqlx::Result<HashSet<Vec<u8>>> {
    let held = named!("SELECT l.token FROM {RELEASE_ROWS} WHERE l.token = UNHEX(asked.token) AND l.expires_us > {NOW}");
    Ok(held.scalar(&[("asked", &asked)]).fetch_all(conn).await?.into_iter().collect())
}

/// The rest of the least holding time. `min_hold` is a named value or a column.
fn left(min_hold: &str, acquired_us: &str) -> String {
    format!("({min_hold} - GREATEST(0, {NOW} - {acquired_us}))")
}

/// Releases a lease without waiting for it. On MySQL it does not wait for the token's entry in its index either, by a
/// lookup that locks the gaps beside it in REPEATABLE READ. On MariaDB its setting covers the entry.
fn release() -> &'static Texts {
    texts! {
        mysql: released_from(
            "lockkit_lease AS l FORCE INDEX (PRIMARY)
             STRAIGHT_JOIN lockkit_lease AS t FORCE INDEX (lockkit_token) ON t.token = l.token"
        ),
        maria: format!("{AT_ONCE} {}", released_from("lockkit_lease AS l FORCE INDEX (PRIMARY)")),
    }
}

fn released_from(source: &str) -> String {
    format!(
        "UPDATE (
             SELECT l.name
             FROM {source}
             WHERE l.name = :name AND l.token = :token AND l.expires_us > {NOW}
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS mine
         STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
         SET l.token = IF({left} > 0, :nobody, NULL),
             l.expires_us = IF({left} > 0, {NOW} + {left}, 0),
             l.ttl_us = IF({left} > 0, {left}, l.ttl_us)",
        left = left(":min_hold", "l.acquired_us")
    )
}

/// As [`release`], for a lease that no transaction has pinned. On MySQL it waits for a renewal of this lease or for a
/// claim, which are single statements.
fn release_unpinned() -> &'static Texts {
    const RELEASE: &str = "UPDATE lockkit_lease AS l FORCE INDEX (PRIMARY)
         SET l.token = NULL, l.expires_us = 0
         WHERE l.name = :name AND l.token = :token AND l.expires_us >";
    texts! {
        mysql: format!("{RELEASE} {NOW}"),
        maria: format!("{AT_ONCE} {RELEASE} {NOW}"),
    }
}

/// As [`release`], for any number of leases.
fn release_all() -> &'static Texts {
    texts! {
        mysql: all_released_from(
            "STRAIGHT_JOIN lockkit_lease AS t FORCE INDEX (lockkit_token) ON t.token = l.token",
            "OF l, t"
        ),
        maria: format!("{AT_ONCE} {}", all_released_from("", "")),
    }
}

fn all_released_from(entries: &str, locked: &str) -> String {
    format!(
        "UPDATE (
             SELECT l.name, asked.min_hold, asked.nobody
             FROM {RELEASE_ROWS} {entries}
             WHERE l.token = UNHEX(asked.token) AND l.expires_us > {NOW}
             LIMIT 18446744073709551615
             FOR UPDATE {locked} SKIP LOCKED
         ) AS mine
         STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
         SET l.token = IF({left} > 0, UNHEX(mine.nobody), NULL),
             l.expires_us = IF({left} > 0, {NOW} + {left}, 0),
             l.ttl_us = IF({left} > 0, {left}, l.ttl_us)",
        left = left("mine.min_hold", "l.acquired_us")
    )
}

/// As [`release_all`], for leases that no transaction has pinned.
fn release_all_unpinned() -> &'static Texts {
    texts! { mysql: all_released_from("", "OF l"), maria: format!("{AT_ONCE} {}", all_released_from("", "")) }
}

impl LeaseStatements for MySql {
    const BATCHES_NEW: bool = false;

    async fn lease_acquire(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        claim: &Claim,
        last: &LastClaims,
    ) -> sqlx::Result<Acquired> {
        // In REPEATABLE READ, a look for a missing row locks the gap for a moment, which refuses the insert of a
        // neighbour on MariaDB. So a new lease has more than one try.
        let mut tries = 2;
        loop {
            if last.were_of_released() {
                let released = claiming(acquire_released().of(grammar), claim);
                let answer = released.execute(&mut *conn).await?.last_insert_id();
                if answer != 0 {
                    return acquired(conn, claim, last, answer, false).await;
                }
            }
            match acquire_any(conn, grammar, claim, last).await {
                Err(err) if tries > 0 && Self::fault(&err) == Fault::Contended => tries -= 1,
                answer => return answer,
            }
        }
    }

    async fn lease_acquire_all(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        claims: &[Claim],
    ) -> sqlx::Result<AcquiredAll> {
        lease_acquire_in_order::<Self>(conn, grammar, claims).await
    }

    /// Looks first, so that the UPDATE names only released leases: in REPEATABLE READ it would lock the others, and the
    /// gaps of those without a row, until it is committed.
    async fn lease_acquire_each(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        claims: &[Claim],
    ) -> sqlx::Result<Vec<Option<Acquired>>> {
        let Some(Claim { holder, .. }) = claims.first() else { return Ok(Vec::new()) };
        let look = named!(
            "SELECT asked.number, l.fence, l.token IS NULL AND l.expires_us <= {NOW} AS released,
                 CAST({NOW} AS SIGNED) AS now,
                 l.expires_us > {NOW} AND COALESCE(l.expires_us - l.ttl_us <= {NOW}, 1)
                     AND COALESCE(l.token <> UNHEX(asked.token), 1) AS held,
                 CAST(l.expires_us - {NOW} AS SIGNED) AS left_us
             FROM {CLAIM_ROWS}"
        );
        let asked = claims_json(claims.iter().map(|it| (it, 0, 0)));
        let mut answers = vec![None; claims.len()];
        let mut released = Vec::new();
        for row in look.with(&[("asked", &asked)]).fetch_all(&mut *conn).await? {
            let at = place(&row)?;
            if row.try_get("released")? {
                let (last, now): (i64, i64) = (row.try_get("fence")?, row.try_get("now")?);
                released.push((at, last, now.max(last.saturating_add_unsigned(FENCES))));
            } else if row.try_get("held")? {
                answers[at] = Some(Acquired::Held { free_in: Some(duration(row.try_get("left_us")?)) });
            }
        }
        if released.is_empty() {
            return Ok(answers);
        }
        let asked = claims_json(released.iter().map(|(at, last, fence)| (&claims[*at], *last, *fence)));
        let take = acquire_each_released().of(grammar).with(&[("asked", &asked), ("holder", &holder.as_bytes())]);
        if take.execute(&mut *conn).await?.rows_affected() < released.len() as u64 {
            // Other sessions were faster. The UPDATE cannot return the rows that it changed.
            let mine = named!(
                "SELECT asked.number FROM {CLAIM_ROWS} WHERE l.token = UNHEX(asked.token) AND l.fence = asked.fence"
            );
            let mine = mine.with(&[("asked", &asked)]).fetch_all(conn).await;
            // The server refused this query. What the UPDATE took is taken all the same.
            let mine = mine.map_err(|err| match err {
                sqlx::Error::Database(_) => sqlx::Error::Decode(err.into()),
                err => err,
            })?;
            let mine: HashSet<usize> = mine.iter().map(place).collect::<sqlx::Result<_>>()?;
            let mut at = 0..;
            released.retain(|_| at.next().is_some_and(|it| mine.contains(&it)));
        }
        for (at, _, number) in released {
            answers[at] = Some(Acquired::Granted(granted(fence(number))));
        }
        Ok(answers)
    }

    async fn lease_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<LeaseRecord>> {
        let look = named!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE name = :name AND token IS NOT NULL AND expires_us > {NOW}",
            columns = columns()
        );
        let row = look.with(&[("name", &key.as_bytes())]).fetch_optional(&mut *conn).await?;
        Ok(leases_found::<Self>(conn, row.iter().map(found)).await?.pop())
    }

    async fn lease_cut(conn: &mut MySqlConnection, key: &Key, expires_us: i64, ttl_us: i64) -> sqlx::Result<()> {
        // Also inside the transaction of `Lease::commit`, where the server is not known.
        let cut = named!(
            "{at_once}
             UPDATE (
                 SELECT l.name, l.expires_us - l.ttl_us - {NOW} AS ahead_us
                 FROM lockkit_lease AS l FORCE INDEX (PRIMARY)
                 WHERE l.name = :name AND l.expires_us = :expires AND l.ttl_us = :ttl
                     AND l.expires_us - l.ttl_us > {NOW}
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
             SET l.expires_us = l.expires_us - mine.ahead_us, l.acquired_us = l.acquired_us - mine.ahead_us",
            at_once = settings_on_maria("innodb_lock_wait_timeout = 0")
        );
        let cut = cut.with(&[("name", &key.as_bytes()), ("expires", &expires_us), ("ttl", &ttl_us)]);
        cut.execute(conn).await.map(drop)
    }

    async fn lease_renew(conn: &mut MySqlConnection, renewals: &[Renewal]) -> sqlx::Result<Vec<Answer>> {
        let (answers, is_ahead) = renew(conn, renewals).await?;
        if is_ahead {
            // The clock was set back. `renew` has cut the expiries, so run it again.
            return renew(conn, renewals).await.map(|(answers, _)| answers);
        }
        Ok(answers)
    }

    async fn lease_release(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> sqlx::Result<Answer> {
        let release = release().of(grammar).with(&[
            ("name", &key.as_bytes()),
            ("token", &token.as_bytes().as_slice()),
            ("nobody", &Token::nobody().as_bytes().as_slice()),
            ("min_hold", &micros(min_hold)),
        ]);
        if release.execute(&mut *conn).await?.rows_affected() > 0 {
            return Ok(Answer::Done);
        }
        // Nothing was changed: the lease is lost, or a transaction that pins it has it locked.
        let held = Self::lease_look(conn, key).await?;
        Ok(if held.is_some_and(|it| it.token == token) { Answer::Busy } else { Answer::Gone })
    }

    async fn lease_release_unpinned(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        key: &Key,
        token: Token,
    ) -> sqlx::Result<Answer> {
        let release = release_unpinned().of(grammar);
        let release = release.with(&[("name", &key.as_bytes()), ("token", &token.as_bytes().as_slice())]);
        let done = release.execute(conn).await?;
        Ok(if done.rows_affected() > 0 { Answer::Done } else { Answer::Gone })
    }

    async fn lease_release_all(
        conn: &mut MySqlConnection,
        grammar: Grammar,
        releases: &[Release],
        pin: Pin,
    ) -> sqlx::Result<Vec<Answer>> {
        let release = if pin == Pin::No { release_all_unpinned() } else { release_all() };
        // The UPDATE cannot return the rows that it changed, so the held tokens are read before it.
        let asked = releases_json(releases);
        let held = held_of(conn, &asked).await?;
        let done = release.of(grammar).with(&[("asked", &asked)]).execute(&mut *conn).await?.rows_affected();
        if done == releases.len() as u64 {
            return Ok(vec![Answer::Done; releases.len()]);
        }
        let busy = if done < held.len() as u64 {
            // An error that says that the statement was refused would say it of the UPDATE, too.
            held_of(conn, &asked).await.map_err(|err| sqlx::Error::AnyDriverError(Box::new(err)))?
        } else {
            HashSet::new()
        };
        let answer = |it: &Release| {
            let token = it.token.as_bytes().as_slice();
            match (held.contains(token), busy.contains(token)) {
                (_, true) => Answer::Busy,
                (true, false) => Answer::Done,
                (false, false) => Answer::Gone,
            }
        };
        Ok(releases.iter().map(answer).collect())
    }

    async fn lease_pin(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        // The lock is taken only if `begin` made the transaction READ COMMITTED. In REPEATABLE READ it would include
        // the gaps beside the entry, and prevent others from taking other leases. Otherwise the token is compared with
        // NULL, which matches no entry. A separate subquery reads the expiry without a lock: reading it from the locked
        // entry would lock the row.
        let pin = named!(
            "SELECT (SELECT l.expires_us > {NOW} FROM lockkit_lease AS l WHERE l.name = :name)
             FROM lockkit_lease AS t FORCE INDEX (lockkit_token)
             WHERE t.token = IF(@lockkit_read_committed, :token, NULL) AND t.name = :name
             LOCK IN SHARE MODE"
        );
        let (name, token, ttl) = (key.as_bytes(), token.as_bytes().as_slice(), micros(ttl));
        if let Some(current) = pin.scalar(&[("name", &name), ("token", &token)]).fetch_optional(&mut *conn).await? {
            return Ok(current);
        }
        let renew = named!(
            "UPDATE lockkit_lease
             SET ttl_us = IF(expires_us > {NOW} + :ttl, ttl_us, :ttl),
                 expires_us = GREATEST(expires_us, {NOW} + :ttl), renewals = renewals + 1
             WHERE name = :name AND token = :token AND expires_us > {NOW}"
        );
        let renewed = renew.with(&[("name", &name), ("token", &token), ("ttl", &ttl)]).execute(conn).await?;
        Ok(renewed.rows_affected() == 1)
    }

    async fn lease_release_in_tx(
        conn: &mut MySqlConnection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pin: Pin,
    ) -> sqlx::Result<bool> {
        let release = named!(
            "UPDATE lockkit_lease
             SET token = IF({left} > 0, :nobody, NULL),
                 expires_us = IF({left} > 0, {NOW} + {left}, 0),
                 ttl_us = IF({left} > 0, {left}, ttl_us)
             WHERE name = :name AND token = :token AND (:pinned OR expires_us > {NOW})",
            left = left(":min_hold", "acquired_us")
        );
        let release = release.with(&[
            ("name", &key.as_bytes()),
            ("token", &token.as_bytes().as_slice()),
            ("nobody", &Token::nobody().as_bytes().as_slice()),
            ("min_hold", &micros(min_hold)),
            ("pinned", &(pin == Pin::Certain)),
        ]);
        Ok(release.execute(conn).await?.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut MySqlConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<LeaseRecord>> {
        let list = named!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE name >= :prefix AND name < :end AND LEFT(name, LENGTH(:prefix)) = :prefix
               AND token IS NOT NULL AND expires_us > {NOW}
             ORDER BY name
             LIMIT :limit",
            columns = columns()
        );
        let end = prefix_end(prefix).into_bytes();
        let list = list.with(&[("prefix", &prefix.as_bytes()), ("end", &end), ("limit", &limit)]);
        let rows = list.fetch_all(&mut *conn).await?;
        leases_found::<Self>(conn, rows.iter().map(found)).await
    }

    async fn lease_expired(conn: &mut MySqlConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<(Key, Previous)>> {
        let expired = named!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE LEFT(name, LENGTH(:prefix)) = :prefix AND {KEPT} AND expires_us <= {NOW}
             ORDER BY name
             LIMIT :limit",
            columns = columns()
        );
        let rows = expired.with(&[("prefix", &prefix.as_bytes()), ("limit", &limit)]).fetch_all(conn).await?;
        rows.iter().map(|it| Ok(held(it)?.expired())).collect()
    }

    async fn lease_sweep(
        conn: &mut MySqlConnection,
        retention: Duration,
        limit: u32,
        after: &str,
    ) -> sqlx::Result<u64> {
        // A DELETE by expiry alone would lock every row that it reads, so the names are read first, without locks.
        let page = named!(
            "SELECT name FROM (
                 SELECT name, expires_us, fence FROM lockkit_lease WHERE name > :after ORDER BY name LIMIT {PAGE}
             ) AS page
             WHERE expires_us < {NOW} - :retention AND fence < {NOW} - :retention - {FENCES}
             ORDER BY name
             LIMIT :limit"
        );
        let retention = micros(retention);
        let page = page.scalar(&[("after", &after.as_bytes()), ("retention", &retention), ("limit", &limit)]);
        let names: Vec<Vec<u8>> = page.fetch_all(&mut *conn).await?;
        if names.is_empty() {
            return Ok(0);
        }
        // Fences above the clock must be kept: the next fence would be made from the clock, and be lower.
        let delete = Statement::new(&format!(
            "DELETE FROM lockkit_lease
             WHERE expires_us < {NOW} - :retention AND fence < {NOW} - :retention - {FENCES}
               AND name IN (:names[{}])",
            names.len()
        ));
        let delete = delete.with(&[("retention", &retention), ("names", &Each(&names))]);
        Ok(delete.execute(conn).await?.rows_affected())
    }

    async fn answers_sweep(conn: &mut MySqlConnection, limit: u32) -> sqlx::Result<u64> {
        // Names first, without locks, because a DELETE by expiry would lock the gaps into which new answers go.
        let page =
            named!("SELECT name FROM lockkit_answer WHERE keep_until_us <= {NOW} ORDER BY keep_until_us LIMIT :limit");
        let names: Vec<Vec<u8>> = page.scalar(&[("limit", &limit)]).fetch_all(&mut *conn).await?;
        if names.is_empty() {
            return Ok(0);
        }
        // An answer that has expired may be the lock of a request.
        let delete = Statement::new(&format!(
            "DELETE a FROM (
                 SELECT name FROM lockkit_answer FORCE INDEX (PRIMARY)
                 WHERE name IN (:names[{}]) AND keep_until_us <= {NOW}
                 LIMIT 18446744073709551615
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_answer AS a FORCE INDEX (PRIMARY) ON a.name = mine.name",
            names.len()
        ));
        Ok(delete.with(&[("names", &Each(&names))]).execute(conn).await?.rows_affected())
    }

    async fn lease_page_end(conn: &mut MySqlConnection, after: &str) -> sqlx::Result<Option<String>> {
        let end = named!(
            "SELECT name FROM lockkit_lease WHERE name > :after ORDER BY name LIMIT 1 OFFSET {last}",
            last = PAGE - 1
        );
        let row = end.with(&[("after", &after.as_bytes())]).fetch_optional(conn).await?;
        row.map(|it| text(&it, "name")).transpose()
    }
}

/// Renews. Also returns whether a renewed row had been granted or renewed at a later time than now; its expiry is cut
/// then.
async fn renew(conn: &mut MySqlConnection, renewals: &[Renewal]) -> sqlx::Result<(Vec<Answer>, bool)> {
    // The OK packet contains the clock of this statement. That clock may be older than a row that another renewal wrote
    // while this statement waited, so no expiry is cut here.
    let asked = ttls_json(renewals.iter().map(|it| (&it.key, &it.token, it.ttl)));
    let renew = named!(
        "UPDATE (
             SELECT l.name, l.expires_us, l.ttl_us, asked.ttl, LAST_INSERT_ID({NOW}) AS now_us FROM {rows}
             LIMIT 18446744073709551615
             FOR UPDATE {of_l} SKIP LOCKED
         ) AS mine
         STRAIGHT_JOIN lockkit_lease AS l FORCE INDEX (PRIMARY) ON l.name = mine.name
         SET l.expires_us = GREATEST(mine.expires_us, mine.now_us + mine.ttl)
                 + IF(mine.expires_us - mine.ttl_us > mine.now_us, 0 * LAST_INSERT_ID((1 << 62) | mine.now_us), 0),
             l.ttl_us = IF(mine.expires_us > mine.now_us + mine.ttl, mine.ttl_us, mine.ttl),
             l.renewals = l.renewals + 1",
        rows = renewal_rows(),
        // Also inside the transaction of `Lease::commit`. MySQL refuses to lock the rows of JSON_TABLE.
        of_l = for_each("OF l", "")
    );
    let done = renew.with(&[("asked", &asked)]).execute(&mut *conn).await?;
    let ahead = done.last_insert_id() & AHEAD != 0;
    if done.rows_affected() == renewals.len() as u64 && !ahead {
        return Ok((vec![Answer::Done; renewals.len()], false));
    }
    let clock = i64::try_from(done.last_insert_id() & !AHEAD).unwrap_or(i64::MAX);
    let renewed_us = (done.rows_affected() > 0).then_some(clock);
    let look = named!("SELECT l.token, l.expires_us, l.ttl_us, {NOW} AS now_us FROM {rows}", rows = renewal_rows());
    let rows = look.with(&[("asked", &asked)]).fetch_all(&mut *conn).await?;
    let mut held = HashMap::new();
    for row in &rows {
        let expiry: (i64, Option<i64>, i64) =
            (row.try_get("expires_us")?, row.try_get("ttl_us")?, row.try_get("now_us")?);
        held.insert(row.try_get::<Vec<u8>, _>("token")?, expiry);
    }
    let mut answers = Vec::with_capacity(renewals.len());
    for Renewal { key, token, ttl } in renewals {
        let Some(&(expires_us, ttl_us, now_us)) = held.get(token.as_bytes().as_slice()) else {
            answers.push(Answer::Gone);
            continue;
        };
        // A renewed lease lives at least for its ttl from the clock of the renewal, even after a cut.
        let ttl = micros(*ttl);
        let lives = renewed_us.is_some_and(|it| expires_us >= it.saturating_add(ttl));
        let lives = lives && ttl_us.is_none_or(|it| it >= ttl);
        answers.push(if lives { Answer::Done } else { Answer::Busy });
        if let Some(ttl_us) = ttl_us.filter(|it| is_ahead(expires_us, *it, now_us)) {
            lease_cut::<MySql>(conn, key, expires_us, ttl_us).await?;
        }
    }
    Ok((answers, ahead))
}

/// Takes a lease that was released, has expired, is held by this claim already, or has no row yet.
async fn acquire_any(
    conn: &mut MySqlConnection,
    grammar: Grammar,
    claim: &Claim,
    last: &LastClaims,
) -> sqlx::Result<Acquired> {
    let (answer, is_new) = match run_claim(conn, acquire().of(grammar), claim).await {
        Err(err) if MySql::fault(&err) == Fault::Deadlock => run_claim(conn, acquire_new().of(grammar), claim).await?,
        answer => answer?,
    };
    acquired(conn, claim, last, answer, is_new).await
}

/// Reads the answer to a claim. `is_new`: the lease had no row.
async fn acquired(
    conn: &mut MySqlConnection,
    claim: &Claim,
    last: &LastClaims,
    answer: u64,
    is_new: bool,
) -> sqlx::Result<Acquired> {
    if answer & HELD != 0 && answer & AHEAD != 0 {
        // The look cuts the expiry.
        let held = MySql::lease_look(conn, &claim.key).await?;
        return Ok(Acquired::Held { free_in: held.map(|it| it.info.expires_in) });
    }
    if answer & HELD != 0 {
        return Ok(Acquired::Held { free_in: Some(Duration::from_micros(answer & !HELD)) });
    }
    last.note(!is_new && answer & TAKEN_OVER == 0);
    let previous = if answer & TAKEN_OVER == 0 { None } else { taken_over(conn, claim).await? };
    Ok(Acquired::Granted(granted(Fence::from(answer & !TAKEN_OVER)).after(previous)))
}

/// The previous holder that this claim replaced.
async fn taken_over(conn: &mut MySqlConnection, claim: &Claim) -> sqlx::Result<Option<Previous>> {
    let look = named!(
        "SELECT previous_holder, previous_fence, acquired_us - previous_expires_us AS expired_us
         FROM lockkit_lease
         WHERE name = :name AND token = :token AND previous_fence IS NOT NULL"
    );
    let look = look.with(&[("name", &claim.key.as_bytes()), ("token", &claim.token.as_bytes().as_slice())]);
    let Some(row) = look.fetch_optional(conn).await? else { return Ok(None) };
    Ok(Some(Previous {
        holder: text(&row, "previous_holder")?,
        fence: fence(row.try_get("previous_fence")?),
        expired_for: duration(row.try_get("expired_us")?),
    }))
}

/// The columns of a held lease, as [`found`] reads them.
fn columns() -> String {
    format!("name, token, holder, fence, acquired_us, {NOW} AS now_us, expires_us, ttl_us, renewals")
}

fn found(row: &MySqlRow) -> sqlx::Result<Found> {
    Ok(held(row)?.found())
}

fn held(row: &MySqlRow) -> sqlx::Result<HeldRow<'_>> {
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

/// The driver returns text in VARBINARY columns as bytes.
fn text(row: &MySqlRow, column: &str) -> sqlx::Result<String> {
    Ok(String::from_utf8_lossy(row.try_get(column)?).into_owned())
}
