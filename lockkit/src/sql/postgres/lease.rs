//! Leases on PostgreSQL.
//!
//! A waiter must not write: an `INSERT … ON CONFLICT DO UPDATE … WHERE` that changes no row still takes a transaction
//! id and waits for the disk. So a claim locks the row with `SKIP LOCKED` only if it is free, and otherwise reads it.
//! While the last claims of a pool found released leases, one UPDATE by key goes first, at half of the server's work;
//! if it takes nothing, the full statement follows.
//!
//! A release that may meet a pin locks the row as strictly as a claim does, with `SKIP LOCKED`: half as much work again
//! as the plain UPDATE that follows where nothing can have pinned the lease. The table has no CHECK constraint: the
//! server parses and plans it anew in each statement that writes, a tenth of the work for a lease.

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row, postgres::PgRow};

use super::{NOW, notify_waiters, pooler::query, waiters_lock};
use crate::{
    lease::{
        life::state::Pin,
        store::{Acquired, AcquiredAll, Answer, Claim, Grant, LeaseRecord, Previous, Release, Renewal},
    },
    sql::{
        LeaseStatements,
        lease::{
            FENCES, Found, HeldRow, LastClaims, PAGE, granted, lease_release_granted, leases_found, prefix_end,
            previous,
        },
        statement::statement,
        units::{duration, fence, micros},
    },
    value::{key::Key, token::Token},
};

// The row locks that hold a lease (https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS): a
// transaction that pins it has FOR KEY SHARE. That is compatible with the FOR NO KEY UPDATE of renewals, and conflicts
// with the FOR UPDATE of claims, releases and sweeps. Where no transaction can have pinned the lease, claims and
// releases are a plain UPDATE, which is a FOR NO KEY UPDATE too.

/// How long a plain UPDATE waits for a row that another session has locked.
const MOST_WAIT: &str = "100ms";

/// Whether the last holder of the row's lease did not release it: a token without an owner begins with eight zeros.
const KEPT: &str = r"token >= '\x0000000000000001'";

/// Selects the leases held now, at most `$1` of them.
fn list(condition: &str) -> String {
    format!(
        "SELECT {columns}
         FROM lockkit_lease
         WHERE {condition} token IS NOT NULL AND expires_us > {NOW}
         ORDER BY name
         LIMIT $1",
        columns = columns(),
    )
}

/// Assigns the expiry of a grant or renewal: the ttl from now, or the old expiry if that is later and was not written
/// ahead of the clock. `greatest` and `least` ignore NULL.
fn expires(ttl: &str) -> String {
    format!(
        "expires_us = greatest(least(l.expires_us, {NOW} + l.ttl_us), {NOW} + {ttl}),
         ttl_us = CASE WHEN least(l.expires_us, {NOW} + l.ttl_us) > {NOW} + {ttl} THEN l.ttl_us ELSE {ttl} END"
    )
}

/// As [`expires`], of a renewal, which also corrects a time of the grant that was written ahead of the clock.
fn lives(ttl: &str) -> String {
    format!(
        "{expires},
         acquired_us = l.acquired_us - greatest(0, l.expires_us - l.ttl_us - {NOW})",
        expires = expires(ttl)
    )
}

/// The fence of the grant after the one with the fence `last`. Doubling it fails with an overflow once it reaches 2^62,
/// which costs less than a CHECK constraint: the server would parse and plan that in each statement.
fn next_fence(last: &str) -> String {
    format!("greatest(({last} + {FENCES}) * 2 / 2, {NOW})")
}

/// Assigns the columns of a release. The token `nobody` holds the lease for the rest of `min_hold`, and stays in the
/// row if `may_be_pinned`.
fn stays_taken(min_hold: &str, nobody: &str, may_be_pinned: &str) -> String {
    let left = format!("({min_hold} - greatest(0, {NOW} - l.acquired_us))");
    format!(
        "token = CASE WHEN {may_be_pinned} OR {left} > 0 THEN {nobody} END,
         expires_us = CASE WHEN {left} > 0 THEN {NOW} + {left} ELSE 0 END,
         ttl_us = CASE WHEN {left} > 0 THEN {left} ELSE l.ttl_us END"
    )
}

