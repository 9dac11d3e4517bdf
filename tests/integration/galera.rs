//! A Galera cluster, and a replication group of MySQL with several primaries, that are written to through all of their
//! nodes: what is answered as committed is there, and leases exclude across nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit::{Answered, Error, Fault, Fence, Idempotent, Leases, RetryPolicy, Tx, idempotent::Attempt, is_retryable};
use sqlx::{Connection, MySql, MySqlConnection, MySqlPool, mysql::MySqlPoolOptions};
use support::{Cluster, Galera, JoinSet, Proxy, Server, TestDb, assert_answers_cost, on_databases};
use tokio::time::Instant;

/// How many clients each node has.
const CLIENTS: u64 = 6;

/// How many rows, or leases, the clients of all nodes share.
const SHARED: u64 = 3;

/// How long they write.
const TIME: Duration = Duration::from_secs(4);

/// How many keys are requested through all nodes.
const KEYS: u32 = 20;

/// Longer than any request takes.
const PATIENCE: Duration = Duration::from_mins(1);

/// What clients were told.
#[derive(Debug, Default)]
struct Told {
    committed: BTreeSet<u64>,
    refused: BTreeSet<u64>,
    /// The fences of each lease in the order of the grants, and who believes to hold it now.
    granted: BTreeMap<u64, Vec<Fence>>,
    holding: BTreeMap<u64, u64>,
}

type Report = Arc<Mutex<Told>>;

on_databases! {
    [galera, group]
    async fn what_is_answered_as_committed_is_there_on_all_nodes<S>(db: TestDb<S>) {
        let told = on_all_nodes(&db, |pool: MySqlPool, told: Report, id, shared| async move {
            let Ok(tx) = written(&pool, id, shared).await else { return };
            let answer = tx.commit().await;
            report(&told, id, answer);
        });
        let told = told.await;
        check(&db, &told).await;
    }

    async fn leases_and_their_commits_exclude_across_nodes<S>(db: TestDb<S>) {
        let told = on_all_nodes(&db, |pool: MySqlPool, told: Report, id, shared| async move {
            let leases = Leases::builder(pool.clone()).ttl(Duration::from_secs(30)).build().unwrap();
            let key = format!("k{shared}");
            let lease = leases.lease(key).wait(Duration::from_millis(500)).acquire().await;
            let lease = match lease {
                Err(err) if err.is_contended() => return,
                // Nodes on a disk that a whole test run shares have stood still for longer than a claim waits.
                Err(Error::Database { fault: Fault::Unavailable, .. }) => return,
                lease => lease.unwrap(),
            };
            {
                let mut told = told.lock().unwrap();
                let other = told.holding.insert(shared, id);
                assert_eq!(other, None, "two holders of one lease");
                told.granted.entry(shared).or_default().push(lease.fence());
            }
            // Not the row that goes with the lease, so that commits meet conflicts.
            let tx = written(&pool, id, id / SHARED % SHARED).await;
            told.lock().unwrap().holding.remove(&shared);
            match tx {
                Ok(tx) => {
                    let answer = lease.commit(tx).await;
                    report(&told, id, answer);
                }
                Err(_) => drop(lease.release().await.unwrap()),
            }
        });
        let told = told.await;
        check(&db, &told).await;
        for fences in told.granted.values() {
            assert!(fences.is_sorted_by(|before, after| before < after), "a fence that fell: {fences:?}");
        }
        let grants: usize = told.granted.values().map(Vec::len).sum();
        assert!(grants > 10, "only {grants} grants");
        println!("{grants} leases were granted through all nodes");
    }
}

