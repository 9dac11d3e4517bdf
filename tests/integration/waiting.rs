//! Waiting among processes: nobody is kept out, and what a request took while it waited is released before its
//! answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkit::store::LeaseStore;
use lockkit::testing::{MemoryStore, Operation};
use lockkit::{LeaseRequest, Leases};
use support::{JoinSet, Server, TestDb, on_every_database, spawn};
use tokio::time::{sleep, timeout};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// How long the lease is held each time where processes compete for it.
const HOLD: Duration = Duration::from_millis(2);

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(2);

on_every_database! {
    async fn a_process_that_asks_again_at_once_does_not_keep_another_out<S>(db: TestDb<S>) {
        const WAITS: u64 = 8;

        let turns = Arc::new(AtomicU64::new(0));
        let over = Arc::new(AtomicBool::new(false));
        let busy = Leases::new(db.pool_of(2).await);
        let hogging = spawn({
            let (turns, over) = (turns.clone(), over.clone());
            async move {
                while !over.load(Ordering::SeqCst) {
                    let lease = busy.lease("k").wait(PATIENCE).acquire().await.unwrap();
                    turns.fetch_add(1, Ordering::SeqCst);
                    sleep(HOLD).await;
                    lease.release().await.unwrap();
                }
            }
        });
        let other = Leases::new(db.pool_of(2).await);
        let (mut before, mut meanwhile) = (0, 0);
        for _ in 0..WAITS {
            // Until it has the lease again, and asks for it again at once.
            while turns.load(Ordering::SeqCst) <= before + 1 {
                sleep(HOLD).await;
            }
            before = turns.load(Ordering::SeqCst);
            let lease = other.lease("k").wait(PATIENCE).acquire().await.unwrap();
            let now = turns.load(Ordering::SeqCst);
            meanwhile += now - before;
            before = now;
            lease.release().await.unwrap();
        }
        over.store(true, Ordering::SeqCst);
        hogging.await.unwrap();
        println!("{}: {meanwhile} turns of one process in {WAITS} waits of another", S::NAME);
        assert!(meanwhile <= 25 * WAITS, "{meanwhile} turns of one process in {WAITS} waits of another");
    }

    async fn no_process_is_kept_out_where_many_compete<S>(db: TestDb<S>) {
        const PROCESSES: usize = 6;
        const TURNS: u64 = 300;

        let all = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..PROCESSES {
            let (leases, all) = (Leases::new(db.pool_of(2).await), all.clone());
            tasks.spawn(async move {
                let mut turns = 0;
                while all.load(Ordering::SeqCst) < TURNS {
                    let lease = leases.lease("k").wait(PATIENCE).acquire().await.unwrap();
                    all.fetch_add(1, Ordering::SeqCst);
                    turns += 1;
                    sleep(HOLD).await;
                    lease.release().await.unwrap();
                }
                turns
            });
        }
        let shares: Vec<u64> = tasks.join_all().await;
        println!("{}: turns of each process: {shares:?}", S::NAME);
        assert!(shares.iter().all(|it| it * 20 >= TURNS), "turns of each process: {shares:?}");
    }

    async fn a_process_that_just_committed_stands_back_for_the_queue<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool_of(2).await));
        let lease = here.lease("k").acquire().await.unwrap();
        let waiting = spawn(there.lease("k").wait(PATIENCE).acquire());
        while here.list("k/queue/").await.unwrap().is_empty() {
            sleep(MILLIS(5)).await;
        }
        lease.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap();
        let again = spawn(here.lease("k").wait(PATIENCE).acquire());
        let lease = waiting.await.unwrap().unwrap();
        assert!(!again.is_finished(), "the owner of the ticket is the first");
        lease.release().await.unwrap();
        again.await.unwrap().unwrap().release().await.unwrap();
    }

    async fn a_lease_whose_key_leaves_no_room_for_tickets_is_waited_for<S>(db: TestDb<S>) {
        let key = "k".repeat(255);
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let lease = here.lease(&key).acquire().await.unwrap();
        let waiting = spawn(there.lease(&key).wait(PATIENCE).acquire());
        // Longer than a request waits before it would take a ticket.
        sleep(MILLIS(150)).await;
        assert!(!waiting.is_finished());
        lease.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }

    async fn a_refused_try_has_released_what_it_took<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let reader = here.rw("k").read().acquire().await.unwrap();
        for _ in 0..10 {
            assert!(there.rw("k").write().try_acquire().await.unwrap().is_none());
            let second = here.rw("k").read().try_acquire().await.unwrap();
            second.expect("nobody writes").release().await.unwrap();
        }
        reader.release().await.unwrap();

        let lease = here.lease("k").acquire().await.unwrap();
        for _ in 0..10 {
            assert!(there.lease("k").fair().try_acquire().await.unwrap().is_none());
            assert_eq!(here.list("k/").await.unwrap(), [], "no ticket is left");
        }
        lease.release().await.unwrap();
        assert!(here.lease("k").fair().try_acquire().await.unwrap().is_some());
    }

    async fn a_wait_that_ends_has_released_what_it_took<S>(db: TestDb<S>) {
        let (here, there) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let gives_up = async |request: LeaseRequest<_>| {
            // Long enough to take something on the way.
            assert!(request.wait(MILLIS(200)).acquire().await.unwrap_err().is_contended());
        };
        let reader = here.rw("k").read().acquire().await.unwrap();
        for _ in 0..3 {
            gives_up(there.rw("k").write()).await;
            let second = here.rw("k").read().try_acquire().await.unwrap();
            second.expect("nobody writes").release().await.unwrap();
        }
        reader.release().await.unwrap();

        let lease = here.lease("k").acquire().await.unwrap();
        for _ in 0..3 {
            gives_up(there.lease("k").fair()).await;
            no_ticket_is_left(&here).await;
        }
        drop(lease);
    }
}

