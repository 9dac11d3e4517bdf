//! Stocks on MySQL and MariaDB.
//!
//! InnoDB may keep the lock of a row that it locked and then rejected, also over a rollback to a savepoint. In a
//! transaction that goes on to wait, such a lock is out of order. So a `take_in` may become a deadlock victim here when
//! a stock runs out.

use std::{iter, ops::RangeInclusive};

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, mysql::MySqlQueryResult};

use super::{
    NOW, bounded,
    text::{AT_ONCE, Each, Grammar, Statement, Texts, named, texts},
};
use crate::{
    policy::Wait,
    sql::{
        Driver, Look, Note, Portion, Segment, StockStatements, counted_depth,
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
             SELECT name, segment, :amount AS amount FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = :name {among} AND quantity >= :amount
             ORDER BY name, segment
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS free
         STRAIGHT_JOIN lockkit_stock AS s FORCE INDEX (PRIMARY)
             ON s.name = free.name AND s.segment = free.segment
         SET s.quantity = s.quantity - free.amount + 0 * LAST_INSERT_ID(s.segment)"
    )
}

/// The segments to try first.
const FIRST: &str = "AND segment IN (:first[4])";

/// Takes from the first unlocked one of the segments to try first. On MariaDB only from one of them, if it is not
/// locked, which costs half; MySQL cannot bound the wait of an UPDATE.
fn take_first() -> &'static Texts {
    texts! {
        mysql: take_free(FIRST),
        maria: format!(
            "{AT_ONCE}
             UPDATE lockkit_stock FORCE INDEX (PRIMARY) SET quantity = quantity - :amount + 0 * LAST_INSERT_ID(segment)
             WHERE name = :name AND segment = :one AND quantity >= :amount"
        ),
    }
}

/// Takes for the first takers of a batch from the first unlocked segment among these, as many as it has enough for, and
/// writes the note. The servers update all tables of a statement or none.
///
/// INTERVAL counts the sums that the segment has enough for; ELT chooses the last of them. The OK packet returns the
/// number of takers, shifted by 32 bits, and of the segment.
fn take_batch_free(among: &str, takers: usize) -> String {
    format!(
        "UPDATE (
             SELECT name, segment, INTERVAL(quantity, :sums[{takers}]) AS takers
             FROM lockkit_stock FORCE INDEX (PRIMARY)
             WHERE name = :name {among} AND quantity >= :enough
             ORDER BY name, segment
             LIMIT 1
             FOR UPDATE SKIP LOCKED
         ) AS free
         STRAIGHT_JOIN lockkit_stock AS s FORCE INDEX (PRIMARY)
             ON s.name = free.name AND s.segment = free.segment
         STRAIGHT_JOIN lockkit_stock_batch AS b FORCE INDEX (PRIMARY)
             ON b.id = :id AND b.number < :number
         SET s.quantity = s.quantity - CAST(ELT(free.takers, :sums[{takers}]) AS SIGNED)
                 + 0 * LAST_INSERT_ID(free.takers * 4294967296 + free.segment),
             b.number = :number, b.segment = free.segment, b.takers = free.takers, b.used_us = {NOW}"
    )
}

/// Sizes of the statement for a batch. sqlx keeps a prepared statement for each.
const SIZES: [usize; 3] = [4, 32, 256];

impl StockStatements for MySql {
    async fn stock_take_any(
        conn: &mut MySqlConnection,
        grammar: Option<Grammar>,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        // In a transaction the text of MySQL runs on both servers: refusing to wait for a segment may roll the
        // transaction back (`innodb_rollback_on_timeout`).
        let among_first = take_first().of(grammar.unwrap_or(Grammar::MySql)).with(&[
            ("amount", &amount),
            ("name", &key.as_bytes()),
            ("first", &Each(&first)),
            ("one", &first[0]),
        ]);
        let done = match among_first.execute(&mut *conn).await {
            Err(err) if Self::fault(&err) == Fault::Contended => MySqlQueryResult::default(),
            done => done?,
        };
        if let Some(number) = taken_from(&done) {
            return Ok(Some(number));
        }
        let among_all = named!("{take}", take = take_free(""));
        let among_all = among_all.with(&[("amount", &amount), ("name", &key.as_bytes())]);
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
        let padded: Vec<_> = sums.iter().copied().chain(iter::repeat(total)).take(size).collect();
        for (among, enough) in [(FIRST, total), ("", least)] {
            let take = Statement::new(&take_batch_free(among, size)).with(&[
                ("sums", &Each(&padded)),
                ("name", &key.as_bytes()),
                ("first", &Each(&first)),
                ("enough", &enough),
                ("id", &id.as_bytes().as_slice()),
                ("number", &number),
            ]);
            let done = take.execute(&mut *conn).await?;
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
        let old = named!("SELECT id FROM lockkit_stock_batch WHERE used_us < {NOW} - 86400000000 LIMIT 100");
        let old: Vec<Vec<u8>> = old.scalar(&[]).fetch_all(&mut *conn).await?;
        for id in old {
            let delete = named!("DELETE FROM lockkit_stock_batch WHERE id = :id AND used_us < {NOW} - 86400000000");
            delete.with(&[("id", &id)]).execute(&mut *conn).await?;
        }
        let make = named!(
            "INSERT INTO lockkit_stock_batch (id, number, segment, takers, used_us) VALUES (:id, :before, 0, 0, {NOW})
             ON DUPLICATE KEY UPDATE number = number"
        );
        let make = make.with(&[("id", &id.as_bytes().as_slice()), ("before", &(number - 1))]);
        make.execute(conn).await.map(drop)
    }

    async fn stock_note_void(conn: &mut MySqlConnection, Note { id, number }: Note) -> sqlx::Result<()> {
        let void = named!("UPDATE lockkit_stock_batch SET number = :void WHERE id = :id AND number < :number");
        let void = void.with(&[("void", &Note::VOID), ("id", &id.as_bytes().as_slice()), ("number", &number)]);
        void.execute(conn).await.map(drop)
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
