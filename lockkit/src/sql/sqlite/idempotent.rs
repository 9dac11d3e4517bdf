//! Stored answers on SQLite.

use std::time::Duration;

use sqlx::{Row, Sqlite, SqliteConnection};

use super::NOW;
use crate::{
    sql::{IdempotentStatements, StoredAnswer, statement::statement, units::micros},
    value::key::Key,
};

impl IdempotentStatements for Sqlite {
    async fn answer_look(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        let look =
            statement!("SELECT fingerprint, answer FROM lockkit_answer WHERE name = ?1 AND keep_until_us > {NOW}");
        let row = sqlx::query(look).bind(key.as_str()).fetch_optional(conn).await?;
        row.map(|it| Ok(StoredAnswer { fingerprint: it.try_get(0)?, answer: it.try_get(1)? })).transpose()
    }

    async fn answer_store(
        conn: &mut SqliteConnection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
    ) -> sqlx::Result<()> {
        let store = statement!(
            "INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
             VALUES (?1, ?2, ?3, {NOW}, {NOW} + ?4)
             ON CONFLICT (name) DO UPDATE SET
                 fingerprint = excluded.fingerprint, answer = excluded.answer,
                 made_us = excluded.made_us, keep_until_us = excluded.keep_until_us"
        );
        let store = sqlx::query(store).bind(key.as_str()).bind(fingerprint).bind(answer);
        store.bind(micros(keep)).execute(conn).await.map(drop)
    }
}
