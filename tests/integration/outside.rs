//! Work that leaves the database: that it has begun is stored before it, its answer after it.

#![allow(clippy::large_futures, reason = "sqlx's are larger in a build with TLS, as with the command `lockkit`")]

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkit::idempotent::{Attempt, Outside};
use lockkit::{Answered, Error, Fault, Idempotent, Leases, LossReason, Tx, dialect::IdempotentOps};
use rustix::process::Signal;
use sqlx::Pool;
use sqlx::pool::PoolOptions;
use sqlx::postgres::PgConnectOptions;
use support::provider::{self, Recipe};
use support::{
    Backend, JoinSet, PlainSql, Process, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn,
};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(2);

#[derive(Debug, PartialEq, thiserror::Error, serde::Serialize, serde::Deserialize)]
enum PayError {
    #[error("declined: {0}")]
    Declined(String),
    #[error("{0}")]
    Failed(String),
}

impl PayError {
    fn is_declined(&self) -> bool {
        matches!(self, Self::Declined(_))
    }
}

impl From<Error> for PayError {
    fn from(err: Error) -> Self {
        Self::Failed(err.to_string())
    }
}

fn leases<S: Backend>(db: &TestDb<S>) -> Leases<Pool<S::DB>> {
    Leases::builder(db.pool.clone()).ttl(Duration::from_secs(1)).build().unwrap()
}

/// When the first attempt began. `None` for the first.
fn begun(attempt: Attempt) -> Option<std::time::SystemTime> {
    match attempt {
        Attempt::First => None,
        Attempt::After { begun, .. } => Some(begun),
    }
}

/// How many keys have begun and have no answer, and how many have an answer.
async fn rows<S: Backend>(db: &TestDb<S>) -> (i64, i64) {
    let count = async |is: &str| {
        let rows = format!("SELECT COUNT(*) FROM lockkit_answer WHERE made_us IS NOT NULL AND answer {is}");
        db.fetch_i64(&rows).await.unwrap()
    };
    (count("IS NULL").await, count("IS NOT NULL").await)
}

async fn write<DB: IdempotentOps + PlainSql>(tx: &mut Tx<DB>) {
    DB::execute(tx, "INSERT INTO written VALUES (1)").await.unwrap();
}

fn worker<S: Backend>(db: &TestDb<S>, work: &[&str]) -> Process {
    Process::start(env!("CARGO_BIN_EXE_test-worker"), &[&[S::NAME, &*db.url], work].concat())
}

/// Waits until one of the workers says something, and returns what, with its number.
async fn first_of(workers: &mut [Process]) -> (usize, String) {
    let mut hearing: Vec<_> = workers.iter_mut().map(|it| Box::pin(it.hear())).collect();
    std::future::poll_fn(|context| {
        let ready = hearing.iter_mut().enumerate().find_map(|(number, it)| match it.as_mut().poll(context) {
            std::task::Poll::Ready(line) => Some((number, line)),
            std::task::Poll::Pending => None,
        });
        ready.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    })
    .await
}

/// Kills two of three processes that pay for one key, each between the provider's answer and the commit. Returns the
/// answer of the third.
async fn pay_through_two_kills<S: Backend>(db: &TestDb<S>, recipe: &str, key: &str) -> String {
    let mut workers: Vec<_> = (0..3).map(|_| worker(db, &["pay", recipe, key])).collect();
    for _ in 0..2 {
        let (number, line) = first_of(&mut workers).await;
        assert_eq!(line, "charged");
        workers.swap_remove(number).kill().await;
    }
    let mut last = workers.pop().expect("the third");
    last.says("charged").await;
    last.go().await;
    let answered = last.hear().await;
    last.succeeds().await;
    answered.strip_prefix("answered ").expect("an answer").to_owned()
}

