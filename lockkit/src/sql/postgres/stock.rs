//! Stocks on PostgreSQL.

use std::ops::RangeInclusive;

use sqlx::{Executor, PgConnection, Postgres, Row};

use super::{NOW, pooler::query};
use crate::{
    policy::Wait,
    sql::{
        Look, Note, Portion, Segment, StockStatements, counted_depth,
        statement::statement,
        stock::segment::{quantity, segment},
    },
    value::key::Key,
};

impl StockStatements for Postgres {
    async fn stock_take_any(
        conn: &mut PgConnection,
        _grammar: Option<()>,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        // A segment that was emptied between the statement's snapshot and its lock is skipped, but stays locked. The
        // savepoint releases that lock: kept in a transaction that then waits for others, it would violate the lock
        // order.
        let in_a_transaction = counted_depth::<Self>(conn) > 0;
        if in_a_transaction {
            conn.execute("SAVEPOINT lockkit_stock").await?;
        }
        let row = query(
            // The second SELECT runs only if the first finds nothing.
            "UPDATE lockkit_stock AS s SET quantity = s.quantity - $2
             WHERE s.name = $1 AND s.segment = coalesce(
                 (SELECT segment FROM lockkit_stock
                  WHERE name = $1 AND segment = $4 AND quantity >= $2
                  FOR NO KEY UPDATE SKIP LOCKED),
                 (SELECT segment FROM lockkit_stock
                  WHERE name = $1 AND quantity >= $2
                  ORDER BY array_position($3, segment), segment
                  LIMIT 1
                  FOR NO KEY UPDATE SKIP LOCKED)
             )
             RETURNING s.segment",
        )
        .bind(key.as_str())
        .bind(amount)
        .bind(first.map(column))
        .bind(column(first[0]))
        .fetch_optional(&mut *conn)
        .await?;
        let number: Option<i32> = row.map(|it| it.try_get(0)).transpose()?;
        if in_a_transaction && number.is_none() {
            conn.execute("ROLLBACK TO SAVEPOINT lockkit_stock; RELEASE SAVEPOINT lockkit_stock").await?;
        }
        Ok(number.map(|it| segment(it.into(), 0).number))
    }

