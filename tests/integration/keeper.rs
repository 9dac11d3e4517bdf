//! The keeper: many leases renewed by few statements, losses heard, pinned leases kept, one sweeper at a time.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit::{Error, LeaseStore, Leases, LossReason, OnLost, Released, RowLock, store::Answer};
use sqlx::pool::PoolOptions;
use support::{JoinSet, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// The number of connections to this database.
fn connections<S: Server>() -> &'static str {
    match S::NAME {
        "PostgreSQL" => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client \
             backend'"
        }
        "MySQL" => "SELECT COUNT(*) FROM performance_schema.processlist WHERE DB = DATABASE()",
        _ => "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = DATABASE()",
    }
}

/// Makes the lease's time run out at once, as if its holder had not renewed it.
async fn expire<S: support::Backend>(db: &TestDb<S>, key: &str) {
    assert_eq!(db.execute(&format!("UPDATE lockkit_lease SET expires_us = 1 WHERE name = '{key}'")).await, 1);
}

on_every_database! {
    async fn many_leases_are_renewed_together<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(3)).build().unwrap();
        let mut held = Vec::new();
        for number in 0..50 {
            held.push(leases.lease(format!("k:{number}")).acquire().await.unwrap());
        }
        // One is freed by an operator meanwhile, and only that one is lost.
        leases.steal("k:7").await.unwrap().unwrap();
        assert_eq!(timeout(Duration::from_secs(10), held[7].lost()).await.unwrap(), LossReason::Stolen);
        while !leases.list("k:").await.unwrap().iter().all(|it| it.renewals >= 2) {
            sleep(MILLIS(50)).await;
        }
        for (number, lease) in held.into_iter().enumerate() {
            let expected = if number == 7 { Released::AlreadyLost } else { Released::WhileHeld };
            assert_eq!(lease.release().await.unwrap(), expected, "{number}");
        }
    }

    async fn a_batch_of_renewals_is_answered_one_by_one_and_in_order<S>(db: TestDb<S>) {
        use lockkit::store::{Acquired, Claim, Renewal, Token};

        let store = &db.pool;
        let ttl = Duration::from_secs(30);
        let mut renewals = Vec::new();
        for number in (0..20).rev() {
            let claim = Claim::new(format!("k:{number}"), Token::random(), "h", ttl);
            assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
            // The token of some is another one.
            let token = if number % 3 == 0 { Token::random() } else { claim.token };
            renewals.push(Renewal::new(claim.key, token, ttl * 2));
        }
        let answers = store.lease_renew(&renewals).await.unwrap();
        let expected: Vec<_> =
            (0..20).rev().map(|it| if it % 3 == 0 { Answer::Gone } else { Answer::Done }).collect();
        assert_eq!(answers, expected);
        for held in store.lease_list("k:", 100).await.unwrap() {
            let renewed = renewals.iter().any(|it| it.key == held.info.key && it.token == held.token);
            assert_eq!((held.info.renewals, held.info.expires_in > ttl), (u64::from(renewed), renewed), "{held:?}");
        }
        assert_eq!(store.lease_renew(&[]).await.unwrap(), []);
    }

    async fn a_take_over_names_the_previous_holder<S>(db: TestDb<S>) {
        let first = Leases::builder(db.pool.clone()).holder("api-1").build().unwrap();
        let second = Leases::builder(db.pool.clone()).holder("api-2").build().unwrap();

        let dead = first.lease("k").acquire().await.unwrap();
        assert_eq!(dead.previous(), None);
        expire(&db, "k").await;
        let heir = second.lease("k").acquire().await.unwrap();
        let previous = heir.previous().expect("it was taken over").clone();
        assert_eq!((previous.holder.as_str(), previous.fence), ("api-1", dead.fence()));
        assert!(previous.expired_for > Duration::from_secs(1000), "it expired in 1970: {previous:?}");
        assert!(heir.fence() > dead.fence());

        // What was released was not taken over.
        heir.release().await.unwrap();
        assert_eq!(first.lease("k").acquire().await.unwrap().previous(), None);
    }

    async fn a_lease_released_early_stays_taken_until_its_least_time<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let hold = MILLIS(1500);
        let started = std::time::Instant::now();
        let lease = leases.lease("job").min_hold(hold).acquire().await.unwrap();
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        let next = leases.lease("job").wait(Duration::from_secs(10)).acquire().await.unwrap();
        assert!(started.elapsed() >= hold);
        assert_eq!(next.previous(), None, "it had been released");
        next.release().await.unwrap();

        // The same by a commit, and an operator can free it.
        let lease = leases.lease("job").min_hold(Duration::from_secs(600)).acquire().await.unwrap();
        lease.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap();
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        leases.steal("job").await.unwrap().unwrap();
        // A least time that is over has no effect.
        let lease = leases.lease("job").min_hold(MILLIS(50)).acquire().await.unwrap();
        sleep(MILLIS(60)).await;
        lease.release().await.unwrap();
        assert!(leases.lease("job").try_acquire().await.unwrap().is_some());
    }

    async fn a_body_that_is_to_go_on_runs_to_its_end_and_the_loss_is_still_told<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(MILLIS(600)).build().unwrap();
        let operator = leases.clone();
        let mut finished = false;
        let result = leases.lease("k").on_lost(OnLost::Continue).run(|lease| {
            let finished = &mut finished;
            async move {
                operator.steal("k").await?;
                lease.lost().await;
                sleep(MILLIS(50)).await;
                assert!(!lease.is_trusted());
                *finished = true;
                Ok::<_, Error>(())
            }
        });
        assert!(result.await.unwrap_err().is_lost());
        assert!(finished);
    }

    async fn a_lease_that_is_shared_is_released_with_the_last_handle<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let share = lease.share();
        assert_eq!((share.key(), share.fence()), (lease.key(), lease.fence()));
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        assert!(share.is_trusted());
        assert!(leases.lease("k").try_acquire().await.unwrap().is_none());

        let last = share.share();
        drop(share);
        sleep(MILLIS(200)).await;
        assert!(leases.show("k").await.unwrap().is_some());
        assert_eq!(last.release().await.unwrap(), Released::WhileHeld);
        assert_eq!(leases.show("k").await.unwrap(), None);

        // A commit gives it back for all.
        let lease = leases.lease("k").acquire().await.unwrap();
        let share = lease.share();
        lease.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap();
        assert!(!share.is_trusted());
        assert!(share.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap_err().is_lost());
    }

    async fn one_process_sweeps_at_a_time<S>(db: TestDb<S>) {
        // Somebody else holds the sweeper's lease.
        let other = Leases::builder(db.pool.clone()).sweep_every(None).build().unwrap();
        let sweeper = other.lease("lockkit/sweeper").acquire().await.unwrap();
        other.lease("old").acquire().await.unwrap().release().await.unwrap();
        db.execute("UPDATE lockkit_lease SET fence = 1000 WHERE name = 'old'").await;

        let leases = Leases::builder(db.pool.clone()).sweep_every(MILLIS(50)).build().unwrap();
        let kept = leases.lease("k").acquire().await.unwrap();
        sleep(MILLIS(500)).await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease WHERE name = 'old'").await, Some(1));

        sweeper.release().await.unwrap();
        let swept = async {
            while db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease WHERE name = 'old'").await != Some(0) {
                sleep(MILLIS(20)).await;
            }
        };
        timeout(Duration::from_secs(20), swept).await.expect("swept");
        kept.release().await.unwrap();
    }

    async fn a_pool_whose_connections_wait_for_each_other_says_so<S>(db: TestDb<S>) {
        let options = db.pool.options().clone().max_connections(1).acquire_timeout(MILLIS(300));
        let pool = options.connect_with((*db.pool.connect_options()).clone()).await.unwrap();
        let leases = Leases::builder(pool.clone()).own_connections(0).build().unwrap();
        let tx = lockkit::begin(&pool).await.unwrap();

        let refused = lockkit::begin(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::PoolStarved { held: 1, waiting: 1, size: 1, .. }), "{refused:?}");
        assert!(!refused.to_string().contains("own_connections"), "these are not used for transactions: {refused}");
        let refused = leases.lease("k").wait(MILLIS(100)).acquire().await.unwrap_err();
        assert!(matches!(refused, Error::PoolStarved { held: 1, size: 1, .. }), "{refused:?}");
        assert_eq!(refused.to_string().contains("own_connections(0)"), S::NAME != "SQLite", "{refused}");
        tx.rollback().await.unwrap();
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    }
}