on_databases! {
    [group]
    // The caller learns of the first conflict in COMMIT, because what it sends before touches no row. Of the second one
    // the server of the transaction knows nothing before COMMIT.
    async fn a_transaction_that_another_primary_undid_is_transient_and_repeated<S>(db: TestDb<S>) {
        let rival = tokio::sync::Mutex::new(rival(&db).await);
        db.execute("CREATE TABLE held_back (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO held_back VALUES (0, 0)").await;
        for (round, is_applied) in (1..).zip([true, false]) {
            let holding = tokio::sync::Mutex::new(MySqlConnection::connect(&db.url).await.unwrap());
            let attempts = AtomicU32::new(0);
            let committed = RetryPolicy::new().attempts(5).retry(|_| async {
                let first = attempts.fetch_add(1, Ordering::SeqCst) == 0;
                let mut rival = rival.lock().await;
                if first && !is_applied {
                    // One thread applies what others commit, and waits here.
                    S::execute(&mut *holding.lock().await, "LOCK TABLES held_back READ").await.unwrap();
                    S::execute(&mut *rival, "UPDATE held_back SET n = n + 1").await.unwrap();
                    S::execute(&mut *rival, "UPDATE hot SET n = n + 10 WHERE id = 0").await.unwrap();
                }
                let mut tx = lockkit::begin(&db.pool).await?;
                S::execute(&mut tx, "UPDATE hot SET n = n + 1 WHERE id = 0").await.unwrap();
                if first && is_applied {
                    undo(&mut rival, &db).await;
                }
                let answer = tx.commit().await;
                assert_eq!(answer.as_ref().is_err_and(Error::is_transient), first, "{is_applied}: {answer:?}");
                if first && !is_applied {
                    S::execute(&mut *holding.lock().await, "UNLOCK TABLES").await.unwrap();
                    S::caught_up(&db.url).await.unwrap();
                }
                answer
            });
            committed.await.unwrap();
            assert_eq!(attempts.into_inner(), 2, "applied: {is_applied}");
            assert_eq!(db.fetch_i64("SELECT n FROM hot WHERE id = 0").await, Some(11 * round), "applied: {is_applied}");
        }
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [galera]
    // MariaDB does not report each rollback for another node: one in some hundred that meet a PREPARE is lost, and what
    // follows runs in a new transaction. Here the caller loses the report.
    async fn a_transaction_that_another_node_undid_is_transient_and_repeated<S>(db: TestDb<S>) {
        let rival = tokio::sync::Mutex::new(rival(&db).await);
        let attempts = AtomicU32::new(0);
        let committed = RetryPolicy::new().attempts(3).retry(|_| async {
            let first = attempts.fetch_add(1, Ordering::SeqCst) == 0;
            let mut tx = lockkit::begin(&db.pool).await?;
            Galera::execute(&mut tx, "UPDATE hot SET n = n + 1 WHERE id = 0").await.unwrap();
            if first {
                undo(&mut *rival.lock().await, &db).await;
                Galera::execute(&mut tx, "SELECT 1").await.unwrap_err();
            }
            Galera::execute(&mut tx, "UPDATE hot SET n = n + 100 WHERE id = 1").await.unwrap();
            let answer = tx.commit().await;
            assert_eq!(answer.as_ref().is_err_and(Error::is_transient), first, "{answer:?}");
            answer
        });
        committed.await.unwrap();
        assert_eq!(attempts.into_inner(), 2);
        assert_eq!(db.fetch_i64("SELECT SUM(n) FROM hot").await, Some(10 + 1 + 100), "of the second attempt alone");
        db.assert_nothing_left().await;
    }

    // Both begin before the server has answered what it is.
    async fn each_of_the_first_transactions_of_a_service_learns_whether_it_was_undone<S>(db: TestDb<S>) {
        let unknown = Proxy::start(&db.url);
        let pool = MySqlPoolOptions::new().min_connections(2).max_connections(2).connect(unknown.url()).await.unwrap();
        drop(tokio::join!(pool.acquire(), pool.acquire()));
        let (one, other) = tokio::join!(lockkit::begin(&pool), lockkit::begin(&pool));
        for mut tx in [one.unwrap(), other.unwrap()] {
            let is_marked = Galera::fetch_i64(&mut tx, "SELECT @lockkit_written IS NOT NULL").await.unwrap();
            assert_eq!(is_marked, Some(1));
            tx.rollback().await.unwrap();
        }
    }

    // What was committed must not be repeated, and what the caller rolled back need not be.
    async fn a_transaction_that_a_statement_of_its_own_ended_is_not_repeated<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE written (id BIGINT PRIMARY KEY)").await;
        let ends = [
            "COMMIT", "COMMIT AND CHAIN", "BEGIN", "SET autocommit = 1", "CREATE TABLE other (id BIGINT)",
            "TRUNCATE TABLE other", "LOCK TABLES other WRITE; UNLOCK TABLES",
        ];
        for (id, end) in (0..).zip(ends) {
            let answer = RetryPolicy::new().attempts(3).retry(|_| async {
                let mut tx = lockkit::begin(&db.pool).await?;
                Galera::execute(&mut tx, &format!("INSERT INTO written VALUES ({id})")).await.unwrap();
                Galera::execute(&mut tx, end).await.unwrap();
                Galera::execute(&mut tx, &format!("INSERT INTO written VALUES (100 + {id})")).await.unwrap();
                tx.commit().await
            });
            let refused = answer.await.unwrap_err();
            assert!(matches!(refused, Error::TransactionEnded { .. }), "after {end}: {refused:?}");
            assert!(!refused.is_transient() && !is_retryable(&refused), "after {end}");
            let there = format!("SELECT COUNT(*) FROM written WHERE id = {id}");
            assert_eq!(db.fetch_i64(&there).await, Some(1), "after {end}");
        }
    }

    // The statement that frees the lease is prepared after the look at the transaction.
    async fn what_another_node_undid_before_the_lease_was_freed_is_not_answered_as_committed<S>(db: TestDb<S>) {
        let mut rival = rival(&db).await;
        let proxy = Proxy::start(&db.url);
        let leases = Leases::new(db.pool.clone());
        let rounds = [(false, "SAVEPOINT"), (true, "SAVEPOINT"), (false, "lockkit_lease")];
        for (round, (of_sqlx, look)) in (1..).zip(rounds) {
            // A new one each time, because only its first use prepares a statement.
            let pool = MySqlPool::connect(proxy.url()).await.unwrap();
            let lease = leases.lease("k").acquire().await.unwrap();
            let work = "UPDATE hot SET n = n + 100 WHERE id = 0";
            let (mut tx, mut theirs) = (None, None);
            if of_sqlx {
                let mut begun = pool.begin().await.unwrap();
                Galera::execute(&mut begun, work).await.unwrap();
                theirs = Some(begun);
            } else {
                let mut begun = lockkit::begin(&pool).await.unwrap();
                Galera::execute(&mut begun, work).await.unwrap();
                tx = Some(begun);
            }
            proxy.hold_replies_to(look);
            let committing = async {
                match (tx, theirs) {
                    (Some(tx), _) => lease.commit(tx).await,
                    (_, Some(tx)) => lease.commit(tx).await,
                    _ => unreachable!("one of both was begun"),
                }
            };
            let meanwhile = async {
                proxy.replies_are_held().await;
                undo(&mut rival, &db).await;
                proxy.pass_replies();
            };
            let (answer, ()) = tokio::join!(committing, meanwhile);
            let sum = db.fetch_i64("SELECT SUM(n) FROM hot").await;
            assert_eq!(sum, Some(10 * round), "{look}, {of_sqlx}: the work was undone, and the answer was {answer:?}");
            let refused = answer.unwrap_err();
            assert!(refused.is_transient() || matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
            pool.close().await;
        }
    }

    // Requests of one key do not wait for each other between nodes. All do the work, and the primary key of the answers
    // lets the commits fail, except one.
    async fn a_request_through_all_nodes_is_done_once<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE charges (id BIGINT PRIMARY KEY AUTO_INCREMENT, name VARCHAR(99))").await;
        let bodies = Arc::new(AtomicU32::new(0));
        let answers = through_all_nodes(&db, {
            let bodies = Arc::clone(&bodies);
            move |pool: MySqlPool, key: String| {
                let bodies = Arc::clone(&bodies);
                async move {
                    Idempotent::key(&*key).wait(PATIENCE).run(&pool, async |tx| {
                        let charged = format!("INSERT INTO charges (name) VALUES ('{key}')");
                        Galera::execute(&mut *tx, &charged).await?;
                        Ok::<_, Failed>(bodies.fetch_add(1, Ordering::SeqCst))
                    }).await
                }
            }
        });
        let answers = answers.await;
        assert_eq!(answers.len(), KEYS as usize, "one answer for each key: {answers:?}");
        for url in Galera::nodes(&db.url) {
            let mut conn = Galera::caught_up(&url).await.unwrap();
            let charges = Galera::fetch_i64(&mut conn, "SELECT COUNT(*) FROM charges").await.unwrap();
            let of_keys = Galera::fetch_i64(&mut conn, "SELECT COUNT(DISTINCT name) FROM charges").await.unwrap();
            assert_eq!((charges, of_keys), (Some(KEYS.into()), Some(KEYS.into())), "{url}");
        }
        let bodies = bodies.load(Ordering::SeqCst);
        assert!(bodies > KEYS, "no two requests have met");
        println!("{KEYS} keys were charged once, by {bodies} attempts");
    }

    // The lease excludes across nodes. An attempt whose answer met a conflict has charged, which the next one asks for.
    async fn work_outside_that_is_requested_through_all_nodes_is_done_once<S>(db: TestDb<S>) {
        let provider = Arc::new(Mutex::new(Vec::new()));
        let answers = through_all_nodes(&db, {
            let provider = Arc::clone(&provider);
            move |pool: MySqlPool, key: String| {
                let provider = Arc::clone(&provider);
                async move {
                    let leases = Leases::builder(pool).ttl(PATIENCE).build()?;
                    Idempotent::key(&*key).wait(PATIENCE).outside(&leases, async |work| {
                        let reference = work.idempotency_key().to_owned();
                        let find = || provider.lock().unwrap().iter().position(|it| *it == reference);
                        if work.attempt() == Attempt::First || find().is_none() {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                            provider.lock().unwrap().push(reference.clone());
                        }
                        Ok::<_, Failed>(u32::try_from(find().expect("it was charged")).unwrap())
                    }).await
                }
            }
        });
        let answers = answers.await;
        assert_eq!(answers.len(), KEYS as usize, "one answer for each key: {answers:?}");
        let charges = provider.lock().unwrap().clone();
        assert_eq!((charges.len(), BTreeSet::from_iter(charges).len()), (KEYS as usize, KEYS as usize));
    }

    async fn requests_with_a_stored_answer_cost_what_the_table_says<S>(db: TestDb<S>) {
        assert_answers_cost::<MySql>(&Proxy::start(&db.url), [6, 1, 15, 1]).await;
    }

    // The release of the lease comes after the begin in the order of the cluster, so a node that sees the lease free
    // sees the begin.
    async fn an_attempt_on_another_node_is_told_of_the_first<S>(db: TestDb<S>) {
        let mut leases = Vec::new();
        for url in Galera::nodes(&db.url) {
            Galera::caught_up(&url).await.unwrap();
            let pool = MySqlPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
            leases.push(Leases::builder(pool).ttl(PATIENCE).build().unwrap());
        }
        for round in 0..12 {
            let key = format!("k{round}");
            let request = || Idempotent::key(&*key).wait(PATIENCE);
            let failed = request().outside(&leases[round % 3], async |_| Err::<u32, _>(Error::conflict())).await;
            assert!(failed.unwrap_err().is_conflict());
            let again = RetryPolicy::new().attempts(5).retry(|_| {
                let other = &leases[(round + 1) % 3];
                request().outside(other, async |work| Ok::<_, Error>(work.attempt() != Attempt::First))
            });
            assert_eq!(again.await.unwrap(), Answered::Now(true), "{key}");
            let answered = RetryPolicy::new().attempts(5).retry(|_| {
                request().outside(&leases[(round + 2) % 3], async |_| Ok::<_, Error>(false))
            });
            assert_eq!(answered.await.unwrap(), Answered::Before(true), "{key}");
        }
    }

    async fn the_version_that_was_tested_is_on_record<S>(db: TestDb<S>) {
        let version = db.fetch_text(S::VERSION).await.expect("a version");

        if let Some(folder) = std::env::var_os("LOCKKIT_VERSIONS") {
            std::fs::write(std::path::PathBuf::from(folder).join(S::NAME), version).expect("write the version");
        }
    }
}

