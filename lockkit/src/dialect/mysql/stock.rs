//! Stocks on MySQL and MariaDB.

use std::ops::RangeInclusive;

use sqlx::{AssertSqlSafe, MySql, MySqlConnection};

use super::lock::bounded;
use crate::{
    dialect::{Look, Segment, StockOps, depth, quantity, segment},
    key::Key,
    policy::Wait,
};

/// Takes from the first free segment of a range. No random order: the servers would lock all segments to sort them.
///
/// The number of the segment comes back in the OK packet.
macro_rules! take_first {
    ($range:literal) => {
        concat!(
            "UPDATE (
                 SELECT name, segment FROM lockkit_stock FORCE INDEX (PRIMARY)
                 WHERE name = ? AND segment ",
            $range,
            " ? AND quantity >= ?
                 ORDER BY name, segment
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS free
             STRAIGHT_JOIN lockkit_stock AS s ON s.name = free.name AND s.segment = free.segment
             SET s.quantity = s.quantity - ? + 0 * LAST_INSERT_ID(s.segment)"
        )
    };
}

impl StockOps for MySql {
    async fn stock_take_any(
        conn: &mut MySqlConnection,
        key: &Key,
        amount: i64,
        start: u32,
    ) -> sqlx::Result<Option<u32>> {
        let taken = take_first(conn, take_first!(">="), key, amount, start).await?;
        if taken.is_some() || start == 0 {
            return Ok(taken);
        }
        take_first(conn, take_first!("<"), key, amount, start).await
    }

    async fn stock_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Look> {
        // Inside a transaction its isolation is not known, and under REPEATABLE READ what is read may be old.
        let is_current = depth::<Self>(conn) == 0;
        let rows: Vec<(u32, i64)> =
            sqlx::query_as("SELECT segment, quantity FROM lockkit_stock WHERE name = ? ORDER BY segment")
                .bind(key.as_bytes())
                .fetch_all(conn)
                .await?;
        Ok(Look { segments: rows.into_iter().map(|(number, it)| segment(number.into(), it)).collect(), is_current })
    }

    async fn stock_lock(
        conn: &mut MySqlConnection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> sqlx::Result<Vec<Segment>> {
        // Rows are locked as they are read, so the index must be the one that delivers them in their order.
        let (before, hint) = bounded(wait);
        let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
        let sql = format!(
            "{before}SELECT {hint}segment, quantity
             FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = ? AND segment BETWEEN ? AND ?
             ORDER BY name, segment
             FOR UPDATE {waiting}"
        );
        sqlx::query_as::<_, (u32, i64)>(AssertSqlSafe(sql))
            .bind(key.as_bytes())
            .bind(segments.start())
            .bind(segments.end())
            .fetch_all(conn)
            .await
            .map(|rows| rows.into_iter().map(|(number, it)| segment(number.into(), it)).collect())
    }

    async fn stock_make(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<()> {
        sqlx::query(
            "INSERT INTO lockkit_stock (name, segment, quantity) VALUES (?, 0, 0)
             ON DUPLICATE KEY UPDATE segment = VALUES(segment)",
        )
        .bind(key.as_bytes())
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn stock_write(conn: &mut MySqlConnection, key: &Key, segments: &[Segment]) -> sqlx::Result<()> {
        let sql = format!(
            "INSERT INTO lockkit_stock (name, segment, quantity) VALUES {}
             ON DUPLICATE KEY UPDATE quantity = VALUES(quantity)",
            vec!["(?, ?, ?)"; segments.len()].join(", "),
        );
        let mut write = sqlx::query(AssertSqlSafe(sql));
        for segment in segments {
            write = write.bind(key.as_bytes()).bind(segment.number).bind(quantity(segment));
        }
        write.execute(conn).await?;
        Ok(())
    }

    async fn stock_remove(conn: &mut MySqlConnection, key: &Key, from: u32) -> sqlx::Result<()> {
        sqlx::query("DELETE FROM lockkit_stock WHERE name = ? AND segment >= ?")
            .bind(key.as_bytes())
            .bind(from)
            .execute(conn)
            .await?;
        Ok(())
    }
}

async fn take_first(
    conn: &mut MySqlConnection,
    sql: &'static str,
    key: &Key,
    amount: i64,
    start: u32,
) -> sqlx::Result<Option<u32>> {
    let done = sqlx::query(sql).bind(key.as_bytes()).bind(start).bind(amount).bind(amount).execute(&mut *conn).await?;
    Ok((done.rows_affected() > 0).then(|| u32::try_from(done.last_insert_id()).unwrap_or(0)))
}
