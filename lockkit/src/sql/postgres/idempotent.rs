//! Stored answers on PostgreSQL.

use std::time::Duration;

use sqlx::{Executor, PgConnection, Postgres, Row, postgres::PgRow};

use super::{NOW, Session, pooler};
use crate::{
    sql::{Granted, IdempotentStatements, Mark, StoredAnswer, statement::statement, units::micros},
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

    async fn answer_look_locked(
        conn: &mut PgConnection,
        key: &Key,
        granted: Granted,
    ) -> sqlx::Result<(Mark, Option<StoredAnswer>)> {
        let Granted::In(number) = granted else { unreachable!("BUG: the lock of an answer reports its transaction") };
        let look = statement!(
            "SELECT fingerprint, answer, made_us, {NOW} - made_us AS age_us, keep_until_us > {NOW} AS is_kept
             FROM lockkit_answer
             WHERE name = $1"
        );
        let row = pooler::query(look).bind(key.as_str()).fetch_optional(conn).await?;
        let mark = Mark::Number { number, has_row: row.is_some() };
        let found = match row {
            Some(row) if row.try_get("is_kept")? => Some(stored(&row)?),
            _ => None,
        };
        Ok((mark, found))
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
        mark: Option<Mark>,
    ) -> sqlx::Result<bool> {
        macro_rules! store {
            ($over:expr) => {
                // No transaction has the number 0. A transaction that has failed refuses the statement.
                statement!(
                    "INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
                     SELECT $1, $2, $3, {NOW}, {NOW} + $4
                     WHERE $5 IN (0, txid_current()){over}",
                    over = $over
                )
            };
        }
        let (number, has_row) = match mark {
            Some(Mark::Number { number, has_row }) => (number, has_row),
            Some(Mark::Savepoint) | None => (0, true),
        };
        // Without ON CONFLICT, PostgreSQL need not look for a row twice, nor confirm that there was none.
        let store = if has_row {
            // A pooler may have sent the look to a standby that had not seen the last answer.
            store!(format!(
                "
                     ON CONFLICT (name) DO UPDATE SET
                         fingerprint = excluded.fingerprint, answer = excluded.answer,
                         made_us = excluded.made_us, keep_until_us = excluded.keep_until_us
                     WHERE $5 = 0 OR lockkit_answer.answer IS NULL OR lockkit_answer.keep_until_us <= {NOW}"
            ))
        } else {
            store!("")
        };
        let store = pooler::query(store).bind(key.as_str()).bind(fingerprint).bind(answer);
        Ok(store.bind(micros(keep)).bind(number).execute(conn).await?.rows_affected() == 1)
    }

    async fn answer_mark(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit_answer").await.map(drop)
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