/// A condition of [`claim_many`]: all of the leases are free.
const ALL_OR_NONE: &str = "(SELECT count(*) FROM free) + (SELECT count(*) FROM missing) = cardinality($1)";

/// Takes those of several leases that are free, if the condition is true.
fn claim_many(condition: &str) -> String {
    format!(
        "WITH asked AS MATERIALIZED (
             SELECT * FROM unnest($1::text[], $2::bytea[], $4::bigint[])
                 WITH ORDINALITY AS a (name, token, ttl, number)
             ), free AS MATERIALIZED (
             SELECT l.name, a.token AS new_token, a.ttl, l.holder, l.fence, l.token, l.expires_us
             FROM lockkit_lease AS l JOIN asked AS a USING (name)
             WHERE l.expires_us <= {NOW} OR l.token = a.token
             ORDER BY l.name
             FOR UPDATE OF l SKIP LOCKED
             ), missing AS MATERIALIZED (
             SELECT name, token, ttl FROM asked AS a
             WHERE NOT EXISTS (SELECT FROM lockkit_lease AS l WHERE l.name = a.name)
             ), every AS MATERIALIZED (
             SELECT {condition} AS one
             ), taken AS (
             UPDATE lockkit_lease AS l
             SET fence = CASE WHEN l.token = free.new_token THEN l.fence ELSE {next} END,
                 acquired_us = CASE WHEN l.token = free.new_token THEN l.acquired_us ELSE {NOW} END,
                 renewals = CASE WHEN l.token = free.new_token THEN l.renewals + 1 ELSE 0 END,
                 token = free.new_token, holder = $3, {expires}
             FROM free, every
             WHERE l.name = free.name AND every.one
             RETURNING l.name, l.fence, free.holder, free.fence AS old_fence,
                 nullif(free.token, free.new_token) AS old_token, {NOW} - free.expires_us AS expired_us
             ), made AS (
             INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
             SELECT missing.name, missing.token, $3, {NOW}, {NOW}, {NOW} + missing.ttl, missing.ttl
             FROM missing, every
             WHERE every.one
             ORDER BY missing.name
             ON CONFLICT DO NOTHING
             RETURNING name, fence
             ), granted AS (
             SELECT name, fence, holder, old_fence, old_token, expired_us FROM taken
             UNION ALL
             SELECT name, fence, '', 0, NULL, 0 FROM made
             )
             SELECT g.name IS NOT NULL AS granted, g.fence, g.holder, g.old_fence, g.old_token, g.expired_us,
             greatest(0, l.expires_us - {NOW}) AS left_us, coalesce(l.expires_us - l.ttl_us > {NOW}, false) AS ahead
             FROM asked AS a LEFT JOIN granted AS g USING (name) LEFT JOIN lockkit_lease AS l USING (name)
             ORDER BY a.number",
        next = next_fence("l.fence"),
        expires = expires("free.ttl")
    )
}

/// Sends a statement of [`claim_many`]. The claims have one holder.
async fn claim_rows(conn: &mut PgConnection, text: &'static str, claims: &[Claim]) -> sqlx::Result<Vec<PgRow>> {
    let Some(Claim { holder, .. }) = claims.first() else { return Ok(Vec::new()) };
    let names: Vec<_> = claims.iter().map(|it| it.key.as_str()).collect();
    let tokens: Vec<_> = claims.iter().map(|it| it.token.as_bytes().as_slice()).collect();
    let ttls: Vec<_> = claims.iter().map(|it| micros(it.ttl)).collect();
    query(text).bind(names).bind(tokens).bind(&**holder).bind(ttls).fetch_all(conn).await
}

impl LeaseStatements for Postgres {
    const BATCHES_NEW: bool = true;

