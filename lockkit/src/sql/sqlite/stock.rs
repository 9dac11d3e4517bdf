//! Stocks on SQLite.

use std::ops::RangeInclusive;

use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection};

use super::take_write_lock;
use crate::{
    policy::Wait,
    sql::{
        Look, Note, Portion, Segment, StockStatements,
        stock::segment::{quantity, segment},
    },
    value::key::Key,
};

impl StockStatements for Sqlite {
    async fn stock_take_any(
        conn: &mut SqliteConnection,
        _grammar: Option<()>,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        sqlx::query_scalar(
            "UPDATE lockkit_stock SET quantity = quantity - ?2
             WHERE name = ?1 AND segment = (
                 SELECT segment FROM lockkit_stock
                 WHERE name = ?1 AND quantity >= ?2
                 ORDER BY segment NOT IN (?3, ?4, ?5, ?6), segment
                 LIMIT 1
             )
             RETURNING segment",
        )
        .bind(key.as_str())
        .bind(amount)
        .bind(first[0])
        .bind(first[1])
        .bind(first[2])
        .bind(first[3])
        .fetch_all(conn)
        .await
        .map(|numbers| numbers.first().copied())
    }

    async fn stock_take_batch(
        conn: &mut SqliteConnection,
        key: &Key,
        sums: &[i64],
        first: [u32; 4],
        _note: Note,
    ) -> sqlx::Result<Option<Portion>> {
        if let Some(&total) = sums.last()
            && let Some(segment) = Self::stock_take_any(conn, Some(()), key, total, first).await?
        {
            return Ok(Some(Portion { segment, takers: sums.len() }));
        }
        loop {
            let fullest: Option<(u32, i64)> = sqlx::query_as(
                "SELECT segment, quantity FROM lockkit_stock WHERE name = ?1 ORDER BY quantity DESC LIMIT 1",
            )
            .bind(key.as_str())
            .fetch_optional(&mut *conn)
            .await?;
            let Some((segment, quantity)) = fullest else { return Ok(None) };
            let takers = sums.partition_point(|it| *it <= quantity);
            let Some(last) = takers.checked_sub(1) else { return Ok(None) };
            let taken = sqlx::query(
                "UPDATE lockkit_stock SET quantity = quantity - ?3 WHERE name = ?1 AND segment = ?2 AND quantity >= ?3",
            )
            .bind(key.as_str())
            .bind(segment)
            .bind(sums[last])
            .execute(&mut *conn)
            .await?;
            if taken.rows_affected() > 0 {
                return Ok(Some(Portion { segment, takers }));
            }
        }
    }

    async fn stock_note_make(_conn: &mut SqliteConnection, _note: Note) -> sqlx::Result<()> {
        Ok(())
    }

    async fn stock_note_void(_conn: &mut SqliteConnection, _note: Note) -> sqlx::Result<()> {
        Ok(())
    }

    async fn stock_note_look(_conn: &mut SqliteConnection, _note: Note) -> sqlx::Result<Option<(i64, Portion)>> {
        Ok(None)
    }

    async fn stock_look(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Look> {
        let rows: Vec<(i64, i64)> =
            sqlx::query_as("SELECT segment, quantity FROM lockkit_stock WHERE name = ?1 ORDER BY segment")
                .bind(key.as_str())
                .fetch_all(conn)
                .await?;
        // Inside a transaction, no other connection can have written since this one attempted to take.
        Ok(Look { segments: rows.into_iter().map(|(number, it)| segment(number, it)).collect(), is_current: true })
    }

    async fn stock_lock(
        conn: &mut SqliteConnection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> sqlx::Result<Vec<Segment>> {
        take_write_lock(conn, wait, "DELETE FROM lockkit_stock WHERE 0".to_owned()).await?;
        sqlx::query_as::<_, (i64, i64)>(
            "SELECT segment, quantity FROM lockkit_stock
             WHERE name = ?1 AND segment BETWEEN ?2 AND ?3
             ORDER BY segment",
        )
        .bind(key.as_str())
        .bind(segments.start())
        .bind(segments.end())
        .fetch_all(conn)
        .await
        .map(|rows| rows.into_iter().map(|(number, it)| segment(number, it)).collect())
    }

    async fn stock_make(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<()> {
        sqlx::query("INSERT INTO lockkit_stock (name, segment, quantity) VALUES (?1, 0, 0) ON CONFLICT DO NOTHING")
            .bind(key.as_str())
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn stock_write(conn: &mut SqliteConnection, key: &Key, segments: &[Segment]) -> sqlx::Result<()> {
        let sql = format!(
            "INSERT INTO lockkit_stock (name, segment, quantity) VALUES {}
             ON CONFLICT (name, segment) DO UPDATE SET quantity = excluded.quantity",
            vec!["(?, ?, ?)"; segments.len()].join(", "),
        );
        let mut write = sqlx::query(AssertSqlSafe(sql));
        for segment in segments {
            write = write.bind(key.as_str()).bind(segment.number).bind(quantity(segment));
        }
        write.execute(conn).await?;
        Ok(())
    }

    async fn stock_remove(conn: &mut SqliteConnection, key: &Key, segments: RangeInclusive<u32>) -> sqlx::Result<()> {
        sqlx::query("DELETE FROM lockkit_stock WHERE name = ?1 AND segment BETWEEN ?2 AND ?3")
            .bind(key.as_str())
            .bind(segments.start())
            .bind(segments.end())
            .execute(conn)
            .await?;
        Ok(())
    }
}
