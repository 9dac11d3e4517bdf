//! Stocks on SQLite.

use std::ops::RangeInclusive;

use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection};

use super::take_write_lock;
use crate::{
    key::Key,
    policy::Wait,
    sql::{
        Look, Segment, StockStatements, counted_depth,
        stock::segment::{quantity, segment},
    },
};

impl StockStatements for Sqlite {
    async fn stock_take_any(
        conn: &mut SqliteConnection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> sqlx::Result<Option<u32>> {
        if counted_depth::<Self>(conn) == 0 {
            // All writers share one lock, and a separate statement would wait for it as long as the connection's busy
            // timeout.
            return Ok(None);
        }
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
