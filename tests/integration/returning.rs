//! A row that a statement of one's own returns, or a conflict.

use lockkit::OrConflict;
use sqlx::Row;
use support::{TestDb, on_databases};

on_databases! {
    [sqlite, postgres]

    async fn a_statement_that_returns_no_row_is_a_conflict<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT, stock BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 5, 1)").await;
        let write = "UPDATE t SET stock = stock - 1, version = version + 1 WHERE id = 1 AND version = 1 RETURNING \
                     stock";
        let row = sqlx::query(write).fetch_optional(&db.pool).await.unwrap().or_conflict().unwrap();
        assert_eq!(row.get::<i64, _>(0), 4);
        let conflict = sqlx::query(write).fetch_optional(&db.pool).await.unwrap().or_conflict().map(drop).unwrap_err();
        assert!(conflict.is_conflict() && lockkit::is_retryable(&conflict), "{conflict:?}");
        let stock: Option<i64> = sqlx::query_scalar(write).fetch_optional(&db.pool).await.unwrap();
        assert!(stock.or_conflict().unwrap_err().is_conflict());
    }
}