    async fn lease_acquire(
        conn: &mut PgConnection,
        _grammar: (),
        claim: &Claim,
        last: &LastClaims,
    ) -> sqlx::Result<Acquired> {
        if !last.were_of_released() {
            return acquire_any(conn, claim, last).await;
        }
        // Waits only for a statement of another claim: a transaction that pins or releases a lease locks a row that has
        // a token for all other sessions, see `lease_release_in_tx`.
        let fence_of_released: Option<i64> = query(statement!(
            "UPDATE lockkit_lease
             SET fence = {next}, acquired_us = {NOW}, renewals = 0,
                 token = $2, holder = $3, ttl_us = $4, expires_us = {NOW} + $4
             WHERE name = $1 AND token IS NULL AND expires_us <= {NOW}
               AND (SELECT set_config('lock_timeout', '{MOST_WAIT}', true)) IS NOT NULL
             RETURNING fence",
            next = next_fence("fence")
        ))
        .bind(claim.key.as_str())
        .bind(claim.token.as_bytes().as_slice())
        .bind(&*claim.holder)
        .bind(micros(claim.ttl))
        .fetch_optional(&mut *conn)
        .await?
        .map(|row| row.try_get("fence"))
        .transpose()?;
        if let Some(number) = fence_of_released {
            return Ok(Acquired::Granted(granted(fence(number))));
        }
        last.note(false);
        acquire_any(conn, claim, last).await
    }

    async fn lease_acquire_all(conn: &mut PgConnection, grammar: (), claims: &[Claim]) -> sqlx::Result<AcquiredAll> {
        let rows = claim_rows(conn, statement!("{text}", text = claim_many(ALL_OR_NONE)), claims).await?;
        let mut grants = Vec::with_capacity(claims.len());
        let mut held: Option<AcquiredAll> = None;
        for (row, claim) in rows.iter().zip(claims) {
            if row.try_get("granted")? {
                grants.push(grant(row)?);
                continue;
            }
            let mut left = duration(row.try_get::<Option<i64>, _>("left_us")?.unwrap_or(0));
            if row.try_get("ahead")? {
                // The clock was set back: the look cuts the expiry.
                left = Self::lease_look(conn, &claim.key).await?.map_or(Duration::ZERO, |it| it.info.expires_in);
            }
            let free_in = (!left.is_zero()).then_some(left);
            // Report a lease that blocks this claim, not one that is free by itself.
            if held.is_none() || free_in.is_some() {
                held = Some(AcquiredAll::Held { key: claim.key.clone(), free_in });
            }
        }
        let Some(held) = held else {
            return Ok(AcquiredAll::Granted(grants));
        };
        if !grants.is_empty() {
            // Another process inserted one of the missing rows concurrently.
            lease_release_granted::<Self>(conn, grammar, claims).await?;
        }
        Ok(held)
    }

    async fn lease_acquire_each(
        conn: &mut PgConnection,
        _grammar: (),
        claims: &[Claim],
    ) -> sqlx::Result<Vec<Option<Acquired>>> {
        let rows = claim_rows(conn, statement!("{text}", text = claim_many("true")), claims).await?;
        let answer = |row: &PgRow| {
            if row.try_get("granted")? {
                return Ok(Some(Acquired::Granted(grant(row)?)));
            }
            let left = duration(row.try_get::<Option<i64>, _>("left_us")?.unwrap_or(0));
            // A free one was locked at the moment. After a step of the clock, a single claim cuts the expiry.
            let is_held = !left.is_zero() && !row.try_get::<bool, _>("ahead")?;
            Ok(is_held.then_some(Acquired::Held { free_in: Some(left) }))
        };
        rows.iter().map(answer).collect()
    }

    async fn lease_look(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Option<LeaseRecord>> {
        let row = query(statement!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE name = $1 AND token IS NOT NULL AND expires_us > {NOW}",
            columns = columns()
        ))
        .bind(key.as_str())
        .fetch_optional(&mut *conn)
        .await?;
        Ok(leases_found::<Self>(conn, row.iter().map(found)).await?.pop())
    }

