//! Stored answers on MySQL and MariaDB. The row of an answer is also its lock.

use std::time::Duration;

use sqlx::{MySql, MySqlConnection, Row};

use super::{
    NOW,
    text::{Value, named},
};
use crate::{
    sql::{IdempotentStatements, StoredAnswer, units::micros},
    value::key::Key,
};

impl IdempotentStatements for MySql {
    async fn answer_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        let look =
            named!("SELECT fingerprint, answer FROM lockkit_answer WHERE name = :name AND keep_until_us > {NOW}");
        let row = look.with(&[("name", &key.as_bytes())]).fetch_optional(conn).await?;
        row.map(|it| Ok(StoredAnswer { fingerprint: it.try_get(0)?, answer: it.try_get(1)? })).transpose()
    }

    async fn answer_store(
        conn: &mut MySqlConnection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
    ) -> sqlx::Result<()> {
        // The row is there: the lock has inserted it, if no answer had expired. But its transaction may have been
        // rolled back since, which the commit will report.
        let store = named!(
            "INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
             VALUES (:name, :fingerprint, :answer, {NOW}, {NOW} + :keep)
             ON DUPLICATE KEY UPDATE
                 fingerprint = VALUES(fingerprint), answer = VALUES(answer),
                 made_us = VALUES(made_us), keep_until_us = VALUES(keep_until_us)"
        );
        let keep = micros(keep);
        let name = key.as_bytes();
        let values: &[(&str, &dyn Value)] =
            &[("name", &name), ("fingerprint", &fingerprint), ("answer", &answer), ("keep", &keep)];
        store.with(values).execute(conn).await.map(drop)
    }
}