/// Makes the rows that all write, and a connection to another node than the pool's.
async fn rival<S: Cluster>(db: &TestDb<S>) -> MySqlConnection {
    db.execute("CREATE TABLE hot (id BIGINT PRIMARY KEY, n BIGINT)").await;
    db.execute("INSERT INTO hot VALUES (0, 0), (1, 0)").await;
    S::caught_up(&S::nodes(&db.url)[1]).await.unwrap()
}

/// Adds 10 to the first row through another node, and waits until the first node has applied it, for which it has
/// rolled back every transaction that had written the row.
async fn undo<S: Cluster>(rival: &mut MySqlConnection, db: &TestDb<S>) {
    S::execute(rival, "UPDATE hot SET n = n + 10 WHERE id = 0").await.unwrap();
    S::caught_up(&db.url).await.unwrap();
}

/// Of a request, or of a statement in it.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the request failed")]
    Request(#[from] Error),
    #[error("a statement failed")]
    Statement(#[from] sqlx::Error),
}

/// Requests each key twice through each node, all at the same time, until each request is answered. Returns the
/// different answers.
async fn through_all_nodes<F, Asking>(db: &TestDb<Galera>, request: F) -> BTreeSet<(u32, u32)>
where
    F: Fn(MySqlPool, String) -> Asking + Clone + Send + 'static,
    Asking: Future<Output = Result<Answered<u32>, Failed>> + Send,
{
    let mut requests = JoinSet::new();
    for url in Galera::nodes(&db.url) {
        Galera::caught_up(&url).await.unwrap();
        let pool = MySqlPoolOptions::new().max_connections(12).connect(&url).await.unwrap();
        for number in 0..KEYS * 2 {
            let (pool, request) = (pool.clone(), request.clone());
            requests.spawn(async move {
                let key = number / 2;
                loop {
                    match request(pool.clone(), format!("pay:{key}")).await {
                        Err(err) if is_retryable(&err) => {}
                        // The lease has no queue across nodes.
                        Err(Failed::Request(err)) if err.is_contended() => {}
                        answered => break (key, answered.unwrap().into_inner()),
                    }
                }
            });
        }
    }
    requests.join_all().await.into_iter().collect()
}

/// Runs the work again and again, in clients of all nodes, with a number that is never given twice and one of those
/// shared.
async fn on_all_nodes<S, F, Working>(db: &TestDb<S>, work: F) -> Told
where
    S: Cluster,
    F: Fn(MySqlPool, Report, u64, u64) -> Working + Copy + Send + 'static,
    Working: Future<Output = ()> + Send,
{
    db.execute("CREATE TABLE written (id BIGINT PRIMARY KEY); CREATE TABLE hot (id BIGINT PRIMARY KEY, n BIGINT)")
        .await;
    for shared in 0..SHARED {
        db.execute(&format!("INSERT INTO hot VALUES ({shared}, 0)")).await;
    }
    let told = Report::default();
    let mut clients = JoinSet::new();
    for (node, url) in (0..).zip(S::nodes(&db.url)) {
        S::caught_up(&url).await.unwrap();
        for client in 0..CLIENTS {
            let pool = MySqlPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
            let told = Arc::clone(&told);
            clients.spawn(async move {
                let (first, end) = ((node * CLIENTS + client) * 1_000_000, Instant::now() + TIME);
                for id in first.. {
                    work(pool.clone(), Arc::clone(&told), id, id % SHARED).await;
                    if Instant::now() > end {
                        break;
                    }
                }
                pool.close().await;
            });
        }
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    Arc::into_inner(told).unwrap().into_inner().unwrap()
}

/// A transaction that has written a row of its own and one that others write too.
async fn written(pool: &MySqlPool, id: u64, shared: u64) -> Result<Tx<MySql>, sqlx::Error> {
    let mut tx = lockkit::begin(pool).await.unwrap();
    Galera::execute(&mut tx, &format!("INSERT INTO written VALUES ({id})")).await?;
    Galera::execute(&mut tx, &format!("UPDATE hot SET n = n + 1 WHERE id = {shared}")).await?;
    Ok(tx)
}

fn report(told: &Report, id: u64, answer: Result<(), Error>) {
    let mut told = told.lock().unwrap();
    match answer {
        Ok(()) => told.committed.insert(id),
        Err(err) => {
            let is_known = err.is_transient() || matches!(err, Error::TransactionEnded { .. });
            assert!(is_known, "a conflict, and nothing else: {err:?}");
            told.refused.insert(id)
        }
    };
}

/// Checks that each node has what was committed, and nothing else.
async fn check<S: Cluster>(db: &TestDb<S>, told: &Told) {
    assert!(told.committed.len() > 10, "only {} commits", told.committed.len());
    for url in S::nodes(&db.url) {
        let mut conn = S::caught_up(&url).await.unwrap();
        let ids: Vec<u64> =
            sqlx::query_scalar("SELECT CAST(id AS UNSIGNED) FROM written").fetch_all(&mut conn).await.unwrap();
        let there = BTreeSet::from_iter(ids);
        let missing: Vec<_> = told.committed.difference(&there).collect();
        let others: Vec<_> = there.difference(&told.committed).collect();
        let committed = told.committed.len();
        assert_eq!(missing.len(), 0, "of {committed} commits that were answered are missing on {url}");
        assert_eq!(others.len(), 0, "that were refused are on {url}");
        let sum = Galera::fetch_i64(&mut conn, "SELECT SUM(n) FROM hot").await.unwrap();
        assert_eq!(sum, i64::try_from(committed).ok());
    }
    println!("{} commits, {} refused, none missing on any node", told.committed.len(), told.refused.len());
}
