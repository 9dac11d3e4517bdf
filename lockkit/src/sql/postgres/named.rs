//! Named locks on PostgreSQL.

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
        Names::Answers => "answer",
    };
    advisory_number(namespace, key)
}

/// The statements that take an advisory lock until the end of the transaction: one that waits, and one that only tries.
/// Each also says whether the server is a standby: a pooler may send a function there. That of an answer reports the
/// number of its transaction.
fn lock_functions(of: Names, sharing: Sharing) -> (&'static str, &'static str) {
    match (of, sharing) {
        (Names::Locks, Sharing::Alone) => (
            "SELECT pg_advisory_xact_lock($1), pg_is_in_recovery()",
            "SELECT pg_try_advisory_xact_lock($1), pg_is_in_recovery()",
        ),
        (Names::Locks, Sharing::Shared) => (
            "SELECT pg_advisory_xact_lock_shared($1), pg_is_in_recovery()",
            "SELECT pg_try_advisory_xact_lock_shared($1), pg_is_in_recovery()",
        ),
        // `pg_current_xact_id` is not in PostgreSQL 12.
        (Names::Answers, _) => (
            "SELECT pg_advisory_xact_lock($1), pg_is_in_recovery(), txid_current()",
            "SELECT pg_try_advisory_xact_lock($1), pg_is_in_recovery(), txid_current()",
        ),
    }
}

/// The expression that restores the bound depends on the lock, so it is evaluated after the wait.
fn bounded(function: &str, number: &str) -> String {
    format!(
        "WITH was AS MATERIALIZED (
             SELECT current_setting('lock_timeout') AS v
         ), bound AS MATERIALIZED (
             SELECT was.v, set_config('lock_timeout', $2, true) FROM was
         )
         SELECT set_config('lock_timeout', CASE WHEN {function}($1) IS NULL THEN v ELSE v END, true),
                pg_is_in_recovery(){number}
         FROM bound"
    )
}

fn granted(of: Names, row: &PgRow) -> sqlx::Result<Granted> {
    if row.try_get(1)? {
        return Err(sqlx::Error::Configuration(Standby.into()));
    }
    Ok(match of {
        Names::Locks => Granted::Known,
        Names::Answers => Granted::In(row.try_get(2)?),
    })
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
        let (lock, lock_if_free) = lock_functions(of, sharing);
        let tries = async |conn: &mut PgConnection| {
            let row = pooler::query(lock_if_free).bind(number).fetch_one(conn).await?;
            let granted = granted(of, &row)?;
            Ok(row.try_get::<bool, _>(0)?.then_some(granted))
        };
        match wait {
            Wait::Unbounded => granted(of, &pooler::query(lock).bind(number).fetch_one(conn).await?).map(Some),
            Wait::Never => tries(conn).await,
            Wait::AtMost(_) => {
                // Most locks are free. Setting and restoring a bound costs as much as the lock.
                if let Some(granted) = tries(&mut *conn).await? {
                    return Ok(Some(granted));
                }
                let sql = match (of, sharing) {
                    (Names::Locks, Sharing::Alone) => statement!("{lock}", lock = bounded("pg_advisory_xact_lock", "")),
                    (Names::Locks, Sharing::Shared) => {
                        statement!("{lock}", lock = bounded("pg_advisory_xact_lock_shared", ""))
                    }
                    (Names::Answers, _) => {
                        statement!("{lock}", lock = bounded("pg_advisory_xact_lock", ", txid_current()"))
                    }
                };
                let row = pooler::query(sql).bind(number).bind(lock_timeout(wait)).fetch_one(conn).await?;
                granted(of, &row).map(Some)
            }
        }
    }

    fn named_text(of: Names, key: &Key, sharing: Sharing, wait: Wait) -> String {
        let number = format!("CAST('{}' AS bigint)", number(of, key));
        let sql = match (wait, sharing) {
            (Wait::Unbounded, _) => lock_functions(of, sharing).0.to_owned(),
            (_, Sharing::Alone) => bounded("pg_advisory_xact_lock", ""),
            (_, Sharing::Shared) => bounded("pg_advisory_xact_lock_shared", ""),
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
