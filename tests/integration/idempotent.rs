//! Answers that are stored in the transaction of the work.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lockkit::dialect::IdempotentOps;
use lockkit::{Answered, Error, Fault, Idempotent, Leases, Tx, with_lock};
use sqlx::Pool;
use sqlx::pool::PoolOptions;
use support::{
    Backend, JoinSet, PlainSql, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn,
};
use tokio::time::{sleep, timeout};

/// An answer with all that JSON has to escape.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Receipt {
    number: u64,
    note: Option<String>,
    parts: Vec<(u8, String)>,
}

fn receipt(number: u64) -> Receipt {
    let text = "ü \u{1f512} '\"\\ \u{0} \n 'x'; --".to_owned();
    Receipt { number, note: Some(text.clone()), parts: vec![(0, text), (255, String::new())] }
}

#[derive(Debug, PartialEq, thiserror::Error, serde::Serialize, serde::Deserialize)]
enum Refused {
    #[error("declined: {0}")]
    Declined(String),
    #[error("{0}")]
    Failed(String),
}

impl Refused {
    fn is_declined(&self) -> bool {
        matches!(self, Self::Declined(_))
    }
}

impl From<Error> for Refused {
    fn from(err: Error) -> Self {
        Self::Failed(err.to_string())
    }
}

async fn charge<DB: IdempotentOps + PlainSql>(tx: &mut Tx<DB>, key: &str) -> Result<(), Error> {
    let charged = DB::execute(&mut *tx, &format!("INSERT INTO charges VALUES ('{key}')")).await;
    charged.map(drop).map_err(|err| Error::database("charging", None, Fault::Other, err))
}

async fn charges<S: Backend>(db: &TestDb<S>) -> i64 {
    db.fetch_i64("SELECT COUNT(*) FROM charges").await.unwrap()
}

async fn with_charges<S: Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE charges (name VARCHAR(99))").await;
}

