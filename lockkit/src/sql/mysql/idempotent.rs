//! Stored answers on MySQL and MariaDB. The row of an answer is also its lock.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor, MySql, MySqlConnection, Row, mysql::MySqlRow};

use super::{
    NOW, Session,
    text::{Statement, Value, literal, named},
};
use crate::{
    sql::{IdempotentStatements, StoredAnswer, units::micros},
    value::key::Key,
};

impl IdempotentStatements for MySql {
    async fn answer_look(
        conn: &mut MySqlConnection,
        session: &Session,
        key: &Key,
    ) -> sqlx::Result<Option<StoredAnswer>> {
        let row = match session {
            Session::OfUser => look().with(&[("name", &key.as_bytes())]).fetch_optional(conn).await?,
            // There, the look begins a transaction. A message of several statements takes no bound values.
            Session::OfBegin => {
                let look = look_at(&literal(key));
                sqlx::raw_sql(AssertSqlSafe(look + "; COMMIT")).fetch_all(conn).await?.pop()
            }
        };
        row.as_ref().map(stored).transpose()
    }

    async fn answer_look_locked(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<StoredAnswer>> {
        // The mark of a transaction is the savepoint of `begin`, which the commit looks for.
        let row = look().with(&[("name", &key.as_bytes())]).fetch_optional(conn).await?;
        row.as_ref().map(stored).transpose()
    }

    async fn answer_begin(
        conn: &mut MySqlConnection,
        key: &Key,
        fingerprint: &[u8],
        keep: Duration,
    ) -> sqlx::Result<()> {
        // Assignments are made from left to right: `keep_until_us` is read before it is written.
        let begin = named!(
            "INSERT INTO lockkit_answer (name, fingerprint, answer, made_us, keep_until_us)
             VALUES (:name, :fingerprint, NULL, {NOW}, {NOW} + :keep)
             ON DUPLICATE KEY UPDATE
                 fingerprint = VALUES(fingerprint), answer = NULL,
                 made_us = IF(keep_until_us > {NOW}, made_us, VALUES(made_us)),
                 keep_until_us = VALUES(keep_until_us)"
        );
        let (name, keep) = (key.as_bytes(), micros(keep));
        let begin = begin.with(&[("name", &name), ("fingerprint", &fingerprint), ("keep", &keep)]);
        begin.execute(conn).await.map(drop)
    }

    async fn answer_store(
        conn: &mut MySqlConnection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
        _is_marked: bool,
    ) -> sqlx::Result<bool> {
        // The row is there: the lock has inserted it, if no answer had expired. It is gone if its transaction was
        // rolled back since. With autocommit on, the transaction of `begin` has ended, and this statement would be
        // committed by itself.
        let store = named!(
            "UPDATE lockkit_answer
             SET fingerprint = :fingerprint, answer = :answer, made_us = {NOW}, keep_until_us = {NOW} + :keep
             WHERE name = :name AND @@autocommit = 0"
        );
        let keep = micros(keep);
        let name = key.as_bytes();
        let values: &[(&str, &dyn Value)] =
            &[("name", &name), ("fingerprint", &fingerprint), ("answer", &answer), ("keep", &keep)];
        Ok(store.with(values).execute(conn).await?.rows_affected() == 1)
    }

    async fn answer_mark(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit_answer").await.map(drop)
    }

    async fn answer_unmark(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute("RELEASE SAVEPOINT lockkit_answer").await.map(drop)
    }

    async fn answer_undo(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute("ROLLBACK TO SAVEPOINT lockkit_answer").await.map(drop)
    }
}

fn look() -> &'static Statement {
    named!("{}", look_at(":name"))
}

fn look_at(name: &str) -> String {
    format!(
        "SELECT fingerprint, answer, made_us, {NOW} - made_us AS age_us
         FROM lockkit_answer
         WHERE name = {name} AND keep_until_us > {NOW}"
    )
}

fn stored(row: &MySqlRow) -> sqlx::Result<StoredAnswer> {
    Ok(StoredAnswer {
        fingerprint: row.try_get("fingerprint")?,
        answer: row.try_get("answer")?,
        made_us: row.try_get("made_us")?,
        age_us: row.try_get("age_us")?,
    })
}
