//! The fence guard on MySQL and MariaDB.

use sqlx::{MySql, MySqlConnection, Row};

use super::within_seconds;
use crate::{
    fence::Fence,
    key::Key,
    sql::{FenceGuardStatements, GUARD_SECONDS, history::hex, units::fence},
};

impl FenceGuardStatements for MySql {
    async fn guard(conn: &mut MySqlConnection, domain: &Key, key: &Key, own: Fence) -> sqlx::Result<Fence> {
        // LAST_INSERT_ID(expr) keeps, for this session, the fence that the row had before, or this one if there was no row.
        let (domain, name, own) = (hex(domain.as_bytes()), hex(key.as_bytes()), own.get());
        let insert = format!(
            "INSERT INTO lockkit_fence (domain, name, fence) VALUES (X'{domain}', X'{name}', LAST_INSERT_ID({own}))
             ON DUPLICATE KEY UPDATE fence = GREATEST(LAST_INSERT_ID(fence), VALUES(fence))"
        );
        let answer = within_seconds(conn, GUARD_SECONDS, &insert, "SELECT CAST(LAST_INSERT_ID() AS SIGNED)").await?;
        let seen = answer.last().ok_or(sqlx::Error::RowNotFound)?.try_get(0)?;
        Ok(fence(seen))
    }

    fn guard_text(domain: &Key, key: &Key, own: Fence) -> String {
        let (domain, name, own) = (hex(domain.as_bytes()), hex(key.as_bytes()), own.get());
        // Past the greatest BIGINT is an error in every SQL mode.
        format!(
            "INSERT INTO lockkit_fence (domain, name, fence) VALUES (X'{domain}', X'{name}', {own})
ON DUPLICATE KEY UPDATE fence = IF(fence <= {own}, {own}, fence + {max})",
            max = i64::MAX
        )
    }

    async fn fences_forget(conn: &mut MySqlConnection, domain: &Key) -> sqlx::Result<u64> {
        let forgotten = sqlx::query("DELETE FROM lockkit_fence WHERE domain = ?").bind(domain.as_bytes()).execute(conn);
        Ok(forgotten.await?.rows_affected())
    }
}