on_every_server! {
    async fn leases_are_renewed_taken_and_released_though_the_pool_is_full<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)").await;
        db.execute("INSERT INTO t VALUES (1)").await;
        let pool = db.pool_of(5).await;
        let leases = Leases::builder(pool.clone()).ttl(MILLIS(3000)).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();

        // Each of 30 tasks waits for the row, or for a connection to wait with.
        let row = || RowLock::table("t").by("id", 1_i64).wait(Duration::from_mins(5));
        let mut locked = lockkit::begin(&db.pool).await.unwrap();
        row().lock(&mut locked).await.unwrap();
        let mut waiting = JoinSet::new();
        for _ in 0..30 {
            let (pool, row) = (pool.clone(), row());
            waiting.spawn(async move {
                let mut tx = lockkit::begin(&pool).await?;
                row.lock(&mut tx).await?;
                tx.commit().await
            });
        }
        while pool.size() < 5 || pool.num_idle() > 0 {
            sleep(MILLIS(5)).await;
        }

        let operator = Leases::new(db.pool.clone());
        let renewals = async || operator.show("k").await.unwrap().map(|it| it.renewals);
        let before = renewals().await.unwrap();
        while lease.is_trusted() && renewals().await.is_some_and(|it| it < before + 5) {
            sleep(MILLIS(20)).await;
        }
        assert!(lease.is_trusted(), "a held lease was lost because the pool is full");

        let free = leases.lease("free").wait(Duration::ZERO).acquire().await.expect("a free lease is granted");
        assert_eq!(free.release().await.unwrap(), Released::WhileHeld);
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        assert_eq!(operator.list("").await.unwrap(), []);
        assert_eq!(pool.num_idle(), 0, "the pool was full all the time");

        waiting.abort_all();
        locked.rollback().await.unwrap();
    }

    async fn connections_of_lockkits_own_are_few_and_closed_when_their_pool_is_dropped<S>(db: TestDb<S>) {
        let pool = db.pool_of(3).await;
        let all = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
        let mut operator = db.connect().await;
        let mut connections = async || S::fetch_i64(&mut operator, connections::<S>()).await.unwrap().unwrap();
        let before = connections().await;
        let mut taking = JoinSet::new();
        for number in 0..20 {
            // Each has settings of its own, and all share the connections.
            let leases = Leases::new(pool.clone());
            taking.spawn(async move { leases.lease(format!("k:{number}")).acquire().await?.release().await });
        }
        while let Some(taken) = taking.join_next().await {
            assert_eq!(taken.unwrap().unwrap(), Released::WhileHeld);
        }
        let most = connections().await;
        assert!((before + 1..=before + 2).contains(&most), "{most} connections, of which {before} were there before");
        drop((all, pool));
        while connections().await > before - 3 {
            sleep(MILLIS(20)).await;
        }
    }

    async fn a_lease_is_renewed_though_many_statements_about_others_wait_for_a_connection<S>(db: TestDb<S>) {
        let slow = db.pool.options().clone().before_acquire(|_, _| {
            Box::pin(async {
                sleep(MILLIS(100)).await;
                Ok(true)
            })
        });
        let pool = slow.connect_with((*db.pool.connect_options()).clone()).await.unwrap();
        let leases = Leases::builder(pool.clone()).ttl(MILLIS(3000)).own_connections(1).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        // As long as two leases live. Not all of them are answered in time.
        let mut looks = JoinSet::new();
        for _ in 0..70 {
            let leases = leases.clone();
            looks.spawn(async move { _ = leases.show("other").await });
        }
        while looks.join_next().await.is_some() {}
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    }

    async fn a_connection_that_is_promised_to_a_caller_nobody_polls_loses_no_lease<S>(db: TestDb<S>) {
        for is_closed in [false, true] {
            let options = PoolOptions::<<S as Server>::DB>::new().max_connections(1).acquire_timeout(MILLIS(30_000));
            let pool = options.connect(&db.url).await.unwrap();
            let leases = Leases::builder(pool.clone()).ttl(MILLIS(2000)).build().unwrap();
            let lease = leases.lease("k").acquire().await.unwrap();
            let only = pool.acquire().await.unwrap();
            let mut not_polled = pin!(pool.acquire());
            timeout(MILLIS(50), &mut not_polled).await.unwrap_err();
            if is_closed { only.close().await.unwrap() } else { drop(only) }
            for _ in 0..15 {
                sleep(MILLIS(200)).await;
                leases.lease("other").acquire().await.unwrap().release().await.unwrap();
            }
            assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
            not_polled.await.unwrap();
        }
    }

    async fn calls_that_are_more_than_the_connections_serve_are_told_so_and_open_no_connection_each<S>(db: TestDb<S>) {
        let (proxy, connects) = (Proxy::start(&db.url), Arc::new(Semaphore::new(1)));
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(1).acquire_timeout(MILLIS(1000));
        let options = options.after_connect({
            let connects = connects.clone();
            move |_, _| {
                let connects = connects.clone();
                Box::pin(async move {
                    _ = connects.acquire().await;
                    Ok(())
                })
            }
        });
        let pool = options.connect(proxy.url()).await.unwrap();
        let leases = Leases::new(pool.clone());
        // The leases' own connection is slow to open.
        let (only, slow) = (pool.acquire().await.unwrap(), connects.acquire().await.unwrap());
        let before = proxy.connections();
        let mut looks = JoinSet::new();
        for _ in 0..100 {
            let leases = leases.clone();
            looks.spawn(async move { leases.show("k").await });
        }
        while let Some(look) = looks.join_next().await {
            let err = look.unwrap().unwrap_err();
            assert!(err.to_string().contains("come faster than these"), "{err}");
        }
        let opened = proxy.connections() - before;
        assert!(opened < 20, "{opened} connections were opened for 100 calls");
        drop((only, slow));
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    }

    async fn leases_with_connections_of_their_own_do_not_need_the_pools<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let leases = Leases::builder(pool.clone()).own_connections(2).build().unwrap();
        let mut tx = lockkit::begin(&pool).await.unwrap();
        let lease = leases.lease("k").ttl(MILLIS(3000)).acquire().await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        sleep(MILLIS(4500)).await;
        lease.commit(tx).await.unwrap();
        let in_the_pool = lockkit::begin(leases.store()).await.unwrap();
        in_the_pool.rollback().await.unwrap();
    }

    // A transaction that pins its lease blocks the lease's own renewal: a false loss after every long transaction.
    async fn a_transaction_may_pin_its_lease_for_longer_than_the_ttl<S>(db: TestDb<S>) {
        let ttl = MILLIS(3000);
        let leases = Leases::builder(db.pool.clone()).ttl(ttl).build().unwrap();
        let mut held = Vec::new();
        for number in 0..30 {
            held.push(leases.lease(format!("k:{number:02}")).acquire().await.unwrap());
        }
        let pinned = held.remove(7);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        pinned.verify(&mut tx).await.unwrap();
        sleep(ttl * 2).await;
        assert!(pinned.is_trusted() && held.iter().all(lockkit::Lease::is_trusted), "no false loss");
        let renewals: Vec<_> = leases.list("k:").await.unwrap().iter().map(|it| it.renewals).collect();
        assert!(renewals.len() == 30 && renewals.iter().all(|it| *it >= 3), "{renewals:?}");

        pinned.commit(tx).await.unwrap();
        for lease in held {
            assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        }
        db.assert_nothing_left().await;
    }

    async fn nobody_can_take_or_free_a_pinned_lease_that_has_expired<S>(db: TestDb<S>) {
        // It is not renewed in the meantime.
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_mins(10)).build().unwrap();
        let pinned = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        pinned.verify(&mut tx).await.unwrap();
        expire(&db, "k").await;
        assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
        pinned.commit(tx).await.unwrap();
        assert!(leases.lease("k").try_acquire().await.unwrap().is_some());
    }

    async fn a_pin_holds_in_any_isolation<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let set = if S::NAME == "PostgreSQL" {
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
        } else {
            "SELECT COUNT(*) FROM lockkit_lease"
        };
        // The driver's own transactions are REPEATABLE READ on MySQL and MariaDB.
        let mut tx = db.pool.begin().await.unwrap();
        <S as Server>::execute(&mut tx, set).await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        lease.verify(&mut tx).await.unwrap();
        assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
        // Others are not in the way, new ones neither.
        for number in 0..50 {
            leases.lease(format!("new:{number}")).acquire().await.unwrap().release().await.unwrap();
        }
        lease.commit(tx).await.unwrap();
        assert!(leases.lease("k").try_acquire().await.unwrap().is_some());
    }
}

