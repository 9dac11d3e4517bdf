//! Probes for MySQL and MariaDB only.

use anyhow::Result;
use lockkit::RowLock;

use crate::probes::{Found, Ground, Verdict, probe, told};
use crate::rig::Rig;

pub(crate) async fn of_the_mysql_family<S: Rig<DB = sqlx::MySql>>(ground: &Ground<S>) -> Vec<Found> {
    vec![probe("some rows of a small table by their key", small_table(ground)).await]
}

/// Two rows by their primary key are no scan, however small the table.
async fn small_table<S: Rig<DB = sqlx::MySql>>(ground: &Ground<S>) -> Result<Verdict> {
    let mut conn = ground.pool.acquire().await?;
    for (size, of_type) in [2, 3, 5, 10, 15, 20].into_iter().flat_map(|size| [(size, "BIGINT"), (size, "INT")]) {
        let table = format!("small_{size}_{}", of_type.to_lowercase());
        S::execute(&mut conn, &format!("CREATE TABLE {table} (id {of_type} PRIMARY KEY, name TEXT)")).await?;
        let rows: Vec<_> = (1..=size).map(|id| format!("({id}, '{id}')")).collect();
        S::execute(&mut conn, &format!("INSERT INTO {table} VALUES {}", rows.join(", "))).await?;
        let mut tx = lockkit::begin(&ground.pool).await?;
        let locked = RowLock::table(&table).by_any("id", [1_i64, 2]).lock(&mut *tx).await.map(drop);
        if locked.is_err() {
            return Ok(Err(format!("of {size} rows: {}", told(&locked))));
        }
    }
    Ok(Ok(()))
}
