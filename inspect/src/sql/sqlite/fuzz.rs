//! What `doctor` does with a statement that a user wrote. Panics if a property is broken.

use sqlx::{Executor, SqliteConnection, query_scalar};

use crate::{Inspect, Plan};

/// A statement that can be planned is not run. The database is one for this alone.
///
/// # Panics
/// If the statement has changed something.
pub async fn check_statement(conn: &mut SqliteConnection, statement: &str) {
    if !Plan::is_for(statement) {
        return;
    }
    let prepare = "CREATE TABLE IF NOT EXISTS t (a INTEGER PRIMARY KEY, b TEXT); INSERT OR IGNORE INTO t VALUES (1, 2)";
    (&mut *conn).execute(prepare).await.expect("a table");
    let state = "SELECT (SELECT COUNT(*) FROM t WHERE b = 2) + (SELECT COUNT(*) FROM sqlite_master) + total_changes()";
    let before: i64 = query_scalar(state).fetch_one(&mut *conn).await.expect("the state");
    drop(sqlx::Sqlite::plan(&mut *conn, statement).await);
    let after: i64 = query_scalar(state).fetch_one(conn).await.expect("the state");
    assert_eq!(after, before, "{statement}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sqlx::Connection;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_statement_that_is_planned_is_not_run(
            word in "select|UPDATE|delete|insert|replace|with|drop|\\PC{0,3}",
            rest in "( (1|\\*|t|b|from|into|set|values|where|=|,|\\(|\\)|'2'|--|/\\*|;|delete|drop|table)){0,9}",
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let mut conn = SqliteConnection::connect("sqlite::memory:").await.expect("a database");
                let rest = format!("{word}{rest}");
                for statement in [&*rest, "DELETE FROM t", "UPDATE t SET b = 3", "SELECT 1; DELETE FROM t"] {
                    check_statement(&mut conn, statement).await;
                }
            });
        }
    }
}