/// The number of locks that listening waiters share in this database.
const WAITERS_LOCKS: &str = "SELECT COUNT(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database
    WHERE datname = current_database() AND locktype = 'advisory' AND mode = 'ShareLock' AND granted";

on_databases! { [postgres]
    async fn renewals_touch_no_index<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(MILLIS(1500)).renew_every(MILLIS(100)).build().unwrap();
        let mut held = Vec::new();
        for number in 0..100 {
            held.push(leases.lease(format!("k:{number}")).acquire().await.unwrap());
        }
        let count = async |column: &str| {
            db.fetch_i64(&format!("SELECT {column} FROM pg_stat_user_tables WHERE relname = \
                                   'lockkit_lease'")).await.unwrap()
        };
        let updates = loop {
            match count("n_tup_upd").await {
                updates @ 1000.. => break updates,
                _ => sleep(MILLIS(50)).await,
            }
        };
        let hot = count("n_tup_hot_upd").await;
        println!("{hot} of {updates} updates were HOT");
        // None would be if an index had a column that they write. A page that is full while an old version is still
        // visible to a slow statement spoils some.
        assert!(hot * 2 >= updates, "{hot} of {updates}");
        drop(held);
    }

    async fn a_release_elsewhere_wakes_listeners<S>(db: TestDb<S>) {
        let holder = Leases::new(db.pool.clone());
        let waiter = Leases::builder(db.pool_of(2).await).listen().build().unwrap();
        for round in 0..3 {
            let lease = holder.lease("k").acquire().await.unwrap();
            let waiting = spawn(waiter.lease("k").wait(Duration::from_secs(20)).acquire());
            while db.fetch_i64(WAITERS_LOCKS).await != Some(1) {
                sleep(MILLIS(5)).await;
            }
            if round == 1 {
                lease.commit(lockkit::begin(&db.pool).await.unwrap()).await.unwrap();
            } else {
                lease.release().await.unwrap();
            }
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
        // Nobody waits, so nobody is told: a release takes no lock of the server's.
        drop(waiter);
        db.assert_nothing_left().await;
    }

    async fn a_release_elsewhere_wakes_requests_for_several_that_listen<S>(db: TestDb<S>) {
        let holder = Leases::new(db.pool.clone());
        let waiter = Leases::builder(db.pool_of(2).await).listen().build().unwrap();
        let lease = holder.lease("b").acquire().await.unwrap();
        let waiting = spawn(waiter.all(["a", "b"]).wait(Duration::from_secs(20)).acquire());
        // It listens for both keys.
        while db.fetch_i64(WAITERS_LOCKS).await != Some(2) {
            sleep(MILLIS(5)).await;
        }
        lease.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }

    async fn a_listener_ends_with_its_pool<S>(db: TestDb<S>) {
        let lease = Leases::new(db.pool.clone()).lease("k").acquire().await.unwrap();
        let pool = db.pool_of(1).await;
        let listening = Leases::builder(pool.clone()).listen().build().unwrap();
        let waiting = spawn(listening.lease("k").wait(Duration::from_secs(20)).acquire());
        let listener = WAITERS_LOCKS.replace("COUNT(*)", "pid");
        let pid = loop {
            if let Some(pid) = db.fetch_i64(&listener).await {
                break pid;
            }
            sleep(MILLIS(5)).await;
        };
        pool.close().await;
        while db.fetch_i64(&format!("SELECT 1 FROM pg_stat_activity WHERE pid = {pid}")).await.is_some() {
            sleep(MILLIS(5)).await;
        }
        drop(waiting.await);
        drop((listening, lease));
    }

    async fn a_release_notifies_only_listeners<S>(db: TestDb<S>) {
        let mut ears = sqlx::postgres::PgListener::connect_with(&db.pool).await.unwrap();
        ears.listen("lockkit_freed").await.unwrap();
        let leases = Leases::new(db.pool.clone());
        leases.lease("alone").acquire().await.unwrap().release().await.unwrap();

        let lease = leases.lease("k").acquire().await.unwrap();
        let listening = Leases::builder(db.pool.clone()).listen().build().unwrap();
        let waiting = spawn(listening.lease("k").wait(Duration::from_secs(20)).acquire());
        while db.fetch_i64(WAITERS_LOCKS).await != Some(1) {
            sleep(MILLIS(5)).await;
        }
        lease.release().await.unwrap();
        let heard = timeout(Duration::from_secs(10), ears.recv()).await.expect("told").unwrap();
        assert_eq!(heard.payload(), "k", "and not of the one that nobody waited for");
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}