    async fn stock_take_batch(
        conn: &mut PgConnection,
        key: &Key,
        sums: &[i64],
        first: [u32; 4],
        Note { id, number }: Note,
    ) -> sqlx::Result<Option<Portion>> {
        let row = query(statement!(
            "WITH note AS MATERIALIZED (
                 SELECT id FROM lockkit_stock_batch WHERE id = $5 AND number < $6 FOR NO KEY UPDATE
             ), free AS MATERIALIZED (
                 SELECT s.segment,
                     (SELECT count(*)::integer FROM unnest($2::bigint[]) AS sum WHERE sum <= s.quantity) AS takers
                 FROM note, lockkit_stock AS s
                 WHERE s.name = $1 AND s.quantity >= ($2::bigint[])[1]
                 ORDER BY s.quantity < $3, array_position($4, s.segment), s.segment
                 LIMIT 1
                 FOR NO KEY UPDATE OF s SKIP LOCKED
             ), taken AS (
                 UPDATE lockkit_stock AS s SET quantity = s.quantity - ($2::bigint[])[free.takers]
                 FROM free
                 WHERE s.name = $1 AND s.segment = free.segment
                 RETURNING s.segment, free.takers
             ), noted AS (
                 UPDATE lockkit_stock_batch AS b
                 SET number = $6, segment = taken.segment, takers = taken.takers, used_us = {NOW}
                 FROM taken
                 WHERE b.id = $5
             )
             SELECT segment, takers FROM taken",
            NOW = NOW,
        ))
        .bind(key.as_str())
        .bind(sums.to_vec())
        .bind(sums.last().copied().unwrap_or(0))
        .bind(first.map(column))
        .bind(id.as_bytes().as_slice())
        .bind(number)
        .fetch_optional(conn)
        .await?;
        row.map(|it| Ok(portion(it.try_get(0)?, it.try_get(1)?))).transpose()
    }

    async fn stock_note_make(conn: &mut PgConnection, Note { id, number }: Note) -> sqlx::Result<()> {
        query(statement!(
            "WITH old AS (
                 DELETE FROM lockkit_stock_batch
                 WHERE id IN (
                     SELECT id FROM lockkit_stock_batch
                     WHERE used_us < {NOW} - 86400000000
                     LIMIT 100
                     FOR UPDATE SKIP LOCKED
                 )
             )
             INSERT INTO lockkit_stock_batch (id, number, segment, takers, used_us)
             VALUES ($1, $2 - 1, 0, 0, {NOW})
             ON CONFLICT DO NOTHING",
            NOW = NOW,
        ))
        .bind(id.as_bytes().as_slice())
        .bind(number)
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn stock_note_void(conn: &mut PgConnection, Note { id, number }: Note) -> sqlx::Result<()> {
        query("UPDATE lockkit_stock_batch SET number = $3 WHERE id = $1 AND number < $2")
            .bind(id.as_bytes().as_slice())
            .bind(number)
            .bind(Note::VOID)
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn stock_note_look(conn: &mut PgConnection, note: Note) -> sqlx::Result<Option<(i64, Portion)>> {
        let row = query("SELECT number, segment, takers FROM lockkit_stock_batch WHERE id = $1")
            .bind(note.id.as_bytes().as_slice())
            .fetch_optional(conn)
            .await?;
        row.map(|it| Ok((it.try_get(0)?, portion(it.try_get(1)?, it.try_get(2)?)))).transpose()
    }

    async fn stock_look(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Look> {
        let in_a_transaction = counted_depth::<Self>(conn) > 0;
        let rows = query(
            "SELECT segment, quantity, current_setting('transaction_isolation') = 'read committed' AS is_current
             FROM lockkit_stock
             WHERE name = $1
             ORDER BY segment",
        )
        .bind(key.as_str())
        .fetch_all(conn)
        .await?;
        let is_current = match rows.first() {
            Some(row) if in_a_transaction => row.try_get("is_current")?,
            Some(_) => true,
            // Without a row, the isolation is unknown.
            None => !in_a_transaction,
        };
        let segments = rows.iter().map(|row| Ok(segment(row.try_get::<i32, _>(0)?.into(), row.try_get(1)?)));
        Ok(Look { segments: segments.collect::<sqlx::Result<_>>()?, is_current })
    }

    async fn stock_lock(
        conn: &mut PgConnection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> sqlx::Result<Vec<Segment>> {
        // One message, as for row locks: set the bound, lock, restore the old bound.
        let rows = query(
            "WITH was AS MATERIALIZED (
                 SELECT current_setting('lock_timeout') AS v
             ), bound AS MATERIALIZED (
                 SELECT set_config('lock_timeout', coalesce($4, v), true) FROM was
             ), locked AS MATERIALIZED (
                 SELECT s.segment, s.quantity
                 FROM bound, lockkit_stock AS s
                 WHERE s.name = $1 AND s.segment BETWEEN $2 AND $3
                 ORDER BY s.segment
                 FOR NO KEY UPDATE OF s
             ), restored AS MATERIALIZED (
                 SELECT set_config('lock_timeout', was.v, true) AS v
                 FROM was, (SELECT count(*) AS n FROM locked) AS c
                 WHERE c.n >= 0
             )
             SELECT segment, quantity FROM locked
             WHERE (SELECT v FROM restored) IS NOT NULL
             ORDER BY segment",
        )
        .bind(key.as_str())
        .bind(column(*segments.start()))
        .bind(column(*segments.end()))
        // Zero would mean no bound.
        .bind(wait.millis().map(|it| format!("{}ms", it.clamp(1, i32::MAX as u64))))
        .fetch_all(conn)
        .await?;
        rows.iter().map(|row| Ok(segment(row.try_get::<i32, _>(0)?.into(), row.try_get(1)?))).collect()
    }

    async fn stock_make(conn: &mut PgConnection, key: &Key) -> sqlx::Result<()> {
        query("INSERT INTO lockkit_stock (name, segment, quantity) VALUES ($1, 0, 0) ON CONFLICT DO NOTHING")
            .bind(key.as_str())
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn stock_write(conn: &mut PgConnection, key: &Key, segments: &[Segment]) -> sqlx::Result<()> {
        query(
            "INSERT INTO lockkit_stock (name, segment, quantity)
             SELECT $1, * FROM unnest($2::integer[], $3::bigint[])
             ON CONFLICT (name, segment) DO UPDATE SET quantity = EXCLUDED.quantity",
        )
        .bind(key.as_str())
        .bind(segments.iter().map(|it| column(it.number)).collect::<Vec<_>>())
        .bind(segments.iter().map(quantity).collect::<Vec<_>>())
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn stock_remove(conn: &mut PgConnection, key: &Key, segments: RangeInclusive<u32>) -> sqlx::Result<()> {
        query("DELETE FROM lockkit_stock WHERE name = $1 AND segment BETWEEN $2 AND $3")
            .bind(key.as_str())
            .bind(column(*segments.start()))
            .bind(column(*segments.end()))
            .execute(conn)
            .await?;
        Ok(())
    }
}

fn portion(segment: i32, takers: i32) -> Portion {
    Portion { segment: u32::try_from(segment).unwrap_or(0), takers: usize::try_from(takers).unwrap_or(0) }
}

/// The number of a segment as its column stores it.
fn column(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