on_every_database! {
    async fn work_is_done_once_and_answered_before<S>(db: TestDb<S>) {
        let (leases, mut keys) = (leases(&db), HashSet::new());
        for key in ["pay:1", "pay:2"] {
            for round in 0..3 {
                let paid = Idempotent::key(key).request(&1999).outside(&leases, async |work| {
                    assert_eq!(work.attempt(), Attempt::First);
                    assert!(work.lease().is_trusted());
                    assert!(keys.insert(work.idempotency_key().to_owned()));
                    // It is known before the work is done.
                    assert_eq!(rows(&db).await.0, 1);
                    Ok::<_, Error>(round)
                });
                let paid = paid.await.unwrap();
                assert_eq!(paid, if round == 0 { Answered::Now(0) } else { Answered::Before(0) });
            }
        }
        assert_eq!((keys.len(), rows(&db).await), (2, (0, 2)));
        assert_eq!(leases.list("").await.unwrap(), []);
        db.assert_nothing_left().await;
    }

    async fn an_attempt_without_an_answer_is_told_to_the_next<S>(db: TestDb<S>) {
        let leases = leases(&db);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let see = |work: &Outside<_>| {
            seen.lock().unwrap().push((begun(work.attempt()), work.idempotency_key().to_owned()));
        };

        let failed = Idempotent::key("k").outside(&leases, async |work| {
            see(work);
            Err::<u32, _>(Error::conflict())
        });
        assert!(failed.await.unwrap_err().is_conflict());

        let (there, also_seen) = (leases.clone(), seen.clone());
        let panicked = spawn(async move {
            let body = async |work: &mut Outside<_>| {
                let it = (begun(work.attempt()), work.idempotency_key().to_owned());
                also_seen.lock().unwrap().push(it.clone());
                assert!(it.0.is_none(), "a bug of the application");
                Ok::<_, Error>(0_u32)
            };
            Idempotent::key("k").outside(&there, body).await
        });
        assert!(panicked.await.unwrap_err().is_panic());

        let dropped = Idempotent::key("k").outside(&leases, async |work| {
            see(work);
            std::future::pending::<Result<u32, Error>>().await
        });
        assert!(timeout(Duration::from_millis(500), dropped).await.is_err());

        let no_json = Idempotent::key("k").outside(&leases, async |work| {
            see(work);
            Ok::<_, Error>(std::collections::BTreeMap::from([(vec![1], 1)]))
        });
        assert!(matches!(no_json.await.unwrap_err(), Error::Answer { .. }));

        assert_eq!(rows(&db).await, (1, 0));
        let paid = Idempotent::key("k").outside(&leases, async |work| {
            see(work);
            let Attempt::After { ago, .. } = work.attempt() else { panic!("it is told") };
            assert!(ago > Duration::from_millis(400) && ago < PATIENCE, "{ago:?}");
            Ok::<_, Error>(7)
        });
        assert_eq!(paid.await.unwrap(), Answered::Now(7));
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen[0].0, None);
        assert!(seen[1].0.is_some() && seen.len() == 5);
        assert!(seen[1..].iter().all(|it| *it == seen[1]) && seen[0].1 == seen[1].1, "{seen:?}");
        assert_eq!(rows(&db).await, (0, 1));
        db.assert_nothing_left().await;
    }

    async fn another_request_is_refused_even_if_the_first_has_only_begun<S>(db: TestDb<S>) {
        let leases = &leases(&db);
        let never = async |_: &mut Outside<_>| -> Result<u32, Error> { panic!("it is another request") };
        let other = || Idempotent::key("k").request(&2).outside(leases, never);
        let is_mismatch = |err: Error| matches!(err, Error::Mismatch { key, .. } if key == "k");
        let failed = Idempotent::key("k").request(&1).outside(leases, async |_| {
            assert!(is_mismatch(other().await.unwrap_err()));
            Err::<u32, _>(Error::conflict())
        });
        assert!(failed.await.unwrap_err().is_conflict());
        assert!(is_mismatch(other().await.unwrap_err()));
        let done = Idempotent::key("k").request(&1).outside(leases, async |_| Ok::<_, Error>(1)).await.unwrap();
        assert_eq!(done, Answered::Now(1));
        assert!(is_mismatch(other().await.unwrap_err()));
    }

    async fn requests_at_the_same_time_are_one_payment<S>(db: TestDb<S>) {
        provider::create(&db).await;
        // As in two processes.
        let there = [leases(&db), Leases::new(db.pool_of(4).await)];
        let mut requests = JoinSet::new();
        for task in 0..40 {
            let leases = there[task / 20].clone();
            requests.spawn(async move {
                let pause = async |_| sleep(Duration::from_millis(30)).await;
                let paid = provider::pay::<S>(&leases, Recipe::Asks, &format!("pay:{}", task % 4), pause).await;
                (task % 4, paid.unwrap())
            });
        }
        let answers = requests.join_all().await;
        for key in 0..4 {
            let of_key: Vec<_> = answers.iter().filter(|it| it.0 == key).map(|it| &it.1).collect();
            assert_eq!((of_key.len(), of_key.iter().filter(|it| !it.is_before()).count()), (10, 1), "{answers:?}");
        }
        let references: HashSet<_> = answers.into_iter().map(|it| it.1.into_inner()).collect();
        assert_eq!((references.len(), provider::charges(&db).await), (4, (4, 4)));
        db.assert_nothing_left().await;
    }

    async fn the_wait_for_another_request_is_bounded<S>(db: TestDb<S>) {
        let leases = &leases(&db);
        let done = Idempotent::key("k").outside(leases, async |_| {
            let (elsewhere, wait) = (leases.clone(), Duration::from_millis(300));
            // In another task: in this one it would be refused as the body of the same key.
            let second = async move { Idempotent::key("k").wait(wait).outside(&elsewhere, async |_| Ok(())).await };
            let contended: Error = spawn(second).await.unwrap().unwrap_err();
            assert!(contended.is_contended() && contended.key().is_some_and(|it| *it == "k"), "{contended:?}");
            let own = Idempotent::key("k").outside(leases, async |_| Ok::<_, Error>(())).await.unwrap_err();
            assert!(matches!(own, Error::Reentrant { .. }), "{own:?}");
            Ok::<_, Error>(())
        });
        assert_eq!(done.await.unwrap(), Answered::Now(()));
    }

    async fn a_stale_holder_stores_nothing<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (n INT)").await;
        let (slow, thief) = (Leases::new(db.pool.clone()), Leases::new(db.pool_of(2).await));
        for writes in [false, true] {
            let key = || Idempotent::key(if writes { "writes" } else { "only answers" });
            let stale = key().outside(&slow, async |work| {
                if writes && S::NAME != support::Sqlite::NAME {
                    write(work.tx().await?).await;
                }
                thief.steal(work.lease().key().clone()).await?.expect("it is held");
                if writes {
                    write(work.tx().await?).await;
                }
                // It does not know it: it has not renewed since.
                assert!(work.lease().is_trusted());
                Ok::<_, Error>("stale".to_owned())
            });
            let err = stale.await.unwrap_err();
            assert!(matches!(err, Error::Lost { reason: LossReason::Stolen, .. }), "{err:?}");
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM written").await, Some(0));
            let heir = key().outside(&thief, async |work| {
                assert_ne!(work.attempt(), Attempt::First);
                Ok::<_, Error>("heir".to_owned())
            });
            assert_eq!(heir.await.unwrap(), Answered::Now("heir".to_owned()));
        }
        db.assert_nothing_left().await;
    }

    async fn a_holder_that_took_its_time_before_the_begin_does_not_undo_an_answer<S>(db: TestDb<S>) {
        // The row of an answer that is there when the begin of work is stored stays as it is: it is looked for under
        // the lock of the key.
        let (first, second) = (Leases::new(db.pool.clone()), Leases::new(db.pool_of(2).await));
        let held = first.lease("k/answer").acquire().await.unwrap();
        let waiting = spawn(async move {
            let request = Idempotent::key("k").wait(PATIENCE);
            request.outside(&second, async |_| -> Result<u32, Error> { panic!("it is answered") }).await
        });
        Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(1)).await.unwrap();
        held.release().await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap(), Answered::Before(1));
        assert_eq!(rows(&db).await, (0, 1));
    }

    async fn the_body_ends_when_its_lease_is_lost<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (n INT)").await;
        let leases = &leases(&db);
        for writes in [false, true] {
            let lost = Idempotent::key("k").outside(leases, async |work| {
                let lease = work.lease().key().clone();
                if writes && S::NAME != support::Sqlite::NAME {
                    write(work.tx().await?).await;
                }
                leases.steal(lease).await?.expect("it is held");
                std::future::pending::<Result<(), Error>>().await
            });
            let err = timeout(PATIENCE, lost).await.expect("it ends").unwrap_err();
            assert!(err.is_lost(), "{err:?}");
        }
        assert_eq!((rows(&db).await, db.fetch_i64("SELECT COUNT(*) FROM written").await), ((1, 0), Some(0)));
        db.assert_nothing_left().await;
    }

    async fn errors_that_are_answers_are_stored_and_the_others_are_not<S>(db: TestDb<S>) {
        let leases = &leases(&db);
        let pay = async |result: Result<u32, PayError>| {
            let request = Idempotent::key("k").store_err(PayError::is_declined);
            request.outside(leases, async |_| result).await
        };
        let declined = || PayError::Declined("no funds".to_owned());
        let failed = || PayError::Failed("no connection".to_owned());
        assert_eq!(pay(Err(failed())).await, Err(failed()));
        assert_eq!(rows(&db).await, (1, 0));
        assert_eq!(pay(Err(declined())).await, Ok(Answered::Now(Err(declined()))));
        assert_eq!(pay(Ok(7)).await, Ok(Answered::Before(Err(declined()))));
        // One that does not store errors cannot read it.
        let other = Idempotent::key("k").outside(leases, async |_| Ok::<_, Error>(7)).await.unwrap_err();
        assert!(matches!(other, Error::Answer { .. }), "{other:?}");
        // The loss of the lease is no answer, whatever the test says.
        let lost = Idempotent::key("lost").store_err(|_: &PayError| true).outside(leases, async |work| {
            leases.steal(work.lease().key().clone()).await?.expect("it is held");
            std::future::pending::<Result<u32, PayError>>().await
        });
        lost.await.unwrap_err();
        assert_eq!(rows(&db).await, (1, 1));
        db.assert_nothing_left().await;
    }

    async fn rows_in_its_transaction_commit_with_the_answer<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (n INT)").await;
        let leases = &leases(&db);
        let pay = async |result: Result<u32, PayError>| {
            let request = Idempotent::key("k").keep(Duration::from_millis(1)).store_err(PayError::is_declined);
            let paid = request.outside(leases, async |work| {
                for _ in 0..2 {
                    write(work.tx().await?).await;
                }
                result
            });
            drop(paid.await);
            sleep(Duration::from_millis(20)).await;
            db.fetch_i64("SELECT COUNT(*) FROM written").await
        };
        assert_eq!(pay(Err(PayError::Failed("x".to_owned()))).await, Some(0));
        assert_eq!(pay(Err(PayError::Declined("x".to_owned()))).await, Some(0));
        assert_eq!(rows(&db).await, (0, 1));
        assert_eq!(pay(Ok(7)).await, Some(2));
        // The body has ended its transaction.
        for ended in ["ROLLBACK", "ROLLBACK; BEGIN"] {
            let ended = Idempotent::key("ended").outside(leases, async |work| {
                let tx = work.tx().await?;
                write(tx).await;
                for statement in ended.split("; ") {
                    S::execute(tx, statement).await.expect("a statement");
                }
                Ok::<_, Error>(7)
            });
            let err = ended.await.unwrap_err();
            assert!(matches!(err, Error::TransactionEnded { .. }), "{err:?}");
        }
        assert_eq!(rows(&db).await, (1, 1));
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM written").await, Some(2));
        db.assert_nothing_left().await;
    }

    async fn that_work_has_begun_outlives_answers<S>(db: TestDb<S>) {
        let leases = &leases(&db);
        let keep = Duration::from_millis(1);
        let pay = async |key: &str, result: Result<u32, Error>| {
            let paid = Idempotent::key(key).keep(keep).outside(leases, async |work| {
                result.map(|number| (begun(work.attempt()).is_some(), number))
            });
            let paid = paid.await;
            sleep(Duration::from_millis(20)).await;
            lockkit::LeaseStore::lease_sweep(&db.pool, Duration::from_secs(3600), 10).await.unwrap();
            paid
        };
        pay("k", Err(Error::conflict())).await.unwrap_err();
        pay("k", Err(Error::conflict())).await.unwrap_err();
        assert_eq!(pay("k", Ok(1)).await.unwrap(), Answered::Now((true, 1)));
        // The answer has expired, and with it what is known.
        assert_eq!(pay("k", Ok(2)).await.unwrap(), Answered::Now((false, 2)));
        pay("old", Err(Error::conflict())).await.unwrap_err();
        db.execute("UPDATE lockkit_answer SET keep_until_us = made_us").await;
        assert_eq!(pay("old", Ok(3)).await.unwrap(), Answered::Now((false, 3)));
    }

    async fn work_in_the_database_has_other_keys<S>(db: TestDb<S>) {
        let leases = &leases(&db);
        let failed = Idempotent::key("k").outside(leases, async |_| {
            let run = Idempotent::key("k").run(&db.pool, async |_| -> Result<u32, Error> { panic!("it has begun") });
            let err = run.await.unwrap_err();
            assert!(err.to_string().starts_with("`run` was called for a key whose work has begun"), "{err}");
            Err::<u32, _>(Error::conflict())
        });
        assert!(failed.await.unwrap_err().is_conflict());
        let done = Idempotent::key("k").outside(leases, async |_| Ok::<_, Error>(7)).await.unwrap();
        assert_eq!(done, Answered::Now(7));
        // An answer is an answer.
        let run = Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(8)).await.unwrap();
        assert_eq!(run, Answered::Before(7));
        let long = "x".repeat(249);
        let long = Idempotent::key(&*long).outside(leases, async |_| Ok::<_, Error>(())).await.unwrap_err();
        assert!(matches!(long, Error::InvalidKey { .. }), "{long:?}");
        let none = Idempotent::key("k").max_answer(0).outside(leases, async |_| Ok::<_, Error>(())).await.unwrap_err();
        assert!(none.to_string().starts_with("`max_answer` must be greater"), "{none}");
        db.assert_nothing_left().await;
    }

    async fn the_body_holds_no_connection<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let leases = Leases::new(pool.clone());
        let done = Idempotent::key("k").outside(&leases, async |_| {
            let conn = timeout(PATIENCE, pool.acquire()).await.expect("the only connection").unwrap();
            drop(conn);
            Ok::<_, Error>(())
        });
        assert_eq!(done.await.unwrap(), Answered::Now(()));
    }

    async fn killed_processes_charge_nobody_twice<S>(db: TestDb<S>) {
        provider::create(&db).await;
        let (one, two, three) = tokio::join!(
            pay_through_two_kills(&db, "asks", "pay:1"),
            pay_through_two_kills(&db, "asks", "pay:2"),
            pay_through_two_kills(&db, "asks", "pay:3"),
        );
        assert_eq!(provider::charges(&db).await, (3, 3));
        // A client that comes late gets the same answer.
        for (key, answer) in [("pay:1", one), ("pay:2", two), ("pay:3", three)] {
            let again = provider::pay::<S>(&leases(&db), Recipe::Asks, key, async |_| panic!("it is answered")).await;
            assert_eq!(again.unwrap(), Answered::Before(answer));
        }
        db.assert_nothing_left().await;
    }

    async fn killed_processes_that_ignore_earlier_attempts_charge_twice<S>(db: TestDb<S>) {
        provider::create(&db).await;
        pay_through_two_kills(&db, "ignores", "pay:1").await;
        assert_eq!(provider::charges(&db).await, (3, 1));
    }

    async fn processes_that_are_killed_at_any_time_charge_nobody_twice<S>(db: TestDb<S>) {
        const KEYS: u32 = 60;
        provider::create(&db).await;
        let start = || worker(&db, &["pay all", &KEYS.to_string()]);
        let mut workers: Vec<_> = (0..3).map(|_| start()).collect();
        let mut said = Vec::new();
        for kill in 0..9_u64 {
            // In the middle of something: after some payments, and another pause each time.
            for _ in 0..3 {
                said.push(first_of(&mut workers).await.1);
            }
            sleep(Duration::from_millis(kill * 7 % 23)).await;
            workers.remove(0).kill().await;
            workers.push(start());
        }
        for mut worker in workers {
            while said.last().is_none_or(|it| it != "paid all") {
                said.push(worker.hear().await);
            }
            said.pop();
            worker.succeeds().await;
        }
        assert_eq!(provider::charges(&db).await, (KEYS.into(), KEYS.into()));
        assert_eq!(rows(&db).await, (0, KEYS.into()));
        db.assert_nothing_left().await;
    }

    async fn a_process_that_was_stopped_past_its_ttl_stores_no_answer<S>(db: TestDb<S>) {
        provider::create(&db).await;
        let mut stale = worker(&db, &["pay", "asks", "pay:1"]);
        stale.says("charged").await;
        stale.signal(Signal::STOP);
        let heir = provider::pay::<S>(&leases(&db), Recipe::Asks, "pay:1", async |_| {}).await.unwrap();
        assert!(!heir.is_before());
        stale.go().await;
        stale.signal(Signal::CONT);
        stale.says("lost").await;
        assert_eq!(provider::charges(&db).await, (1, 1));
        let again = async |_| panic!("it is answered");
        let again = provider::pay::<S>(&leases(&db), Recipe::Asks, "pay:1", again).await;
        assert_eq!(again.unwrap(), Answered::Before(heir.into_inner()));
        db.assert_nothing_left().await;
    }
}

