//! lockkit's tables on MySQL and MariaDB.

use sqlx::{AssertSqlSafe, Executor, MySql, MySqlConnection, Pool, Row, migrate::MigrateError};

use crate::{
    sql::{
        Driver,
        history::{Applied, HISTORY, Schema, failed, migrated, migrator, schema},
        pool::using,
    },
    value::error::Error,
};

pub(super) async fn migrate(pool: &Pool<MySql>) -> Result<(), Error> {
    let migrator = migrator::<MySql>();
    let reading = async |conn: &mut MySqlConnection| {
        // The tables are read after the history, because another process may be writing both.
        (history(conn).await, are_tables_there(conn).await)
    };
    let (applied, are_tables_there) = using(pool.acquire().await.map_err(failed)?, reading).await;
    let are_tables_there = are_tables_there.map_err(failed)?;
    let schema = schema::<MySql>(&migrator, applied, are_tables_there)?;
    if let Schema::UpToDate = schema {
        return Ok(());
    }
    // On a separate pool: a failed migration would leave sqlx's lock on one of the application's connections.
    let own = pool.options().clone().min_connections(0).max_connections(1);
    let own = own.connect_with((*pool.connect_options()).clone()).await.map_err(failed)?;
    let forget = async |sql: String| own.execute(AssertSqlSafe(sql)).await;
    // While DDL waits for a transaction that has used the table, every other statement on the table queues behind it,
    // including renewals.
    own.execute("SET lock_wait_timeout = 1").await.map_err(failed)?;
    if let Schema::Dropped = schema {
        // All migrations run again. Their statements are repeatable.
        forget(format!("DELETE FROM {HISTORY}")).await.map_err(failed)?;
    }
    // DDL commits immediately, so an interrupted migration leaves its row in the history marked as incomplete. On
    // MariaDB, where sqlx's lock has no effect, a running migration is marked like that too for a moment. The
    // statements are repeatable, so the mark is deleted.
    let mut done = migrator.run(&own).await;
    if let Err(MigrateError::Dirty(_)) = done {
        match forget(format!("DELETE FROM {HISTORY} WHERE NOT success")).await {
            Ok(_) => {}
            Err(err) if MySql::is_denied(&err) => {
                let hint = "one was cut short: delete the rows of `_lockkit_migrations` whose `success` is false, and \
                            run the migrations again (they can be repeated)";
                return Err(Error::Migration { hint: Some(hint), source: err.into() });
            }
            // For example, another process has locked the history.
            Err(err) => return Err(failed(err)),
        }
        done = migrator.run(&own).await;
    }
    own.close().await;
    migrated::<MySql>(done, are_tables_there)
}

async fn history(conn: &mut MySqlConnection) -> sqlx::Result<Vec<Applied>> {
    let sql = format!("SELECT version, LOWER(HEX(checksum)) AS checksum, success FROM {HISTORY}");
    let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(conn).await?;
    let applied = rows.iter().map(|row| {
        let (number, checksum) = (row.try_get("version")?, row.try_get("checksum")?);
        Ok(Applied { number, checksum, is_complete: row.try_get("success")? })
    });
    applied.collect()
}

/// Whether each table exists with its newest column, as far as this user can see.
async fn are_tables_there(conn: &mut MySqlConnection) -> sqlx::Result<bool> {
    let there: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM information_schema.columns
         WHERE table_schema = DATABASE()
           AND (table_name, column_name) IN
               (('lockkit_lease', 'ttl_us'), ('lockkit_named', 'name'), ('lockkit_stock', 'quantity'),
                ('lockkit_fence', 'fence'), ('lockkit_stock_batch', 'number'),
                ('lockkit_answer', 'answer'))",
    )
    .fetch_one(conn)
    .await?;
    Ok(there == 6)
}
