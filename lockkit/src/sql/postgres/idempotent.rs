//! Stored answers on PostgreSQL.

use std::time::Duration;

use sqlx::{Executor, PgConnection, Postgres, Row, postgres::PgRow};

use super::{NOW, Session, Standby, pooler};
use crate::{
    sql::{IdempotentStatements, StoredAnswer, statement::statement, units::micros},
    value::key::Key,
};

impl IdempotentStatements for Postgres {
    async fn answer_look(conn: &mut PgConnection, _: &Session, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        let look = statement!(
            "SELECT fingerprint, answer, made_us, {NOW} - made_us AS age_us
             FROM lockkit_answer
             WHERE name = $1 AND keep_until_us > {NOW}"
        );
        let row = pooler::query(look).bind(key.as_str()).fetch_optional(conn).await?;
        row.as_ref().map(stored).transpose()
    }

    async fn answer_look_locked(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        let found = Self::answer_look(conn, &Session::default(), key).await?;
        if found.is_some() {
            return Ok(found);
        }
        let mark = statement!(
            "INSERT INTO lockkit_answer AS a (name, fingerprint, made_us, keep_until_us)
             VALUES ($1, '', txid_current(), 0)
             ON CONFLICT (name) DO UPDATE SET
                 answer = NULL, made_us = excluded.made_us, keep_until_us = excluded.keep_until_us
             WHERE a.keep_until_us <= {NOW}"
        );
        if pooler::query(mark).bind(key.as_str()).execute(conn).await?.rows_affected() == 0 {
            // There is an answer: a pooler has sent the look to a server that had not seen it.
            return Err(sqlx::Error::Configuration(Standby.into()));
        }
        Ok(None)
    }

    async fn answer_begin(conn: &mut PgConnection, key: &Key, fingerprint: &[u8], keep: Duration) -> sqlx::Result<()> {
        // What is done outside must not outlive the knowledge that it has begun. Every setting but `off` waits for the
        // server's own disk. https://www.postgresql.org/docs/current/runtime-config-wal.html#GUC-SYNCHRONOUS-COMMIT
        let begin = statement!(
            "INSERT INTO lockkit_answer AS a (name, fingerprint, answer, made_us, keep_until_us)
             VALUES ($1, $2, NULL, {NOW}, {NOW} + $3)
             ON CONFLICT (name) DO UPDATE SET
                 fingerprint = excluded.fingerprint, answer = NULL,
                 made_us = CASE WHEN a.keep_until_us > {NOW} THEN a.made_us ELSE excluded.made_us END,
                 keep_until_us = excluded.keep_until_us
             RETURNING CASE current_setting('synchronous_commit')
                 WHEN 'off' THEN set_config('synchronous_commit', 'on', true)
             END"
        );
        let begin = pooler::query(begin).bind(key.as_str()).bind(fingerprint).bind(micros(keep));
        begin.execute(conn).await.map(drop)
    }

    async fn answer_store(
        conn: &mut PgConnection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
        is_marked: bool,
    ) -> sqlx::Result<bool> {
        let store = if is_marked {
            // `pg_current_xact_id` is not in PostgreSQL 12. A transaction that has failed refuses the statement.
            statement!(
                "UPDATE lockkit_answer
                 SET fingerprint = $2, answer = $3, made_us = {NOW}, keep_until_us = {NOW} + $4
                 WHERE name = $1 AND keep_until_us = 0 AND made_us = txid_current()"
            )
        } else {
            statement!(
                "INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
                 VALUES ($1, $2, $3, {NOW}, {NOW} + $4)
                 ON CONFLICT (name) DO UPDATE SET
                     fingerprint = excluded.fingerprint, answer = excluded.answer,
                     made_us = excluded.made_us, keep_until_us = excluded.keep_until_us"
            )
        };
        let store = pooler::query(store).bind(key.as_str()).bind(fingerprint).bind(answer);
        Ok(store.bind(micros(keep)).execute(conn).await?.rows_affected() == 1)
    }

    async fn answer_mark(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit_answer").await.map(drop)
    }

    async fn answer_unmark(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("RELEASE SAVEPOINT lockkit_answer").await.map(drop)
    }

    async fn answer_undo(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("ROLLBACK TO SAVEPOINT lockkit_answer").await.map(drop)
    }
}

fn stored(row: &PgRow) -> sqlx::Result<StoredAnswer> {
    Ok(StoredAnswer {
        fingerprint: row.try_get("fingerprint")?,
        answer: row.try_get("answer")?,
        made_us: row.try_get("made_us")?,
        age_us: row.try_get("age_us")?,
    })
}