on_databases! { [postgres]
    async fn a_statement_that_the_body_left_behind_is_not_waited_for_without_bound<S>(db: TestDb<S>) {
        let leave = async |tx: &mut Tx<_>| {
            let sleeping = sqlx::query("SELECT pg_sleep(300)").execute(&mut **tx);
            assert!(timeout(Duration::from_millis(200), sleeping).await.is_err(), "it sleeps");
        };
        let leases = Leases::new(db.pool.clone());
        let outside = Idempotent::key("outside").outside(&leases, async |work| {
            leave(work.tx().await?).await;
            Ok::<_, Error>(7)
        });
        let run = Idempotent::key("run").store_err(PayError::is_declined).run(&db.pool, async |tx| {
            leave(tx).await;
            Err::<u32, _>(PayError::Declined("no funds".to_owned()))
        });
        let ended = timeout(PATIENCE, async { tokio::join!(outside, run) }).await;
        let (outside, run) = ended.expect("a bound");
        let unanswered = "database error while storing the answer";
        assert!(outside.unwrap_err().to_string().starts_with(unanswered));
        assert!(matches!(run, Err(PayError::Failed(text)) if text.starts_with(unanswered)));
        assert_eq!((rows(&db).await, leases.list("").await.unwrap()), ((1, 0), Vec::new()));
    }

    async fn that_work_has_begun_is_on_disk_before_the_work<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE committed (number BIGINT PRIMARY KEY, with_setting TEXT)").await;
        db.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO committed VALUES (txid_current(), current_setting('synchronous_commit'))
                     ON CONFLICT DO NOTHING;
                 RETURN NULL;
             END $$",
        )
        .await;
        // Runs in the COMMIT.
        db.execute(
            "CREATE CONSTRAINT TRIGGER note AFTER INSERT OR UPDATE ON lockkit_answer
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
        let committed = "SELECT string_agg(with_setting, ', ' ORDER BY number) FROM committed";
        let committed = async || db.fetch_text(committed).await.unwrap();
        for (setting, of_begin) in [("off", "on"), ("local", "local"), ("on", "on"), ("remote_apply", "remote_apply")] {
            let options: PgConnectOptions = db.url.parse().unwrap();
            let options = options.options([("synchronous_commit", setting)]);
            let pool = PoolOptions::<sqlx::Postgres>::new().max_connections(1).connect_with(options).await.unwrap();
            let leases = Leases::new(pool);
            for round in 0..2 {
                let paid = Idempotent::key(setting).outside(&leases, async |_| {
                    assert_eq!(committed().await, of_begin);
                    if round == 0 { Err(Error::conflict()) } else { Ok(()) }
                });
                assert_eq!(paid.await.is_ok(), round == 1);
                // The setting is that of one transaction.
                let of_both = format!("{of_begin}, {setting}");
                assert_eq!(committed().await, if round == 0 { of_begin } else { &of_both });
                db.execute("DELETE FROM committed").await;
            }
        }
    }
}