    async fn lease_cut(conn: &mut PgConnection, key: &Key, expires_us: i64, ttl_us: i64) -> sqlx::Result<()> {
        query(statement!(
            "WITH ahead AS MATERIALIZED (
                 SELECT name, expires_us - ttl_us - {NOW} AS by FROM lockkit_lease
                 WHERE name = $1 AND expires_us = $2 AND ttl_us = $3 AND expires_us - ttl_us > {NOW}
                 FOR NO KEY UPDATE SKIP LOCKED
             )
             UPDATE lockkit_lease AS l
             SET expires_us = l.expires_us - ahead.by, acquired_us = l.acquired_us - ahead.by
             FROM ahead WHERE l.name = ahead.name"
        ))
        .bind(key.as_str())
        .bind(expires_us)
        .bind(ttl_us)
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn lease_renew(conn: &mut PgConnection, renewals: &[Renewal]) -> sqlx::Result<Vec<Answer>> {
        let names: Vec<_> = renewals.iter().map(|it| it.key.as_str()).collect();
        let tokens: Vec<_> = renewals.iter().map(|it| it.token.as_bytes().as_slice()).collect();
        let ttls: Vec<_> = renewals.iter().map(|it| micros(it.ttl)).collect();
        let rows = query(statement!(
            // `IN` looks in a hash table. The server expects few rows of `renewed`, and would join them by comparing
            // each with each.
            "WITH asked AS MATERIALIZED (
                 SELECT * FROM unnest($1::text[], $2::bytea[], $3::bigint[])
                     WITH ORDINALITY AS a (name, token, ttl, number)
             ), mine AS MATERIALIZED (
                 SELECT l.name, a.ttl FROM lockkit_lease AS l JOIN asked AS a USING (name, token)
                 WHERE l.expires_us > {NOW}
                 ORDER BY l.name
                 FOR NO KEY UPDATE OF l SKIP LOCKED
             ), renewed AS (
                 UPDATE lockkit_lease AS l
                 SET {lives}, renewals = l.renewals + 1
                 FROM mine WHERE l.name = mine.name
                 RETURNING l.name, l.token
             )
             SELECT (a.name, a.token) IN (SELECT name, token FROM renewed) AS done, l.name IS NOT NULL AS held
             FROM asked AS a
             LEFT JOIN lockkit_lease AS l ON l.name = a.name AND l.token = a.token AND l.expires_us > {NOW}
             ORDER BY a.number",
            lives = lives("mine.ttl")
        ))
        .bind(names)
        .bind(tokens)
        .bind(ttls)
        .fetch_all(conn)
        .await?;
        rows.iter().map(scoped).collect()
    }

    async fn lease_release(
        conn: &mut PgConnection,
        grammar: (),
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> sqlx::Result<Answer> {
        let release = Release { key: key.clone(), token, min_hold };
        Self::lease_release_all(conn, grammar, &[release], Pin::Possible)
            .await
            .map(|it| it.first().copied().unwrap_or(Answer::Gone))
    }

    async fn lease_release_unpinned(
        conn: &mut PgConnection,
        _grammar: (),
        key: &Key,
        token: Token,
    ) -> sqlx::Result<Answer> {
        // Waits for a renewal of this lease or for a claim, which are single statements. Its lock would not wait for a
        // transaction that pins the lease. Not waiting for the disk is safe here: if a crash undoes the release, the
        // lease expires after its ttl.
        let freed = query(statement!(
            // In a subquery, the settings are changed once. Otherwise a scan of a small table would change them for
            // each row.
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = $1 AND token = $2 AND expires_us > {NOW}
               AND (
                   SELECT set_config('synchronous_commit', 'off', true)
                       || set_config('lock_timeout', '{MOST_WAIT}', true)
               ) IS NOT NULL
             RETURNING {notify}",
            notify = notify_waiters("$3")
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(waiters_lock(key))
        .fetch_optional(conn)
        .await?;
        Ok(if freed.is_some() { Answer::Done } else { Answer::Gone })
    }

    async fn lease_release_all(
        conn: &mut PgConnection,
        _grammar: (),
        releases: &[Release],
        _pin: Pin,
    ) -> sqlx::Result<Vec<Answer>> {
        let names: Vec<_> = releases.iter().map(|it| it.key.as_str()).collect();
        let tokens: Vec<_> = releases.iter().map(|it| it.token.as_bytes().as_slice()).collect();
        let min_holds: Vec<_> = releases.iter().map(|it| micros(it.min_hold)).collect();
        let nobodies: Vec<_> = releases.iter().map(|_| Token::nobody()).collect();
        let nobodies: Vec<_> = nobodies.iter().map(|it| it.as_bytes().as_slice()).collect();
        let locks: Vec<_> = releases.iter().map(|it| waiters_lock(&it.key)).collect();
        let rows = query(statement!(
            "WITH asked AS MATERIALIZED (
                 SELECT * FROM unnest($1::text[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bigint[])
                     WITH ORDINALITY AS a (name, token, min_hold, nobody, lock_number, number)
             ), mine AS MATERIALIZED (
                 SELECT l.name, l.token, a.min_hold, a.nobody
                 FROM lockkit_lease AS l JOIN asked AS a USING (name, token)
                 WHERE l.expires_us > {NOW}
                   AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
                 ORDER BY l.name
                 FOR UPDATE OF l SKIP LOCKED
             ), freed AS (
                 UPDATE lockkit_lease AS l
                 SET {stays_taken}
                 FROM mine WHERE l.name = mine.name
                 RETURNING mine.name, mine.token
             )
             SELECT a.done, l.name IS NOT NULL AS held,
                 CASE WHEN a.done AND NOT pg_try_advisory_xact_lock(a.lock_number)
                     THEN pg_notify('lockkit_freed', a.name)::text
                 END AS notified
             FROM (SELECT *, (name, token) IN (SELECT name, token FROM freed) AS done FROM asked) AS a
             LEFT JOIN lockkit_lease AS l ON l.name = a.name AND l.token = a.token AND l.expires_us > {NOW}
             ORDER BY a.number",
            stays_taken = stays_taken("mine.min_hold", "mine.nobody", "false")
        ))
        .bind(names)
        .bind(tokens)
        .bind(min_holds)
        .bind(nobodies)
        .bind(locks)
        .fetch_all(conn)
        .await?;
        rows.iter().map(scoped).collect()
    }

    async fn lease_pin(conn: &mut PgConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        // In REPEATABLE READ and SERIALIZABLE the snapshot is fixed, and a concurrent renewal would make the
        // transaction's own writes to the row fail. There the row is written now, and renewals wait for the
        // transaction.
        let row = query(statement!(
            "WITH pinned AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND token = $2 AND expires_us > {NOW}
                   AND current_setting('transaction_isolation') LIKE 'read%'
                 FOR KEY SHARE
             ), written AS (
                 UPDATE lockkit_lease AS l
                 SET {lives}, renewals = l.renewals + 1
                 WHERE name = $1 AND token = $2 AND expires_us > {NOW}
                   AND current_setting('transaction_isolation') NOT LIKE 'read%'
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM pinned) OR EXISTS (SELECT FROM written) AS done",
            lives = lives("$3")
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .fetch_one(conn)
        .await?;
        row.try_get("done")
    }

    async fn lease_release_in_tx(
        conn: &mut PgConnection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pin: Pin,
    ) -> sqlx::Result<bool> {
        // This lock does not wait for another transaction that pins the lease. Then nobody's token stays in the row, so
        // that the next claim is one that does not take it before the end of that transaction.
        let freed = query(statement!(
            "UPDATE lockkit_lease AS l
             SET {stays_taken}
             WHERE name = $1 AND token = $2 AND ($6 OR expires_us > {NOW})
             RETURNING {notify}",
            notify = notify_waiters("$3"),
            stays_taken = stays_taken("$4", "$5", "$7")
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(waiters_lock(key))
        .bind(micros(min_hold))
        .bind(Token::nobody().as_bytes().as_slice())
        .bind(pin == Pin::Certain)
        .bind(pin != Pin::No)
        .fetch_optional(conn)
        .await?;
        Ok(freed.is_some())
    }

    async fn lease_list(conn: &mut PgConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<LeaseRecord>> {
        let rows = if prefix.is_empty() {
            // No upper bound: no text is greater than all others in every encoding.
            query(statement!("{list}", list = list(""))).bind(i64::from(limit)).fetch_all(&mut *conn).await?
        } else {
            query(statement!("{list}", list = list("starts_with(name, $2) AND name >= $2 AND name < $3 AND")))
                .bind(i64::from(limit))
                .bind(prefix)
                .bind(prefix_end(prefix))
                .fetch_all(&mut *conn)
                .await?
        };
        leases_found::<Self>(conn, rows.iter().map(found)).await
    }

    async fn lease_expired(conn: &mut PgConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<(Key, Previous)>> {
        let rows = query(statement!(
            "SELECT {columns}
             FROM lockkit_lease
             WHERE starts_with(name, $1) AND {KEPT} AND expires_us <= {NOW}
             ORDER BY name
             LIMIT $2",
            columns = columns()
        ));
        let rows = rows.bind(prefix).bind(i64::from(limit)).fetch_all(conn).await?;
        rows.iter().map(|it| Ok(held(it)?.expired())).collect()
    }

    async fn lease_sweep(conn: &mut PgConnection, retention: Duration, limit: u32, after: &str) -> sqlx::Result<u64> {
        // Fences above the clock must be kept: the next fence would be made from the clock, and be lower.
        let done = query(statement!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM lockkit_lease
                 WHERE expires_us < {NOW} - $1 AND fence < {NOW} - $1 - {FENCES} AND name IN (
                     SELECT name FROM (
                         SELECT name, expires_us, fence FROM lockkit_lease WHERE name > $3 ORDER BY name LIMIT {PAGE}
                     ) AS page
                     WHERE expires_us < {NOW} - $1 AND fence < {NOW} - $1 - {FENCES}
                     ORDER BY name
                     LIMIT $2
                 )
                 FOR UPDATE SKIP LOCKED
             )"
        ))
        .bind(micros(retention))
        .bind(i64::from(limit))
        .bind(after)
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }

    async fn answers_sweep(conn: &mut PgConnection, limit: u32) -> sqlx::Result<u64> {
        // The clock in a subselect, which is evaluated once: a volatile function is no condition for an index.
        let delete = statement!(
            "DELETE FROM lockkit_answer WHERE name IN (
                 SELECT name FROM lockkit_answer WHERE keep_until_us <= (SELECT {NOW}) ORDER BY keep_until_us LIMIT $1
                 FOR UPDATE SKIP LOCKED
             )"
        );
        Ok(query(delete).bind(i64::from(limit)).execute(conn).await?.rows_affected())
    }

    async fn lease_page_end(conn: &mut PgConnection, after: &str) -> sqlx::Result<Option<String>> {
        let row =
            query(statement!("SELECT name FROM lockkit_lease WHERE name > $1 ORDER BY name LIMIT 1 OFFSET {PAGE} - 1"))
                .bind(after)
                .fetch_optional(conn)
                .await?;
        row.map(|it| it.try_get("name")).transpose()
    }
}

/// Takes a lease that was released, has expired, is held by this claim already, or has no row yet.
async fn acquire_any(conn: &mut PgConnection, claim: &Claim, last: &LastClaims) -> sqlx::Result<Acquired> {
    let row = query(statement!(
        "WITH free AS MATERIALIZED (
             SELECT name, holder, fence, token, expires_us FROM lockkit_lease
             WHERE name = $1 AND (expires_us <= {NOW} OR token = $2)
             FOR UPDATE SKIP LOCKED
         ), taken AS (
             UPDATE lockkit_lease AS l
             SET fence = CASE WHEN l.token = $2 THEN l.fence ELSE {next} END,
                 acquired_us = CASE WHEN l.token = $2 THEN l.acquired_us ELSE {NOW} END,
                 renewals = CASE WHEN l.token = $2 THEN l.renewals + 1 ELSE 0 END,
                 token = $2, holder = $3, {expires}
             FROM free
             WHERE l.name = free.name
             RETURNING l.fence, free.holder, free.fence AS old_fence, nullif(free.token, $2) AS old_token,
                 {NOW} - free.expires_us AS expired_us
         ), made AS (
             INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, ttl_us)
             SELECT $1, $2, $3, {NOW}, {NOW}, {NOW} + $4, $4
             WHERE NOT EXISTS (SELECT FROM lockkit_lease WHERE name = $1)
             ON CONFLICT DO NOTHING
             RETURNING fence
         )
         SELECT true AS granted, fence, holder, old_fence, old_token, expired_us, 0::bigint AS left_us,
             false AS ahead
         FROM taken
         UNION ALL
         SELECT true, fence, '', 0, NULL, 0, 0, false FROM made
         UNION ALL
         SELECT false, fence, '', 0, NULL, 0, expires_us - {NOW}, coalesce(expires_us - ttl_us > {NOW}, false)
         FROM lockkit_lease
         WHERE name = $1 AND NOT EXISTS (SELECT FROM taken) AND NOT EXISTS (SELECT FROM made)",
        next = next_fence("l.fence"),
        expires = expires("$4")
    ))
    .bind(claim.key.as_str())
    .bind(claim.token.as_bytes().as_slice())
    .bind(&*claim.holder)
    .bind(micros(claim.ttl))
    .fetch_optional(&mut *conn)
    .await?;
    let Some(row) = row else {
        // Another process inserted the row concurrently.
        return Ok(Acquired::Held { free_in: None });
    };
    if row.try_get("granted")? {
        let had_row = row.try_get::<i64, _>("old_fence")? > 0;
        let had_token = row.try_get::<Option<Vec<u8>>, _>("old_token")?.is_some();
        last.note(had_row && !had_token);
        return Ok(Acquired::Granted(grant(&row)?));
    }
    if row.try_get("ahead")? {
        // The clock was set back since the grant. The look cuts the expiry.
        let held = Postgres::lease_look(conn, &claim.key).await?;
        return Ok(Acquired::Held { free_in: held.map(|it| it.info.expires_in) });
    }
    // No time is left if the lease has expired but another transaction still has the row locked. When it will be free
    // is unknown.
    let left = duration(row.try_get("left_us")?);
    Ok(Acquired::Held { free_in: (!left.is_zero()).then_some(left) })
}

/// The columns of a held lease, as [`found`] reads them.
fn columns() -> String {
    format!("name, token, holder, fence, acquired_us, {NOW} AS now_us, expires_us, ttl_us, renewals")
}

fn found(row: &PgRow) -> sqlx::Result<Found> {
    Ok(held(row)?.found())
}

fn held(row: &PgRow) -> sqlx::Result<HeldRow<'_>> {
    // As it was sent: in a database without an encoding, text need not be UTF-8.
    let text = |column| row.try_get_raw(column)?.as_bytes().map_err(sqlx::Error::Decode);
    Ok(HeldRow {
        name: text("name")?,
        token: row.try_get("token")?,
        holder: text("holder")?,
        fence: row.try_get("fence")?,
        acquired_us: row.try_get("acquired_us")?,
        now_us: row.try_get("now_us")?,
        expires_us: row.try_get("expires_us")?,
        ttl_us: row.try_get("ttl_us")?,
        renewals: row.try_get("renewals")?,
    })
}

fn grant(row: &PgRow) -> sqlx::Result<Grant> {
    let previous = previous(
        row.try_get("holder")?,
        row.try_get("old_fence")?,
        row.try_get::<Option<Vec<u8>>, _>("old_token")?.as_deref(),
        row.try_get("expired_us")?,
    );
    Ok(granted(fence(row.try_get("fence")?)).after(previous))
}

fn scoped(row: &PgRow) -> sqlx::Result<Answer> {
    Ok(match (row.try_get("done")?, row.try_get("held")?) {
        (true, _) => Answer::Done,
        (false, true) => Answer::Busy,
        (false, false) => Answer::Gone,
    })
}