/// A wait ends a second after its time at the latest, and what a busy database has not answered by then is released
/// in the background.
async fn no_ticket_is_left<S: LeaseStore>(leases: &Leases<S>) {
    let gone = async {
        while !leases.list("k/").await.unwrap().is_empty() {
            sleep(MILLIS(10)).await;
        }
    };
    // Less than the ticket of a fair request lives.
    timeout(MILLIS(2500), gone).await.expect("no ticket is left");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_returns_after_it_has_released_its_ticket() {
    let store = MemoryStore::new();
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let _lease = here.lease("k").acquire().await.unwrap();
    there.store().faults().slow(MILLIS(20));
    for request in [there.lease("k").fair(), there.lease("k")] {
        assert!(request.wait(MILLIS(300)).acquire().await.unwrap_err().is_contended());
        assert_eq!(here.list("k/").await.unwrap(), []);
        assert!(there.store().faults().calls(Operation::List) > 0, "it had a ticket");
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_queued_behind_others_of_its_process_gets_contended() {
    let store = MemoryStore::new();
    let others = Leases::new(store.client());
    let _held = others.lease("b").acquire().await.unwrap();
    let leases = Leases::new(store);
    // As far away as another continent.
    leases.store().faults().slow(MILLIS(150));
    let _first = spawn(leases.lease("b").wait(PATIENCE).acquire());
    let _all = spawn(leases.all(["a", "b"]).wait(PATIENCE).acquire());
    sleep(MILLIS(10)).await;
    let refused = leases.lease("b").wait(MILLIS(1000)).acquire().await.unwrap_err();
    assert!(refused.is_contended(), "{refused:?}");
    let refused = leases.all(["a", "b"]).wait(MILLIS(1000)).acquire().await.unwrap_err();
    assert!(refused.is_contended(), "{refused:?}");
    assert!(leases.health().is_ready());
}
