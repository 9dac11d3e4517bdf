//! Queues of jobs in a table, taken by several consumers under `#[with_lock(row, …, skip_locked)]`.

use lockkit::{Error, with_lock};
use sqlx::Pool;
use support::{Server, TestDb, on_every_server};
use tokio::sync::Barrier;

type Job = (i64, String);

on_every_server! {
    async fn consumers_get_jobs_of_their_own_and_are_busy_without_any<S>(db: TestDb<S>) {
        #[with_lock(
            row,
            on = pool,
            table = "t_jobs",
            by(state = "new"),
            order_by(id),
            limit = 1,
            skip_locked,
            rows = jobs: Vec<Job>,
            tx = tx,
            on_busy = Ok(None)
        )]
        async fn take(
            pool: &Pool<<S as Server>::DB>,
            taken: &Barrier,
            counted: &Barrier,
        ) -> Result<Option<i64>, Error> {
            let _ = &mut *tx;
            taken.wait().await;
            counted.wait().await;
            Ok(jobs.first().map(|(id, _)| *id))
        }

        db.execute("CREATE TABLE t_jobs (id BIGINT PRIMARY KEY, state VARCHAR(10) NOT NULL)").await;
        db.execute("CREATE INDEX t_jobs_state ON t_jobs (state, id)").await;
        db.execute("INSERT INTO t_jobs VALUES (1, 'new'), (2, 'new')").await;
        let (taken, counted, alone) = (Barrier::new(3), Barrier::new(3), Barrier::new(1));
        let late = async {
            taken.wait().await; // both are in their bodies
            let third = take(&db.pool, &alone, &alone).await;
            counted.wait().await;
            third
        };
        let (one, other, third) = tokio::join!(
            take(&db.pool, &taken, &counted),
            take(&db.pool, &taken, &counted),
            late,
        );
        let mut both = [one.unwrap(), other.unwrap()];
        both.sort_unstable();
        assert_eq!(both, [Some(1), Some(2)]);
        assert_eq!(third.unwrap(), None);
        db.assert_nothing_left().await;
    }

    async fn rows_of_several_values_are_locked_together<S>(db: TestDb<S>) {
        #[with_lock(row, on = pool, table = "t_items", by_any(id = ids), rows = items: Vec<(i64, i64)>, tx = tx)]
        async fn stock(pool: &Pool<<S as Server>::DB>, ids: &[i64]) -> Result<i64, Error> {
            let _ = &mut *tx;
            Ok(items.iter().map(|(_, stock)| *stock).sum())
        }

        db.execute("CREATE TABLE t_items (id BIGINT PRIMARY KEY, stock BIGINT NOT NULL)").await;
        db.execute("INSERT INTO t_items VALUES (1, 10), (2, 20), (3, 30)").await;
        assert_eq!(stock(&db.pool, &[3, 1, 3]).await.unwrap(), 40);
        assert!(matches!(stock(&db.pool, &[3, 4]).await, Err(Error::NoSuchRow { .. })));
        db.assert_nothing_left().await;
    }
}