on_every_database! {
    async fn a_repeated_request_gets_the_first_answer<S>(db: TestDb<S>) {
        with_charges(&db).await;
        for key in ["pay:1", "pay:2"] {
            for round in 0..3 {
                let answered = Idempotent::key(key).request(&("cents", 1999)).run(&db.pool, async |tx| {
                    charge(tx, "x").await?;
                    Ok::<_, Error>(receipt(round))
                });
                let answered = answered.await.unwrap();
                assert_eq!(answered.is_before(), round > 0);
                assert_eq!(answered.into_inner(), receipt(0));
            }
        }
        assert_eq!(charges(&db).await, 2);
        db.assert_nothing_left().await;
    }

    async fn requests_at_the_same_time_get_one_answer<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let numbers = std::sync::Arc::new(AtomicU64::new(0));
        let mut requests = JoinSet::new();
        for task in 0..48 {
            let (pool, numbers) = (db.pool.clone(), numbers.clone());
            requests.spawn(async move {
                let key = format!("pay:{}", task % 4);
                let wait = Duration::from_secs(60);
                let answered = Idempotent::key(&*key).wait(wait).run(&pool, async |tx| {
                    charge(tx, &key).await?;
                    Ok::<_, Error>(receipt(numbers.fetch_add(1, Relaxed)))
                });
                (task % 4, answered.await.unwrap())
            });
        }
        let mut answers = requests.join_all().await;
        answers.sort_by_key(|(key, answered)| (*key, answered.is_before()));
        for of_key in answers.chunks(12) {
            let Answered::Now(first) = &of_key[0].1 else { panic!("nobody did the work: {of_key:?}") };
            for (_, answered) in &of_key[1..] {
                assert_eq!(*answered, Answered::Before(first.clone()));
            }
        }
        assert_eq!(charges(&db).await, 4);
    }

    async fn what_fails_leaves_neither_work_nor_answer<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let key = || Idempotent::key("k");
        let failed = key().run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            Err::<(), _>(Error::conflict())
        });
        assert!(failed.await.unwrap_err().is_conflict());

        let pool = db.pool.clone();
        let panicked = spawn(async move {
            let body = async |tx: &mut Tx<_>| {
                charge(tx, "k").await?;
                assert!(charge(tx, "k").await.is_err(), "a bug of the application");
                Ok::<_, Error>(())
            };
            Idempotent::key("k").run(&pool, body).await
        });
        assert!(panicked.await.unwrap_err().is_panic());

        let dropped = key().run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            std::future::pending::<Result<(), Error>>().await
        });
        assert!(timeout(Duration::from_millis(300), dropped).await.is_err());

        let too_large = key().max_answer(10).run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            Ok::<_, Error>("0123456789".to_owned())
        });
        let too_large = too_large.await.unwrap_err();
        assert!(too_large.to_string().starts_with("the answer of `k` cannot be stored"), "{too_large}");
        let source = std::error::Error::source(&too_large).unwrap().to_string();
        assert_eq!(source, "it has 12 bytes, and `max_answer` allows 10");

        let no_json = key().run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            Ok::<_, Error>(std::collections::BTreeMap::from([(vec![1], 1)]))
        });
        let no_json = no_json.await.unwrap_err();
        assert!(matches!(&no_json, Error::Answer { key, .. } if *key == "k"), "{no_json:?}");

        assert_eq!(charges(&db).await, 0);
        let done = key().run(&db.pool, async |tx| charge(tx, "k").await).await.unwrap();
        assert_eq!(done, Answered::Now(()));
        assert_eq!(charges(&db).await, 1);
        db.assert_nothing_left().await;
    }

    async fn another_request_with_the_same_key_is_refused<S>(db: TestDb<S>) {
        let pay = async |cents: u32| {
            Idempotent::key("pay:1").request(&cents).run(&db.pool, async |_| Ok::<_, Error>(cents)).await
        };
        assert_eq!(pay(5).await.unwrap(), Answered::Now(5));
        let mismatch = pay(6).await.unwrap_err();
        assert!(matches!(&mismatch, Error::Mismatch { key, .. } if *key == "pay:1"), "{mismatch:?}");
        assert_eq!(pay(5).await.unwrap(), Answered::Before(5));
        let without = Idempotent::key("pay:1").run(&db.pool, async |_| Ok::<_, Error>(5_u32)).await.unwrap_err();
        assert!(matches!(without, Error::Mismatch { .. }), "{without:?}");
        let long = "x".repeat(256);
        let bad_key = Idempotent::key(&*long).run(&db.pool, async |_| Ok::<_, Error>(())).await.unwrap_err();
        assert!(matches!(bad_key, Error::InvalidKey { .. }), "{bad_key:?}");
        let not_kept = Idempotent::key("k").keep(Duration::ZERO).run(&db.pool, async |_| Ok::<_, Error>(()));
        assert!(not_kept.await.unwrap_err().to_string().starts_with("`keep` must be longer"));
        let for_ever = || Idempotent::key("for ever").keep(Duration::MAX).run(&db.pool, async |_| Ok::<_, Error>(()));
        assert!(!for_ever().await.unwrap().is_before() && for_ever().await.unwrap().is_before());
    }

    async fn an_answer_of_another_type_is_an_error_and_the_work_is_not_done<S>(db: TestDb<S>) {
        let before = Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>("text".to_owned()));
        before.await.unwrap();
        let deployed = Idempotent::key("k").run(&db.pool, async |_| -> Result<u64, Error> { panic!("it was done") });
        let err = deployed.await.unwrap_err();
        assert_eq!(err.to_string(), "the answer of `k` was stored and cannot be read as `u64`");
    }

    async fn without_the_table_nothing_is_done_and_it_is_said_what_to_do<S>(db: TestDb<S>) {
        db.execute("DROP TABLE lockkit_answer").await;
        let run = Idempotent::key("k").run(&db.pool, async |_| -> Result<(), Error> { panic!("it was done") });
        let leases = Leases::new(db.pool.clone());
        let outside = Idempotent::key("k").outside(&leases, async |_| -> Result<(), Error> { panic!("it was done") });
        for err in [run.await.unwrap_err(), outside.await.unwrap_err()] {
            assert!(matches!(err, Error::NotMigrated { .. }), "{err:?}");
        }
        assert_eq!(leases.list("").await.unwrap(), []);
        db.assert_nothing_left().await;
    }

    async fn an_expired_answer_does_not_count<S>(db: TestDb<S>) {
        let keep = Duration::from_millis(50);
        for round in 0..3 {
            let run = Idempotent::key("k").request(&round).keep(keep).run(&db.pool, async |_| Ok::<_, Error>(round));
            assert_eq!(run.await.unwrap(), Answered::Now(round));
            sleep(keep * 2).await;
        }
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_answer").await, Some(1));
    }

    async fn the_wait_for_another_request_is_bounded<S>(db: TestDb<S>) {
        let (pool, bound) = (&db.pool, Duration::from_millis(1500));
        for key in ["one", "two"] {
            let waiting = Idempotent::key(key).run(pool, async |_| {
                // In another task: in this one it would be refused as the body of the same key.
                let pool = pool.clone();
                let second = async move { Idempotent::key(key).wait(bound).run(&pool, async |_| Ok(())).await };
                let started = Instant::now();
                let refused: Error = spawn(second).await.unwrap().unwrap_err();
                assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
                Ok::<_, Error>(refused.is_contended())
            });
            assert!(waiting.await.unwrap().into_inner());
        }
    }

    async fn nothing_is_stored_when_the_body_has_ended_its_transaction<S>(db: TestDb<S>) {
        with_charges(&db).await;
        for ended in ["ROLLBACK", "ROLLBACK; BEGIN", "ROLLBACK"] {
            let ended = Idempotent::key("k").run(&db.pool, async |tx| {
                charge(tx, "k").await?;
                for statement in ended.split("; ") {
                    S::execute(tx, statement).await.expect("a statement");
                }
                Ok::<_, Error>(6)
            });
            let err = ended.await.unwrap_err();
            assert!(matches!(err, Error::TransactionEnded { .. }), "{err:?}");
        }
        assert_eq!(charges(&db).await, 0);
        let done = Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(7)).await.unwrap();
        assert_eq!(done, Answered::Now(7));
        db.assert_nothing_left().await;
    }

    async fn nothing_is_stored_after_a_commit_or_a_failure_that_the_body_overlooks<S>(db: TestDb<S>) {
        for ended in ["COMMIT", "COMMIT; BEGIN"] {
            let ended = Idempotent::key("k").run(&db.pool, async |tx| {
                for statement in ended.split("; ") {
                    S::execute(tx, statement).await.expect("a statement");
                }
                Ok::<_, Error>(6)
            });
            let err = ended.await.unwrap_err();
            assert!(matches!(err, Error::TransactionEnded { .. }), "{err:?}");
        }
        let done = Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(7)).await.unwrap();
        assert_eq!(done, Answered::Now(7));

        // On PostgreSQL a statement that fails is the end of its transaction.
        let is_end = S::NAME == "PostgreSQL";
        let overlooked = Idempotent::key("overlooked").run(&db.pool, async |tx| {
            assert!(S::execute(tx, "INSERT INTO no_such_table VALUES (1)").await.is_err());
            Ok::<_, Error>(7)
        });
        assert_eq!(overlooked.await.is_err(), is_end);
        let again = Idempotent::key("overlooked").run(&db.pool, async |_| Ok::<_, Error>(8)).await.unwrap();
        assert_eq!(again, if is_end { Answered::Now(8) } else { Answered::Before(7) });
        db.assert_nothing_left().await;
    }

    async fn errors_that_are_answers_are_stored_without_the_work<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let pool = &db.pool;
        let request = |key: &str| Idempotent::key(key).request(&5).store_err(Refused::is_declined);
        let declined = || Err(Refused::Declined("no funds".to_owned()));
        for round in 0..3 {
            let answered = request("k").run(pool, async |tx| {
                charge(tx, "k").await?;
                declined()
            });
            let answered: Result<Answered<Result<u32, _>>, _> = answered.await;
            let expected = if round == 0 { Answered::Now(declined()) } else { Answered::Before(declined()) };
            assert_eq!(answered, Ok(expected));
        }
        // A value, and an error that is no answer.
        for round in 0..2 {
            let failed: Result<_, Refused> = request("v").run(pool, async |tx| {
                charge(tx, "v").await?;
                Err::<u32, _>(Refused::Failed("no connection".to_owned()))
            }).await;
            let no_answer = || Err(Refused::Failed("no connection".to_owned()));
            assert_eq!(failed, if round == 0 { no_answer() } else { Ok(Answered::Before(Ok(7))) });
            let paid = request("v").run(pool, async |tx| charge(tx, "v").await.map(|()| 7).map_err(Refused::from));
            assert_eq!(paid.await, Ok(if round == 0 { Answered::Now(Ok(7)) } else { Answered::Before(Ok(7)) }));
        }
        assert_eq!(charges(&db).await, 1);
        // Another request, one that does not store errors, and an error that is too large.
        let other = Idempotent::key("k").request(&6).store_err(Refused::is_declined);
        let mismatch = other.run(pool, async |_| Ok(7)).await.unwrap_err();
        assert!(mismatch.to_string().starts_with("`k` was answered for another request"), "{mismatch}");
        let plain = Idempotent::key("k").request(&5).run(pool, async |_| Ok::<_, Error>(7)).await.unwrap_err();
        assert!(matches!(plain, Error::Answer { .. }), "{plain:?}");
        let large = Idempotent::key("large").max_answer(10).store_err(Refused::is_declined);
        let large = large.run(pool, async |_| Err::<u32, _>(Refused::Declined("x".repeat(10)))).await.unwrap_err();
        assert!(large.to_string().starts_with("the answer of `large` cannot be stored"), "{large}");
        db.assert_nothing_left().await;
    }

    async fn errors_that_are_answers_are_stored_once<S>(db: TestDb<S>) {
        let numbers = std::sync::Arc::new(AtomicU64::new(0));
        let mut requests = JoinSet::new();
        for task in 0..32 {
            let (pool, numbers) = (db.pool.clone(), numbers.clone());
            requests.spawn(async move {
                let request = Idempotent::key(format!("pay:{}", task % 4)).wait(Duration::from_secs(60));
                let answered = request.store_err(Refused::is_declined).run(&pool, async |_| {
                    Err::<u32, _>(Refused::Declined(numbers.fetch_add(1, Relaxed).to_string()))
                });
                answered.await.unwrap().into_inner().unwrap_err().to_string()
            });
        }
        let answers: std::collections::HashSet<_> = requests.join_all().await.into_iter().collect();
        assert_eq!((answers.len(), numbers.load(Relaxed)), (4, 4));
    }

    async fn an_error_is_stored_in_the_state_before_the_body_or_not_at_all<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let request = |key: &str| Idempotent::key(key).store_err(Refused::is_declined);
        let declined = || Err::<u32, _>(Refused::Declined("no funds".to_owned()));
        // A statement failed before, after which PostgreSQL answers no other one.
        let overlooked = request("overlooked").run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            assert!(S::execute(tx, "INSERT INTO no_such_table VALUES (1)").await.is_err());
            declined()
        });
        assert_eq!(overlooked.await, Ok(Answered::Now(declined())));
        // The body has ended the transaction that has the lock of the key.
        for ended in ["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN"] {
            let ended = request("ended").run(&db.pool, async |tx| {
                for statement in ended.split("; ") {
                    S::execute(tx, statement).await.expect("a statement");
                }
                declined()
            });
            let err = ended.await.unwrap_err();
            assert!(err.to_string().starts_with("the database ended the transaction"), "{err}");
        }
        assert_eq!(request("ended").run(&db.pool, async |_| Ok(7)).await, Ok(Answered::Now(Ok(7))));
        assert_eq!(request("overlooked").run(&db.pool, async |_| Ok(7)).await, Ok(Answered::Before(declined())));
        assert_eq!(charges(&db).await, 0);
        db.assert_nothing_left().await;
    }

    async fn a_function_stores_the_errors_that_are_answers<S>(db: TestDb<S>) {
        #[with_lock(idempotent, on = pool, key = "pay:{cents}", store_err = Refused::is_declined, tx = tx)]
        async fn pay<DB: IdempotentOps + PlainSql>(
            pool: &Pool<DB>,
            cents: u64,
            now: &AtomicU64,
        ) -> Result<u64, Refused> {
            charge(&mut tx, "k").await?;
            let now = now.fetch_add(1, Relaxed);
            if cents == 0 { Err(Refused::Declined(now.to_string())) } else { Err(Refused::Failed(now.to_string())) }
        }
        /// Its error type cannot be `From<lockkit::Error>`.
        #[with_lock(
            idempotent, on = pool, key = "mapped:{cents}", store_err = |err: &String| err == "declined", tx = tx,
            map_err = |err| err.to_string()
        )]
        async fn mapped<DB: IdempotentOps + PlainSql>(
            pool: &Pool<DB>,
            cents: u64,
            now: &AtomicU64,
        ) -> Result<(), String> {
            charge(&mut tx, "k").await.unwrap();
            now.fetch_add(1, Relaxed);
            Err(if cents == 0 { "declined".to_owned() } else { "failed".to_owned() })
        }

        with_charges(&db).await;
        let (pool, now) = (&db.pool, &AtomicU64::new(0));
        for _ in 0..2 {
            assert_eq!(pay(pool, 0, now).await, Err(Refused::Declined("0".to_owned())));
        }
        for round in 1..3 {
            assert_eq!(pay(pool, 1, now).await, Err(Refused::Failed(round.to_string())));
        }
        for _ in 0..2 {
            assert_eq!(mapped(pool, 0, now).await.unwrap_err(), "declined");
            assert_eq!(mapped(pool, 1, now).await.unwrap_err(), "failed");
        }
        assert_eq!((charges(&db).await, now.load(Relaxed)), (0, 6));
        db.assert_nothing_left().await;
    }

    async fn a_body_does_not_wait_for_itself<S>(db: TestDb<S>) {
        let pool = &db.pool;
        let within = Idempotent::key("k").run(pool, async |_| {
            let refused = Idempotent::key("k").run(pool, async |_| Ok::<_, Error>(())).await.unwrap_err();
            Ok::<_, Error>(matches!(refused, Error::Reentrant { .. }))
        });
        assert!(within.await.unwrap().into_inner());
    }

    async fn sweeps_delete_what_has_expired<S>(db: TestDb<S>) {
        for number in 0..30 {
            let keep = if number % 3 == 0 { Duration::from_secs(3600) } else { Duration::from_millis(1) };
            let key = format!("k{number}");
            Idempotent::key(key).keep(keep).run(&db.pool, async |_| Ok::<_, Error>(())).await.unwrap();
        }
        sleep(Duration::from_millis(10)).await;
        // In several statements.
        lockkit::LeaseStore::lease_sweep(&db.pool, Duration::from_secs(3600), 7).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_answer").await, Some(10));
    }
}