on_every_server! {
    async fn an_answer_is_stored_although_the_connection_breaks<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (n INT)").await;
        let proxy = Proxy::start(&db.url);
        // Breaks all connections when the server has been sent this text, and before its answer. The connections are
        // new: the text of a statement that one has prepared is not sent again.
        let pay = async |key: &'static str, sent: &'static str, writes: bool| {
            let options = PoolOptions::<<S as Server>::DB>::new().max_connections(3);
            let leases = Leases::new(options.connect(proxy.url()).await.unwrap());
            let paid = Idempotent::key(key).outside(&leases, async |work| {
                let is_first = work.attempt() == Attempt::First;
                if writes {
                    write(work.tx().await?).await;
                }
                if is_first {
                    proxy.hold_replies_to(sent);
                }
                Ok::<_, Error>(7)
            });
            let breaks = async {
                proxy.replies_are_held().await;
                proxy.reset();
                proxy.pass_replies();
                std::future::pending::<()>().await;
            };
            tokio::select! { paid = paid => paid, () = breaks => unreachable!("it is pending") }
        };
        let is_postgres = S::NAME == support::Postgres::NAME;
        let storing = if is_postgres { "INSERT INTO lockkit_answer (name" } else { "UPDATE lockkit_answer" };
        assert_eq!(pay("again", storing, false).await.unwrap(), Answered::Now(7));
        assert_eq!(rows(&db).await, (0, 1));

        // The work of the body in its transaction is gone, and is not stored without it.
        let gone = pay("once", storing, true).await.unwrap_err();
        assert!(matches!(gone, Error::Database { fault: Fault::Unavailable, .. }), "{gone:?}");
        assert_eq!((rows(&db).await, db.fetch_i64("SELECT COUNT(*) FROM written").await), ((1, 1), Some(0)));
        assert_eq!(pay("once", storing, true).await.unwrap(), Answered::Now(7));
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM written").await, Some(1));

        // Whether a commit happened is not guessed. The text is not a part of `READ COMMITTED`.
        let commit = if is_postgres { "; COMMIT" } else { "\u{3}COMMIT" };
        let unknown = pay("unknown", commit, false).await.unwrap_err();
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        assert_eq!(pay("unknown", commit, false).await.unwrap(), Answered::Before(7));
    }

    async fn after_a_lost_answer_of_a_commit_the_next_request_knows<S>(db: TestDb<S>) {
        provider::create(&db).await;
        let proxy = Proxy::start(&db.url);
        let pool = PoolOptions::<<S as Server>::DB>::new().max_connections(3).connect(proxy.url()).await.unwrap();
        let leases = Leases::builder(pool).ttl(Duration::from_secs(1)).build().unwrap();
        for round in 0..6_i64 {
            let key = format!("pay:{round}");
            // Of the begin, or of the answer.
            let of_begin = round % 2 == 0;
            if of_begin {
                proxy.hold_replies_to("COMMIT");
            }
            let lost = provider::pay::<S>(&leases, Recipe::Asks, &key, async |_| {
                assert!(!of_begin, "the begin was not answered");
                proxy.hold_replies_to("COMMIT");
            });
            tokio::select! {
                answered = lost => panic!("the answer is held back: {answered:?}"),
                () = proxy.replies_are_held() => {}
            }
            proxy.reset();
            proxy.pass_replies();
            let again = provider::pay::<S>(&leases, Recipe::Asks, &key, async |_| {}).await.unwrap();
            assert!(!(of_begin && again.is_before()), "nothing was done before");
            assert_eq!(provider::charges(&db).await, (round + 1, round + 1));
        }
        assert_eq!(rows(&db).await, (0, 6));
    }

    async fn an_answer_is_stored_after_what_another_holder_of_the_key_has_begun<S>(db: TestDb<S>) {
        // A holder whose lease has expired may still be about to store that its work has begun, in a transaction that
        // has the lock of the key. The answer of its heir waits for that, and stays.
        let elsewhere = Leases::new(db.pool_of(3).await);
        let (has_charged, charged) = oneshot::channel();
        let (go, gone) = oneshot::channel::<()>();
        let heir = spawn(async move {
            let body = async |_: &mut Outside<_>| {
                has_charged.send(()).expect("a test that waits");
                gone.await.expect("a test that lets it go");
                Ok::<_, Error>(1)
            };
            Idempotent::key("k").outside(&elsewhere, body).await
        });
        charged.await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let lock = if S::NAME == support::Postgres::NAME {
            "SELECT pg_advisory_xact_lock(
                 ('x' || encode(substr(sha256('lockkit:answer:k'::bytea), 1, 8), 'hex'))::bit(64)::bigint
             )"
        } else {
            "SELECT name FROM lockkit_answer WHERE name = 'k' FOR UPDATE"
        };
        S::execute(&mut tx, lock).await.unwrap();
        go.send(()).unwrap();
        sleep(Duration::from_millis(500)).await;
        assert!(!heir.is_finished(), "it waits for the lock");
        S::execute(&mut tx, "UPDATE lockkit_answer SET answer = NULL WHERE name = 'k'").await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(heir.await.unwrap().unwrap(), Answered::Now(1));
        assert_eq!(rows(&db).await, (0, 1));
    }
}
