//! The fence guard on MySQL and MariaDB.

use sqlx::{MySql, MySqlConnection};

use super::text::{literal, named, settings_on_maria};
use crate::{
    sql::{FenceGuardStatements, GUARD_SECONDS},
    value::{fence::Fence, key::Key},
};

impl FenceGuardStatements for MySql {
    async fn guard(conn: &mut MySqlConnection, domain: &Key, key: &Key, own: Fence) -> sqlx::Result<Fence> {
        // `uses` changes the row for an equal fence, too: Galera detects no conflict on a row that is only locked. The
        // statement is alone in its message: if a node of Galera must roll back for another node, it reports that in
        // the answer to the message, and would lose it if more statements followed. LAST_INSERT_ID(expr) puts into the
        // answer the fence that the row had, or this one if there was no row.
        let guard = named!(
            "{bounded}
             INSERT INTO lockkit_fence (domain, name, fence) VALUES (:domain, :name, LAST_INSERT_ID(:fence))
             ON DUPLICATE KEY UPDATE fence = GREATEST(LAST_INSERT_ID(fence), VALUES(fence)), uses = uses + 1",
            bounded = settings_on_maria(&format!("innodb_lock_wait_timeout = {GUARD_SECONDS}"))
        );
        let guard = guard.with(&[("domain", &domain.as_bytes()), ("name", &key.as_bytes()), ("fence", &own.as_i64())]);
        Ok(Fence::from(guard.execute(conn).await?.last_insert_id()))
    }

    fn guard_text(domain: &Key, key: &Key, own: Fence) -> String {
        let (domain, name, own) = (literal(domain), literal(key), own.get());
        // Past the greatest BIGINT is an error in every SQL mode.
        format!(
            "INSERT INTO lockkit_fence (domain, name, fence) VALUES ({domain}, {name}, {own})
ON DUPLICATE KEY UPDATE fence = IF(fence <= {own}, {own}, fence + {max}), uses = uses + 1",
            max = i64::MAX
        )
    }

    async fn fences_forget(conn: &mut MySqlConnection, domain: &Key) -> sqlx::Result<u64> {
        let forget = named!("DELETE FROM lockkit_fence WHERE domain = :domain");
        Ok(forget.with(&[("domain", &domain.as_bytes())]).execute(conn).await?.rows_affected())
    }
}