on_every_server! {
    async fn those_who_wait_for_a_request_that_fails_do_not_disturb_each_other<S>(db: TestDb<S>) {
        for wait in [Duration::from_millis(900), Duration::from_secs(20)] {
            let key = format!("m:{}", wait.as_millis());
            let (has_begun, begun) = tokio::sync::oneshot::channel();
            let first = spawn({
                let (pool, key) = (db.pool.clone(), key.clone());
                async move {
                    let body = async |_: &mut Tx<_>| {
                        has_begun.send(()).expect("a test that waits");
                        sleep(Duration::from_millis(300)).await;
                        Err::<u32, _>(Error::conflict())
                    };
                    Idempotent::key(key).run(&pool, body).await
                }
            });
            begun.await.unwrap();
            let mut others = JoinSet::new();
            for number in 0..4 {
                let (pool, key) = (db.pool.clone(), key.clone());
                others.spawn(async move {
                    let body = async |_: &mut Tx<_>| {
                        sleep(Duration::from_millis(100)).await;
                        Ok::<_, Error>(number)
                    };
                    Idempotent::key(key).wait(wait).run(&pool, body).await
                });
            }
            assert!(first.await.unwrap().unwrap_err().is_conflict());
            // Others have new keys, beside that key, while one of those that waited does the work.
            for name in ["a", "l", "n", "z"] {
                let name = format!("{name}:{}", wait.as_millis());
                let new = Idempotent::key(name).wait(Duration::from_secs(5));
                assert!(!new.run(&db.pool, async |_| Ok::<_, Error>(())).await.unwrap().is_before());
            }
            let answers: Vec<_> = others.join_all().await.into_iter().map(Result::unwrap).collect();
            assert_eq!(answers.iter().filter(|it| !it.is_before()).count(), 1, "{answers:?}");
            let first = answers[0].into_inner();
            assert!(answers.iter().all(|it| it.into_inner() == first), "{answers:?}");
        }
        db.assert_nothing_left().await;
    }

    async fn a_sweep_waits_for_no_request<S>(db: TestDb<S>) {
        let old = |keep| Idempotent::key("old").keep(keep);
        old(Duration::from_millis(1)).run(&db.pool, async |_| Ok::<_, Error>(())).await.unwrap();
        sleep(Duration::from_millis(10)).await;
        let (pool, elsewhere) = (&db.pool, db.pool_of(2).await);
        let again = old(Duration::from_secs(9)).run(pool, async |_| {
            let sweep = lockkit::LeaseStore::lease_sweep(pool, Duration::from_secs(3600), 10);
            timeout(Duration::from_secs(3), sweep).await.expect("it waits for nothing").unwrap();
            let new = Idempotent::key("new").wait(Duration::from_secs(3));
            new.run(&elsewhere, async |_| Ok::<_, Error>(())).await.map(Answered::into_inner)
        });
        assert!(!again.await.unwrap().is_before());
        assert!(old(Duration::from_secs(9)).run(pool, async |_| Ok::<_, Error>(())).await.unwrap().is_before());
    }

    async fn after_a_lost_answer_of_the_commit_the_next_request_knows<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(2).connect(proxy.url()).await.unwrap();
        for round in 0..8_i64 {
            let key = format!("pay:{round}");
            let lost = Idempotent::key(&*key).run(&pool, async |tx| {
                charge(tx, &key).await?;
                proxy.hold_replies_to("COMMIT");
                Ok::<_, Error>(receipt(0))
            });
            tokio::select! {
                answered = lost => panic!("the answer is held back: {answered:?}"),
                () = proxy.replies_are_held() => {}
            }
            proxy.reset();
            proxy.pass_replies();
            let again = Idempotent::key(&*key).run(&pool, async |tx| {
                charge(tx, &key).await?;
                Ok::<_, Error>(receipt(1))
            });
            let again = again.await.unwrap();
            assert_eq!(again.is_before(), again.into_inner() == receipt(0));
            assert_eq!(charges(&db).await, round + 1);
        }
    }

    async fn a_function_does_its_work_once<S>(db: TestDb<S>) {
        #[derive(Debug, thiserror::Error)]
        enum Refused {
            #[error(transparent)]
            Lock(#[from] Error),
            #[error("declined")]
            Declined,
        }
        /// Requests its own key.
        #[with_lock(idempotent, on = pool, key = const "again", tx = tx, map_err = |err| err.to_string())]
        async fn again<DB: IdempotentOps + PlainSql>(pool: &Pool<DB>) -> Result<(), String> {
            charge(&mut tx, "again").await.unwrap();
            let inner = Idempotent::key("again").run(pool, async |_| Ok::<_, Error>(())).await.unwrap_err();
            assert!(matches!(inner, Error::Reentrant { .. }), "{inner:?}");
            Err("changed its mind".to_owned())
        }
        #[with_lock(
            idempotent, on = pool, key = "pay:{user}:{key}", request = &cents, keep = "1h", wait = "5s",
            max_answer = 4096, on_busy = Ok(None), tx = tx
        )]
        async fn pay<DB: IdempotentOps + PlainSql>(
            pool: &Pool<DB>,
            user: u32,
            key: String,
            cents: u64,
        ) -> Result<Option<Receipt>, Refused> {
            charge(&mut tx, &key).await?;
            if cents == 0 {
                return Err(Refused::Declined);
            }
            if cents == 13 {
                return Ok(Some(Receipt { note: Some("x".repeat(5000)), ..receipt(cents) }));
            }
            drop(key);
            Ok(Some(receipt(cents)))
        }

        with_charges(&db).await;
        let pool = &db.pool;
        let key = || "8e03".to_owned();
        for _ in 0..3 {
            assert_eq!(pay(pool, 7, key(), 1999).await.unwrap(), Some(receipt(1999)));
        }
        assert_eq!(charges(&db).await, 1);
        // The key of another user, and another request with the same key.
        assert_eq!(pay(pool, 8, key(), 5).await.unwrap(), Some(receipt(5)));
        assert!(matches!(pay(pool, 7, key(), 5).await, Err(Refused::Lock(Error::Mismatch { .. }))));
        // What fails is done again.
        for _ in 0..2 {
            assert!(matches!(pay(pool, 9, key(), 0).await, Err(Refused::Declined)));
        }
        let large = pay(pool, 10, key(), 13).await.unwrap_err();
        assert!(matches!(large, Refused::Lock(Error::Answer { .. })), "{large:?}");
        assert_eq!(charges(&db).await, 2);
        db.assert_nothing_left().await;
        assert_eq!(again(pool).await.unwrap_err(), "changed its mind");
        assert_eq!(charges(&db).await, 2);
    }

    async fn functions_at_the_same_time_do_their_work_once<S>(db: TestDb<S>) {
        #[with_lock(idempotent, on = &pool, key = "key:{key}", tx = tx)]
        async fn once<DB: IdempotentOps + PlainSql>(pool: Pool<DB>, key: u32, task: u64) -> Result<u64, Error> {
            charge(&mut tx, "x").await?;
            sleep(Duration::from_millis(3)).await;
            Ok(task)
        }
        with_charges(&db).await;
        let mut tasks = JoinSet::new();
        for task in 0..40 {
            tasks.spawn(once(db.pool.clone(), u32::try_from(task % 4).unwrap(), task));
        }
        let answers: std::collections::HashSet<u64> = tasks.join_all().await.into_iter().map(Result::unwrap).collect();
        assert_eq!((answers.len(), charges(&db).await), (4, 4));
    }

    async fn a_stored_answer_costs_one_round_trip<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(1).test_before_acquire(false);
        let pool = options.connect(proxy.url()).await.unwrap();
        let mut least = u64::MAX;
        for _ in 0..20 {
            // The ping of the connection that returns. The proxy may count it a moment after it was answered.
            while pool.num_idle() == 0 {
                sleep(Duration::from_millis(5)).await;
            }
            sleep(Duration::from_millis(10)).await;
            let before = proxy.round_trips();
            Idempotent::key("k").run(&pool, async |_| Ok::<_, Error>(())).await.unwrap();
            least = least.min(proxy.round_trips() - before);
        }
        assert_eq!(least, 1);
    }
}

