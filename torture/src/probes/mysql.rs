//! Probes for MySQL and MariaDB only.

use anyhow::Result;
use lockkit::RowLock;

use crate::probes::{Found, Ground, Verdict, probe, told};
use crate::rig::Rig;

pub(crate) async fn of_the_mysql_family<S: Rig<DB = sqlx::MySql>>(ground: &Ground<S>) -> Vec<Found> {
    vec![probe("some rows of a small table by their key", small_table(ground)).await]
}

/// Two rows of ten by their primary key are no scan of the table.
async fn small_table<S: Rig<DB = sqlx::MySql>>(ground: &Ground<S>) -> Result<Verdict> {
    let mut conn = ground.pool.acquire().await?;
    S::execute(&mut conn, "CREATE TABLE small (id BIGINT PRIMARY KEY, name INT NOT NULL)").await?;
    let rows: Vec<_> = (1..=10).map(|id| format!("({id}, {id})")).collect();
    S::execute(&mut conn, &format!("INSERT INTO small VALUES {}", rows.join(", "))).await?;
    drop(conn);
    let mut tx = lockkit::begin(&ground.pool).await?;
    let locked = RowLock::table("small").by_any("id", [1_i64, 2]).lock(&mut *tx).await.map(drop);
    Ok(match locked {
        Ok(()) => Ok(()),
        Err(_) => Err(told(&locked)),
    })
}
