//! Bodies that go on in another task, drive other tasks, or share one: which of them is under a lock.

use std::future::{Future, poll_fn, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use lockkit::testing::{MemoryStore, under};
use lockkit::{Error, Leases, Wait, with_lock};
use support::{Server, TestDb, on_every_database, spawn};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, LocalSet, block_in_place};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Polls it once in this task.
async fn poll_once<F: Future + Unpin>(future: &mut F) {
    tokio::select! {
        biased;
        _ = future => panic!("it was to wait"),
        () = ready(()) => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_went_on_in_another_task_is_not_under_the_locks_of_the_first() {
    let leases = Leases::new(MemoryStore::new());
    let (go, gone) = oneshot::channel::<()>();
    let there = leases.clone();
    let moved = under("unrelated", async move {
        gone.await.unwrap();
        there.lease("a").acquire().await?.release().await
    });
    let mut moved = Box::pin(moved);
    let moved = leases
        .lease("a")
        .run(async |_| {
            poll_once(&mut moved).await;
            let moved = spawn(moved);
            go.send(()).unwrap();
            tokio::time::sleep(MILLIS(100)).await;
            Ok::<_, Error>(moved)
        })
        .await
        .unwrap();
    moved.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_task_that_a_body_drives_is_not_under_its_lock() {
    let leases = Leases::new(MemoryStore::new());
    let local = LocalSet::new();
    let other = leases.clone();
    let asking = local.spawn_local(async move { other.lease("a").acquire().await?.release().await });
    let body = async |_| {
        local.run_until(tokio::time::sleep(MILLIS(100))).await;
        Ok::<_, Error>(())
    };
    leases.lease("a").run(body).await.unwrap();
    local.run_until(asking).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn two_bodies_of_one_task_take_turns() {
    let leases = Leases::builder(MemoryStore::new()).wait(Wait::Unbounded).build().unwrap();
    let run = || {
        leases.lease("a").run(|_| async {
            tokio::time::sleep(MILLIS(50)).await;
            Ok::<_, Error>(())
        })
    };
    let (one, two) = tokio::join!(run(), run());
    one.unwrap();
    two.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_blocks_on_its_own_lock_is_told_so() {
    let leases = Leases::builder(MemoryStore::new()).wait(Wait::Unbounded).build().unwrap();
    let body = |_| async {
        let ask = || leases.lease("k").acquire();
        let here = block_in_place(|| Handle::current().block_on(ask()));
        assert!(matches!(here, Err(Error::Reentrant { .. })), "{here:?}");
        let other = Builder::new_current_thread().enable_all().build().unwrap();
        let there = block_in_place(|| other.block_on(ask()));
        assert!(matches!(there, Err(Error::Reentrant { .. })), "{there:?}");
        block_in_place(|| drop(other));
        Ok::<_, Error>(())
    };
    leases.lease("k").run(body).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_body_that_panicked_leaves_its_task_under_no_lock() {
    let leases = Leases::new(MemoryStore::new());
    let mut run = Box::pin(leases.lease("k").run(async |_| -> Result<(), Error> {
        tokio::time::sleep(MILLIS(5)).await;
        panic!("it broke")
    }));
    let polled = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| run.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(_) => panic!("no"),
        Err(_) => Poll::Ready(()),
    });
    polled.await;
    drop(run);
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
}

on_every_database! {
    async fn a_named_body_that_went_on_in_another_task_is_not_under_the_name_of_the_first<S>(db: TestDb<S>) {
        type Pool = sqlx::Pool<<S as Server>::DB>;
        #[with_lock(named, on = pool, key = const "k", tx = _tx)]
        async fn outer(
            pool: &Pool,
            moved: Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>,
        ) -> Result<JoinHandle<Result<(), Error>>, Error> {
            let mut moved = moved;
            poll_once(&mut moved).await;
            Ok(spawn(moved))
        }
        #[with_lock(named, on = pool, key = "k", tx = _tx)]
        async fn inner(pool: &Pool) -> Result<(), Error> {
            Ok(())
        }
        let pool = db.pool.clone();
        let (go, gone) = oneshot::channel::<()>();
        let moved = under("unrelated", async move {
            gone.await.unwrap();
            inner(&pool).await
        });
        let moved = outer(&db.pool, Box::pin(moved)).await.unwrap();
        go.send(()).unwrap();
        moved.await.unwrap().unwrap();
    }
}
