//! Stocks on MySQL and MariaDB.

use std::ops::RangeInclusive;

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, mysql::MySqlQueryResult};

use super::bounded;
use crate::{
    key::Key,
    policy::Wait,
    sql::{
        Look, Segment, StockStatements, counted_depth,
        statement::statement,
        stock::segment::{quantity, segment},
    },
};

/// Takes from the first unlocked segment among these. The order is not random, because the servers would lock all
/// segments to sort them.
///
/// The condition is not a range of segments either: the servers also lock the row after a range, which may belong to
/// another stock. The index is named because on a small table the optimizer prefers a scan, which waits for locked
/// segments. The OK packet returns the number of the segment.
fn take_free(among: &str) -> String {
    format!(
        "UPDATE (
             SELECT name, segment FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = ? {among} AND quantity >= ?
             ORDER BY name, segment
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS free
         STRAIGHT_JOIN lockkit_stock AS s FORCE INDEX (PRIMARY)
             ON s.name = free.name AND s.segment = free.segment
         SET s.quantity = s.quantity - ? + 0 * LAST_INSERT_ID(s.segment)"
    )
}

impl StockStatements for MySql {
    async fn stock_take_any(
        conn: &mut MySqlConnection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        let mut among_first =
            sqlx::query(statement!("{take}", take = take_free("AND segment IN (?, ?, ?, ?)"))).bind(key.as_bytes());
        for number in first {
            among_first = among_first.bind(number);
        }
        let done = among_first.bind(amount).bind(amount).execute(&mut *conn).await?;
        if let Some(number) = taken_from(&done) {
            return Ok(Some(number));
        }
        let among_all =
            sqlx::query(statement!("{take}", take = take_free(""))).bind(key.as_bytes()).bind(amount).bind(amount);
        Ok(taken_from(&among_all.execute(conn).await?))
    }

    async fn stock_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Look> {
        // Inside a transaction the isolation is unknown, and in REPEATABLE READ the read may be old.
        let is_current = counted_depth::<Self>(conn) == 0;
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
        // Rows are locked as they are read, so the named index must deliver them in ascending order.
        let (before, hint) = bounded(wait);
        let (among, numbers) = among(segments);
        let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
        let sql = format!(
            "{before}SELECT {hint}segment, quantity
             FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = ? {among}
             ORDER BY name, segment
             FOR UPDATE {waiting}"
        );
        let mut lock = sqlx::query_as::<_, (u32, i64)>(AssertSqlSafe(sql)).bind(key.as_bytes());
        for number in numbers {
            lock = lock.bind(number);
        }
        lock.fetch_all(conn).await.map(|rows| rows.into_iter().map(|(number, it)| segment(number.into(), it)).collect())
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

    async fn stock_remove(conn: &mut MySqlConnection, key: &Key, segments: RangeInclusive<u32>) -> sqlx::Result<()> {
        let (among, numbers) = among(segments);
        let sql = format!("DELETE FROM lockkit_stock WHERE name = ? {among}");
        let mut remove = sqlx::query(AssertSqlSafe(sql)).bind(key.as_bytes());
        for number in numbers {
            remove = remove.bind(number);
        }
        remove.execute(conn).await?;
        Ok(())
    }
}

fn taken_from(done: &MySqlQueryResult) -> Option<u32> {
    (done.rows_affected() > 0).then(|| u32::try_from(done.last_insert_id()).unwrap_or(0))
}

/// A condition for these segments that reads no row after them, and the numbers to bind.
fn among(segments: RangeInclusive<u32>) -> (String, Vec<u32>) {
    if *segments.end() == u32::MAX {
        return (String::new(), Vec::new());
    }
    let numbers: Vec<_> = segments.collect();
    (format!("AND segment IN ({})", vec!["?"; numbers.len()].join(", ")), numbers)
}