on_databases! { [mariadb, mysql]
    async fn an_answer_is_not_committed_by_itself<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let request = || Idempotent::key("k").keep(Duration::from_millis(1));
        let expired = request().run(&db.pool, async |_| Ok::<_, Error>(5)).await.unwrap();
        assert_eq!(expired, Answered::Now(5));
        sleep(Duration::from_millis(20)).await;
        let ended = Idempotent::key("k").run(&db.pool, async |tx| {
            charge(tx, "k").await?;
            for statement in ["ROLLBACK", "SET autocommit = 1"] {
                S::execute(tx, statement).await.expect("a statement");
            }
            Ok::<_, Error>(6)
        });
        let err = ended.await.unwrap_err();
        assert!(matches!(err, Error::TransactionEnded { .. }), "{err:?}");
        let done = Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(7)).await.unwrap();
        assert_eq!((done, charges(&db).await), (Answered::Now(7), 0));
        db.assert_nothing_left().await;
    }
}

on_databases! { [postgres]
    async fn the_wait_for_a_locked_row_is_bounded<S>(db: TestDb<S>) {
        let request = || Idempotent::key("k").keep(Duration::from_millis(1)).wait(Duration::from_millis(100));
        request().run(&db.pool, async |_| Ok::<_, Error>(5)).await.unwrap();
        sleep(Duration::from_millis(20)).await;
        let mut deleting = db.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM lockkit_answer FOR UPDATE").execute(&mut *deleting).await.unwrap();
        let refused = timeout(Duration::from_mins(1), request().run(&db.pool, async |_| Ok::<_, Error>(6))).await;
        let err = refused.expect("a bound").unwrap_err();
        assert!(err.is_contended(), "{err:?}");
        deleting.rollback().await.unwrap();
        let done = request().run(&db.pool, async |_| Ok::<_, Error>(7)).await.unwrap();
        assert_eq!(done, Answered::Now(7));
    }
}

