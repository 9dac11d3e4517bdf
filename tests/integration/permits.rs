//! Several permits of one semaphore together.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkit::testing::MemoryStore;
use lockkit::{Error, Lease, Leases, Released, Wait};
use support::{JoinSet, TestDb, on_every_database, spawn};

/// Asks, and says whether it was granted.
type Request = fn(Leases<MemoryStore>, Duration) -> Pin<Box<dyn Future<Output = bool>>>;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

on_every_database! {
    async fn so_many_permits_are_taken_or_none<S>(db: TestDb<S>) {
        let (leases, others) = (Leases::new(db.pool.clone()), Leases::new(db.pool.clone()));
        let three = leases.semaphore("gpu", 5).take(3).acquire().await.unwrap();
        assert_eq!(three.leases().len(), 3);
        assert!(three.leases().is_sorted_by_key(|it| it.key().clone()));
        let listed: Vec<_> = others.list("gpu/permit/").await.unwrap().into_iter().map(|it| it.key).collect();
        assert_eq!(listed, three.leases().iter().map(|it| it.key().clone()).collect::<Vec<_>>());

        assert!(others.semaphore("gpu", 5).take(3).try_acquire().await.unwrap().is_none());
        let refused = others.semaphore("gpu", 5).take(3).wait(MILLIS(200)).acquire().await.unwrap_err();
        assert!(refused.is_contended(), "{refused}");
        let two =
            others.semaphore("gpu", 5).take(2).try_acquire().await.unwrap().expect("what was refused kept nothing");
        assert!(leases.semaphore("gpu", 5).try_acquire().await.unwrap().is_none());
        assert_eq!(three.release().await.unwrap(), Released::WhileHeld);
        let one = leases.semaphore("gpu", 5).acquire().await.unwrap();
        assert_eq!(two.release().await.unwrap(), Released::WhileHeld);
        let four = others.semaphore("gpu", 5).take(4).run(|it| async move { Ok::<_, Error>(it.leases().len()) }).await;
        assert_eq!(four.unwrap(), 4);
        one.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn takers_of_several_never_wait_for_each_other<S>(db: TestDb<S>) {
        let (inside, most): (Arc<AtomicU32>, Arc<AtomicU32>) = Default::default();
        let mut tasks = JoinSet::new();
        for task in 0..6_u32 {
            // As if each were a process.
            let (inside, most, leases) = (inside.clone(), most.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                for round in 0..5 {
                    let take = 1 + (task + round) % 5;
                    let permits =
                        leases.semaphore("k", 5).take(take).wait(Duration::from_secs(60)).acquire().await.unwrap();
                    let now = inside.fetch_add(take, Ordering::SeqCst) + take;
                    assert!(now <= 5, "{now} permits are held");
                    most.fetch_max(now, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(take, Ordering::SeqCst);
                    assert_eq!(permits.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        tasks.join_all().await;
        assert!(most.load(Ordering::SeqCst) >= 5);
        db.assert_nothing_left().await;
    }

    async fn a_taker_of_all_permits_is_not_kept_out_by_takers_of_one<S>(db: TestDb<S>) {
        let served = Arc::new(AtomicU32::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            // More takers than permits, each in a process of its own: never are all permits free at once.
            let (served, leases) = (served.clone(), Leases::new(db.pool.clone()));
            tasks.spawn(async move {
                while served.load(Ordering::SeqCst) == 0 {
                    let permit = leases.semaphore("k", 4).wait(Duration::from_secs(60)).acquire().await.unwrap();
                    tokio::time::sleep(MILLIS(5)).await;
                    permit.release().await.unwrap();
                }
            });
        }
        let leases = Leases::new(db.pool.clone());
        let all = leases.semaphore("k", 4).take(4).wait(Duration::from_secs(60)).acquire().await;
        served.fetch_add(1, Ordering::SeqCst);
        let all = all.expect("it is served");
        assert!(all.is_trusted());
        all.release().await.unwrap();
        tasks.join_all().await;
        db.assert_nothing_left().await;
    }

    async fn a_body_that_has_too_many_permits_is_told_so<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).wait(Wait::Unbounded).build().unwrap();
        let asking = leases
            .semaphore("k", 5)
            .take(3)
            .run(|_| async { leases.semaphore("k", 5).take(3).acquire().await.map(drop) });
        let told = asking.await.unwrap_err();
        assert_eq!(
            told.to_string(),
            "this task already holds semaphore `k` and would wait for itself: hand the permit that it has to the code \
             that needs it (`lease.share()`), or give the semaphore more permits"
        );
        leases
            .semaphore("k", 5)
            .take(3)
            .run(|_| async { leases.semaphore("k", 5).take(2).acquire().await.map(drop) })
            .await
            .unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_number_of_permits_that_cannot_be_taken_is_an_error_that_says_so() {
    let leases = Leases::new(MemoryStore::new());
    let told = async |request: lockkit::LeaseRequest<MemoryStore, lockkit::MultiLease<MemoryStore>>| {
        let refused = request.acquire().await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { .. }), "{refused:?}");
        refused.to_string()
    };
    let six = "`take` asks for 6 permits, and the semaphore has 5; take 5 at most";
    assert_eq!(told(leases.semaphore("k", 5).take(6)).await, six);
    assert_eq!(leases.semaphore("k", 5).take(6).try_acquire().await.unwrap_err().to_string(), six);
    assert_eq!(told(leases.semaphore("k", 5).take(0)).await, "`take` is zero; take at least one permit");
    assert_eq!(told(leases.semaphore("k", 0).take(0)).await, "`semaphore` has no permits; give it at least one");
    let other = "`take` is for the permits of a semaphore; ask for several keys with `Leases::all`";
    assert_eq!(told(leases.lease("k").take(1)).await, other);
    assert_eq!(told(leases.rw("k").read().take(2)).await, other);
    assert!(told(leases.semaphore("k", 5).fair().take(2)).await.starts_with("`fair` is for single leases"));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_gathers_and_gives_up_keeps_nobody_out() {
    let store = MemoryStore::new();
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let one = here.semaphore("k", 3).acquire().await.unwrap();
    let request = || there.semaphore("k", 3).take(3).min_hold(Duration::from_mins(5)).wait(Duration::from_secs(2));
    let gathering = spawn(request().acquire());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(here.show("k/permit/gather").await.unwrap().is_some());
    assert!(here.semaphore("k", 3).try_acquire().await.unwrap().is_none(), "what is free is kept for it");
    assert!(gathering.await.unwrap().unwrap_err().is_contended());
    assert_eq!(here.list("k/permit/").await.unwrap().len(), 1, "nobody has worked under what it released");

    // The same for one that is dropped, and for a writer that waits for readers.
    let gathering = spawn(request().acquire());
    tokio::time::sleep(Duration::from_secs(1)).await;
    gathering.abort();
    let reader = here.rw("k").read().acquire().await.unwrap();
    let writer = there.rw("k").write().min_hold(Duration::from_mins(5)).wait(Duration::from_secs(1)).acquire().await;
    assert!(writer.unwrap_err().is_contended());
    assert!(here.rw("k").read().try_acquire().await.unwrap().is_some());
    assert_eq!(here.list("k/permit/").await.unwrap().len(), 1);
    one.release().await.unwrap();
    let permits = request().acquire().await.unwrap();
    permits.release().await.unwrap();
    assert_eq!(
        here.list("k/permit/").await.unwrap().len(),
        3,
        "the least holding time goes for permits that were granted"
    );
    drop(reader);
}

#[tokio::test(start_paused = true)]
async fn a_permit_beyond_those_that_are_asked_for_is_in_nobodys_way() {
    let leases = Leases::new(MemoryStore::new());
    let low = leases.semaphore("k", 1).acquire().await.unwrap();
    let body = async |permit: Lease<_>| {
        assert_eq!(permit.key().as_str(), "k/permit/1");
        low.release().await?;
        leases.semaphore("k", 1).acquire().await?.release().await
    };
    leases.semaphore("k", 2).run(body).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_before_its_answer_keeps_nobody_out() {
    let store = MemoryStore::new();
    let (leases, others) = (Leases::new(store.client()), Leases::new(store.client()));
    let hold = Duration::from_mins(5);
    let requests: [Request; 5] = [
        |it, hold| Box::pin(async move { it.lease("k").min_hold(hold).acquire().await.is_ok() }),
        |it, hold| Box::pin(async move { it.rw("k").read().min_hold(hold).acquire().await.is_ok() }),
        |it, hold| Box::pin(async move { it.rw("k").write().min_hold(hold).acquire().await.is_ok() }),
        |it, hold| Box::pin(async move { it.all(["a", "b"]).min_hold(hold).acquire().await.is_ok() }),
        |it, hold| Box::pin(async move { it.semaphore("k", 3).take(2).min_hold(hold).acquire().await.is_ok() }),
    ];
    for request in requests {
        let mut polls = 0;
        loop {
            polls += 1;
            let mut asking = request(leases.clone(), hold);
            let mut is_answered = false;
            for _ in 0..polls {
                is_answered = tokio::select! {
                    biased;
                    is_granted = &mut asking => is_granted,
                    () = ready(()) => false,
                };
                if is_answered {
                    break;
                }
                tokio::task::yield_now().await;
            }
            if is_answered {
                break;
            }
            drop(asking);
            tokio::time::sleep(MILLIS(100)).await;
            assert!(others.list("").await.unwrap().is_empty(), "after {polls} polls");
        }
        // The least time goes for what was granted, however short the caller had it.
        tokio::time::sleep(MILLIS(100)).await;
        assert!(!others.list("").await.unwrap().is_empty());
        tokio::time::sleep(hold).await;
    }
}

#[tokio::test(start_paused = true)]
async fn two_that_gather_do_not_wait_for_each_other_when_one_lost_its_right_to() {
    let store = MemoryStore::new();
    let new = || Leases::builder(store.client()).wait(Wait::Unbounded).build().unwrap();
    let (holder, one, two) = (new(), new(), new());
    let held: Vec<_> =
        [holder.semaphore("k", 4).acquire().await.unwrap(), holder.semaphore("k", 4).acquire().await.unwrap()].into();
    let first = spawn(one.semaphore("k", 4).take(4).acquire());
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        holder
            .list("k/permit/")
            .await
            .unwrap()
            .iter()
            .filter(|it| it.key.as_str().strip_prefix("k/permit/").unwrap().parse::<u32>().is_ok())
            .count(),
        4
    );
    let second = spawn(two.semaphore("k", 4).take(4).acquire());
    tokio::time::sleep(Duration::from_secs(2)).await;
    store.steal("k/permit/gather");
    tokio::time::sleep(Duration::from_secs(30)).await;
    for it in held {
        it.release().await.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let served = async {
        let (mut first, mut second) = (first, second);
        tokio::select! {
            it = &mut first => {
                it.unwrap().unwrap().release().await.unwrap();
                second.await.unwrap().unwrap().release().await.unwrap();
            }
            it = &mut second => {
                it.unwrap().unwrap().release().await.unwrap();
                first.await.unwrap().unwrap().release().await.unwrap();
            }
        }
    };
    tokio::time::timeout(Duration::from_mins(60), served).await.expect("they wait for each other");
}
