//! Stocks on MySQL and MariaDB.
//!
//! InnoDB may keep the lock of a row that it locked and then rejected, also over a rollback to a savepoint. In a
//! transaction that goes on to wait, such a lock is out of order. So a `take_in` may become a deadlock victim here when
//! a stock runs out.

use std::{iter, ops::RangeInclusive};

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, mysql::MySqlQueryResult};

use super::{NOW, bounded};
use crate::{
    policy::Wait,
    sql::{
        Driver, Look, Note, Portion, Segment, StockStatements, counted_depth,
        statement::statement,
        stock::segment::{quantity, segment},
    },
    value::{error::Fault, key::Key},
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
             SELECT name, segment, ? AS amount FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = ? {among} AND quantity >= ?
             ORDER BY name, segment
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS free
         STRAIGHT_JOIN lockkit_stock AS s FORCE INDEX (PRIMARY)
             ON s.name = free.name AND s.segment = free.segment
         SET s.quantity = s.quantity - free.amount + 0 * LAST_INSERT_ID(s.segment)"
    )
}

/// Takes from the first of four segments if it is not locked. MariaDB only, where this costs half of [`take_free`]; MySQL
/// cannot bound the wait of an UPDATE. The values are those of `take_free`; the other three segments are not used. Not
/// inside a transaction, which a locked segment may roll back (`innodb_rollback_on_timeout`).
const LEAN: &str = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR
    UPDATE lockkit_stock FORCE INDEX (PRIMARY) SET quantity = quantity - ? + 0 * LAST_INSERT_ID(segment)
    WHERE name = ? AND segment = ? AND ? >= 0 AND ? >= 0 AND ? >= 0 AND quantity >= ?";

/// Takes for the first takers of a batch from the first unlocked segment among these, as many as it has enough for, and
/// writes the note. The servers update all tables of a statement or none.
///
/// INTERVAL counts the sums that the segment has enough for; ELT chooses the last of them. The OK packet returns the number
/// of takers, shifted by 32 bits, and of the segment.
fn take_batch_free(among: &str, takers: usize) -> String {
    let sums = vec!["?"; takers].join(", ");
    format!(
        "UPDATE (
             SELECT name, segment, INTERVAL(quantity, {sums}) AS takers
             FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = ? {among} AND quantity >= ?
             ORDER BY name, segment
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS free
         STRAIGHT_JOIN lockkit_stock AS s FORCE INDEX (PRIMARY)
             ON s.name = free.name AND s.segment = free.segment
         STRAIGHT_JOIN lockkit_stock_batch AS b FORCE INDEX (PRIMARY)
             ON b.id = ? AND b.number < ?
         SET s.quantity = s.quantity - CAST(ELT(free.takers, {sums}) AS SIGNED)
                 + 0 * LAST_INSERT_ID(free.takers * 4294967296 + free.segment),
             b.number = ?, b.segment = free.segment, b.takers = free.takers, b.used_us = {NOW}"
    )
}

/// Sizes of the statement for a batch. sqlx keeps a prepared statement for each.
const SIZES: [usize; 3] = [4, 32, 256];

impl StockStatements for MySql {
    async fn stock_take_any(
        conn: &mut MySqlConnection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        let mut among_first = sqlx::query(if counted_depth::<Self>(conn) == 0 {
            statement!(
                "/*M! {lean} */ /*!80000 {take} */",
                lean = LEAN,
                take = take_free("AND segment IN (?, ?, ?, ?)")
            )
        } else {
            statement!("{take}", take = take_free("AND segment IN (?, ?, ?, ?)"))
        })
        .bind(amount)
        .bind(key.as_bytes());
        for number in first {
            among_first = among_first.bind(number);
        }
        let done = match among_first.bind(amount).execute(&mut *conn).await {
            Err(err) if Self::fault(&err) == Fault::Contended => MySqlQueryResult::default(),
            done => done?,
        };
        if let Some(number) = taken_from(&done) {
            return Ok(Some(number));
        }
        let among_all =
            sqlx::query(statement!("{take}", take = take_free(""))).bind(amount).bind(key.as_bytes()).bind(amount);
        Ok(taken_from(&among_all.execute(conn).await?))
    }