on_every_server! {
    async fn the_wait_for_a_locked_table_is_bounded<S>(db: TestDb<S>) {
        let request = || Idempotent::key("k").wait(Duration::from_millis(100));
        let mut altering = db.pool.acquire().await.unwrap();
        let (lock, unlock) = match S::NAME {
            "PostgreSQL" => ("BEGIN; LOCK TABLE lockkit_answer IN ACCESS EXCLUSIVE MODE", "COMMIT"),
            _ => ("LOCK TABLES lockkit_answer WRITE", "UNLOCK TABLES"),
        };
        S::execute(&mut altering, lock).await.unwrap();
        let bounded = async |done| timeout(Duration::from_mins(1), done).await.expect("a bound");
        let work = || Box::pin(request().run(&db.pool, async |_| Ok::<_, Error>(1)));
        let err = bounded(work()).await.unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
        S::execute(&mut altering, unlock).await.unwrap();
        assert_eq!(bounded(work()).await.unwrap(), Answered::Now(1));
    }
}

#[tokio::test]
async fn an_error_leaves_the_connection_in_the_pool() {
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
    let request = |cents: u32| Idempotent::key("k").request(&cents).run(&pool, async move |_| Ok::<_, Error>(cents));
    assert!(matches!(request(1).await.unwrap_err(), Error::NotMigrated { .. }));
    lockkit::migrate(&pool).await.unwrap();
    request(1).await.unwrap();
    assert!(matches!(request(2).await.unwrap_err(), Error::Mismatch { .. }));
    assert_eq!(request(1).await.unwrap(), Answered::Before(1));

    // JSON has no number for this, and reads what it writes for it as nothing.
    let float = Idempotent::key("nan").run(&pool, async |_| Ok::<_, Error>(f64::NAN)).await.unwrap_err();
    assert!(matches!(float, Error::Answer { .. }), "{float:?}");
}
