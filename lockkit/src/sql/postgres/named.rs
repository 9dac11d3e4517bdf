//! Named locks on PostgreSQL.
//!
//! The lock of an answer is an advisory lock, too. Nearly each answer has a new name, so the first statement also
//! inserts its row: the row is proof that there is no answer, and marks the transaction.

use sqlx::{PgConnection, Postgres, Row, postgres::PgRow};

use super::{Standby, advisory_number, feigned, holder, holder_since, lock_timeout, pooler};
use crate::{
    policy::Wait,
    sql::{Granted, NamedStatements, Names, Sharing, statement::statement},
    value::{holder::LockHolder, key::Key},
};

fn number(of: Names, key: &Key) -> i64 {
    let namespace = match of {
        Names::Locks => "named",
        Names::Answers { .. } => "answer",
    };
    advisory_number(namespace, key)
}

/// Takes the lock of an answer and inserts its row, which has expired and holds the number of this transaction. Does
/// neither if another transaction has the lock, and only takes the lock if there is a row.
const INSERT_IF_FREE: &str = "
    INSERT INTO lockkit_answer (name, fingerprint, made_us, keep_until_us)
    SELECT $2, '', txid_current(), 0
    WHERE pg_try_advisory_xact_lock($1)
    ON CONFLICT (name) DO NOTHING";

/// The statements that take an advisory lock until the end of the transaction: one that waits, and one that only tries.
/// Each also says whether the server is a standby: a pooler may send a function there.
fn lock_functions(sharing: Sharing) -> (&'static str, &'static str) {
    match sharing {
        Sharing::Alone => (
            "SELECT pg_advisory_xact_lock($1), pg_is_in_recovery()",
            "SELECT pg_try_advisory_xact_lock($1), pg_is_in_recovery()",
        ),
        Sharing::Shared => (
            "SELECT pg_advisory_xact_lock_shared($1), pg_is_in_recovery()",
            "SELECT pg_try_advisory_xact_lock_shared($1), pg_is_in_recovery()",
        ),
    }
}

/// The expression that restores the bound depends on the lock, so it is evaluated after the wait.
fn bounded(function: &str) -> String {
    format!(
        "WITH was AS MATERIALIZED (
             SELECT current_setting('lock_timeout') AS v
         ), bound AS MATERIALIZED (
             SELECT was.v, set_config('lock_timeout', $2, true) FROM was
         )
         SELECT set_config('lock_timeout', CASE WHEN {function}($1) IS NULL THEN v ELSE v END, true),
                pg_is_in_recovery()
         FROM bound"
    )
}

/// Refuses the answer of a standby.
fn of_primary(row: PgRow) -> sqlx::Result<PgRow> {
    if row.try_get(1)? { Err(sqlx::Error::Configuration(Standby.into())) } else { Ok(row) }
}

impl NamedStatements for Postgres {
    async fn named_lock(
        conn: &mut PgConnection,
        of: Names,
        key: &Key,
        sharing: Sharing,
        wait: Wait,
    ) -> sqlx::Result<Option<Granted>> {
        let number = number(of, key);
        let (lock, lock_if_free) = lock_functions(sharing);
        if of == (Names::Answers { have_begun: false }) {
            let inserted = pooler::query(INSERT_IF_FREE).bind(number).bind(key.as_str()).execute(&mut *conn).await?;
            if inserted.rows_affected() == 1 {
                return Ok(Some(Granted::New));
            }
        }
        let tries = async |conn: &mut PgConnection| {
            of_primary(pooler::query(lock_if_free).bind(number).fetch_one(conn).await?)?.try_get(0)
        };
        let is_locked = match wait {
            Wait::Never => tries(conn).await?,
            Wait::AtMost(_) => {
                // Most locks are free. Setting and restoring a bound costs as much as the lock.
                tries(&mut *conn).await? || {
                    let sql = match sharing {
                        Sharing::Alone => statement!("{lock}", lock = bounded("pg_advisory_xact_lock")),
                        Sharing::Shared => statement!("{lock}", lock = bounded("pg_advisory_xact_lock_shared")),
                    };
                    of_primary(pooler::query(sql).bind(number).bind(lock_timeout(wait)).fetch_one(conn).await?)?;
                    true
                }
            }
            Wait::Unbounded => {
                of_primary(pooler::query(lock).bind(number).fetch_one(conn).await?)?;
                true
            }
        };
        Ok(is_locked.then_some(Granted::Known))
    }

    fn named_ends(of: Names, _sharing: Sharing, _wait: Wait) -> bool {
        // An answer also has a row, which may be locked without the lock.
        of == Names::Locks
    }

    fn named_text(of: Names, key: &Key, sharing: Sharing, wait: Wait) -> String {
        let number = format!("CAST('{}' AS bigint)", number(of, key));
        let sql = match (wait, sharing) {
            (Wait::Unbounded, _) => lock_functions(sharing).0.to_owned(),
            (_, Sharing::Alone) => bounded("pg_advisory_xact_lock"),
            (_, Sharing::Shared) => bounded("pg_advisory_xact_lock_shared"),
        };
        // 0 would switch the bound off.
        let bound = if wait == Wait::Never { "1ms".to_owned() } else { lock_timeout(wait) };
        sql.replace("$1", &number).replace("$2", &format!("'{bound}'"))
    }

    async fn named_feigned(conn: &mut PgConnection, of: Names, key: &Key) -> sqlx::Result<Option<String>> {
        feigned::feigned(conn, number(of, key)).await
    }

    async fn named_holder(conn: &mut PgConnection, of: Names, key: &Key) -> sqlx::Result<Option<LockHolder>> {
        let sql = statement!("{holder}", holder = holder_since("xact_start", "1"));
        let row = pooler::query(sql).bind(number(of, key)).fetch_optional(conn).await?;
        row.as_ref().map(holder).transpose()
    }
}