    async fn stock_take_batch(
        conn: &mut MySqlConnection,
        key: &Key,
        sums: &[i64],
        first: [u32; 4],
        Note { id, number }: Note,
    ) -> sqlx::Result<Option<Portion>> {
        let (least, total) = (sums.first().copied().unwrap_or(0), sums.last().copied().unwrap_or(0));
        // The last sum is repeated up to the size of the statement.
        let size = SIZES.into_iter().find(|it| *it >= sums.len()).unwrap_or(sums.len());
        let padded = || sums.iter().copied().chain(iter::repeat(total)).take(size);
        for (among, numbers, enough) in [("AND segment IN (?, ?, ?, ?)", &first[..], total), ("", &[], least)] {
            let mut take = sqlx::query(AssertSqlSafe(take_batch_free(among, size)));
            for sum in padded() {
                take = take.bind(sum);
            }
            take = take.bind(key.as_bytes());
            for number in numbers {
                take = take.bind(number);
            }
            take = take.bind(enough).bind(id.as_bytes().as_slice()).bind(number);
            for sum in padded() {
                take = take.bind(sum);
            }
            let done = take.bind(number).execute(&mut *conn).await?;
            if done.rows_affected() > 0 {
                let (takers, segment) = (done.last_insert_id() >> 32, done.last_insert_id() & u64::from(u32::MAX));
                let portion = Portion {
                    segment: u32::try_from(segment).unwrap_or(0),
                    takers: usize::try_from(takers).unwrap_or(0),
                };
                if (1..=size).contains(&portion.takers) {
                    return Ok(Some(portion));
                }
                // A trigger on the table makes the server return another number.
                let noted = Self::stock_note_look(conn, Note { id, number }).await?;
                return noted.map(|(_, portion)| Some(portion)).ok_or(sqlx::Error::RowNotFound);
            }
        }
        Ok(None)
    }

    async fn stock_note_make(conn: &mut MySqlConnection, Note { id, number }: Note) -> sqlx::Result<()> {
        // Deleted by their keys: a scan would lock the notes that are in use.
        let old: Vec<Vec<u8>> = sqlx::query_scalar(statement!(
            "SELECT id FROM lockkit_stock_batch WHERE used_us < {NOW} - 86400000000 LIMIT 100",
            NOW = NOW,
        ))
        .fetch_all(&mut *conn)
        .await?;
        for id in old {
            sqlx::query(statement!(
                "DELETE FROM lockkit_stock_batch WHERE id = ? AND used_us < {NOW} - 86400000000",
                NOW = NOW,
            ))
            .bind(id)
            .execute(&mut *conn)
            .await?;
        }
        sqlx::query(statement!(
            "INSERT INTO lockkit_stock_batch (id, number, segment, takers, used_us) VALUES (?, ?, 0, 0, {NOW})
             ON DUPLICATE KEY UPDATE number = number",
            NOW = NOW,
        ))
        .bind(id.as_bytes().as_slice())
        .bind(number - 1)
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn stock_note_void(conn: &mut MySqlConnection, Note { id, number }: Note) -> sqlx::Result<()> {
        sqlx::query("UPDATE lockkit_stock_batch SET number = ? WHERE id = ? AND number < ?")
            .bind(Note::VOID)
            .bind(id.as_bytes().as_slice())
            .bind(number)
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn stock_note_look(conn: &mut MySqlConnection, note: Note) -> sqlx::Result<Option<(i64, Portion)>> {
        let row: Option<(i64, u32, u32)> =
            sqlx::query_as("SELECT number, segment, takers FROM lockkit_stock_batch WHERE id = ?")
                .bind(note.id.as_bytes().as_slice())
                .fetch_optional(conn)
                .await?;
        Ok(row.map(|(number, segment, takers)| (number, Portion { segment, takers: takers as usize })))
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
