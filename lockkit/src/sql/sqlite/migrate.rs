//! lockkit's tables on SQLite.

use sqlx::{AssertSqlSafe, Executor, Pool, Row, Sqlite, SqliteConnection};

use crate::{
    sql::history::{Applied, HISTORY, Schema, failed, migrated, migrator, schema},
    value::error::Error,
};

pub(super) async fn migrate(pool: &Pool<Sqlite>) -> Result<(), Error> {
    let migrator = migrator::<Sqlite>();
    let mut conn = pool.acquire().await.map_err(failed)?;
    let applied = history(&mut conn).await;
    let are_tables_there = are_tables_there(&mut conn).await.map_err(failed)?;
    // An incomplete migration is run again; if a table was dropped, all migrations are. The statements are repeatable.
    let is_cut_short = applied.as_ref().is_ok_and(|it| it.iter().any(|it| !it.is_complete));
    let forget = match schema::<Sqlite>(&migrator, applied, are_tables_there)? {
        Schema::UpToDate => return Ok(()),
        Schema::Dropped => Some(format!("DELETE FROM {HISTORY}")),
        Schema::Behind => is_cut_short.then(|| format!("DELETE FROM {HISTORY} WHERE NOT success")),
    };
    if let Some(sql) = forget {
        conn.execute(AssertSqlSafe(sql)).await.map_err(failed)?;
    }
    drop(conn);
    // Uses the given pool, because an in-memory database is not visible to any other connection.
    migrated::<Sqlite>(migrator.run(pool).await, are_tables_there)
}

async fn history(conn: &mut SqliteConnection) -> sqlx::Result<Vec<Applied>> {
    let sql = format!("SELECT version, lower(hex(checksum)) AS checksum, success FROM {HISTORY}");
    let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(conn).await?;
    let applied = rows.iter().map(|row| {
        let (number, checksum) = (row.try_get("version")?, row.try_get("checksum")?);
        Ok(Applied { number, checksum, is_complete: row.try_get("success")? })
    });
    applied.collect()
}

/// Whether each table exists with its newest column.
async fn are_tables_there(conn: &mut SqliteConnection) -> sqlx::Result<bool> {
    let there: i64 = sqlx::query_scalar(
        "SELECT (SELECT COUNT(*) FROM pragma_table_info('lockkit_lease') WHERE name = 'ttl_us')
              + (SELECT COUNT(*) FROM pragma_table_info('lockkit_stock') WHERE name = 'quantity')
              + (SELECT COUNT(*) FROM pragma_table_info('lockkit_fence') WHERE name = 'fence')
              + (SELECT COUNT(*) FROM pragma_table_info('lockkit_answer') WHERE name = 'answer')",
    )
    .fetch_one(conn)
    .await?;
    Ok(there == 4)
}
