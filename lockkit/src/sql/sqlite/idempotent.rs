//! Stored answers on SQLite.

use std::time::Duration;

use sqlx::{Executor, Row, Sqlite, SqliteConnection, sqlite::SqliteRow};

use super::{NOW, Session};
use crate::{
    sql::{IdempotentStatements, StoredAnswer, statement::statement, units::micros},
    value::key::Key,
};

impl IdempotentStatements for Sqlite {
    async fn answer_look(conn: &mut SqliteConnection, _: &Session, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        let look = statement!(
            "SELECT fingerprint, answer, made_us, {NOW} - made_us AS age_us
             FROM lockkit_answer
             WHERE name = ?1 AND keep_until_us > {NOW}"
        );
        let row = sqlx::query(look).bind(key.as_str()).fetch_optional(conn).await?;
        row.as_ref().map(stored).transpose()
    }

    async fn answer_look_locked(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        // The savepoint ends with its transaction. In one message: each costs a change of threads.
        let look = statement!(
            "SAVEPOINT lockkit_answer;
             SELECT fingerprint, answer, made_us, {NOW} - made_us AS age_us
             FROM lockkit_answer
             WHERE name = ?1 AND keep_until_us > {NOW}"
        );
        let row = sqlx::query(look).bind(key.as_str()).fetch_optional(conn).await?;
        row.as_ref().map(stored).transpose()
    }

    async fn answer_begin(
        conn: &mut SqliteConnection,
        key: &Key,
        fingerprint: &[u8],
        keep: Duration,
    ) -> sqlx::Result<()> {
        let begin = statement!(
            "INSERT INTO lockkit_answer AS a (name, fingerprint, answer, made_us, keep_until_us)
             VALUES (?1, ?2, NULL, {NOW}, {NOW} + ?3)
             ON CONFLICT (name) DO UPDATE SET
                 fingerprint = excluded.fingerprint, answer = NULL,
                 made_us = CASE WHEN a.keep_until_us > {NOW} THEN a.made_us ELSE excluded.made_us END,
                 keep_until_us = excluded.keep_until_us"
        );
        let begin = sqlx::query(begin).bind(key.as_str()).bind(fingerprint).bind(micros(keep));
        begin.execute(conn).await.map(drop)
    }

    async fn answer_store(
        conn: &mut SqliteConnection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
        is_marked: bool,
    ) -> sqlx::Result<bool> {
        macro_rules! store {
            ($before:literal) => {
                statement!(
                    "{before}INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
                     VALUES (?1, ?2, ?3, {NOW}, {NOW} + ?4)
                     ON CONFLICT (name) DO UPDATE SET
                         fingerprint = excluded.fingerprint, answer = excluded.answer,
                         made_us = excluded.made_us, keep_until_us = excluded.keep_until_us",
                    before = $before
                )
            };
        }
        // If a statement fails, the rest of the message is not run.
        let store = if is_marked { store!("RELEASE lockkit_answer; ") } else { store!("") };
        let store = sqlx::query(store).bind(key.as_str()).bind(fingerprint).bind(answer);
        store.bind(micros(keep)).execute(conn).await.map(|_| true)
    }

    async fn answer_mark(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit_answer").await.map(drop)
    }

    async fn answer_unmark(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        conn.execute("RELEASE lockkit_answer").await.map(drop)
    }

    async fn answer_undo(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        conn.execute("ROLLBACK TO SAVEPOINT lockkit_answer").await.map(drop)
    }
}

fn stored(row: &SqliteRow) -> sqlx::Result<StoredAnswer> {
    Ok(StoredAnswer {
        fingerprint: row.try_get("fingerprint")?,
        answer: row.try_get("answer")?,
        made_us: row.try_get("made_us")?,
        age_us: row.try_get("age_us")?,
    })
}
