//! The SQL of `docs/operating.md`, run as it stands there on each database that the page names for it.

use std::time::Duration;

use lockkit::{Error, Idempotent, Leases, SessionLock, Stock};
use support::{Server, TestDb, on_databases, on_every_database, on_every_server, spawn};

const PATIENCE: Duration = Duration::from_secs(20);

/// The statement under `<!-- topic: databases -->` that names this server.
fn statement<S: Server>(topic: &str) -> String {
    let page = include_str!("../../docs/operating.md");
    let blocks = page.split("<!-- ").skip(1).filter_map(|it| it.split_once(" -->\n```sql\n"));
    let mut of_topic = blocks.filter_map(|(label, text)| {
        let (name, databases) = label.split_once(": ")?;
        let is_for_this = name == topic && databases.split(", ").any(|it| it == S::NAME);
        is_for_this.then(|| text.split("```").next().expect("a block has an end").to_owned())
    });
    let statement = of_topic.next().unwrap_or_else(|| panic!("the page has no `{topic}` for {}", S::NAME));
    assert_eq!(of_topic.next(), None, "the page has two statements `{topic}` for {}", S::NAME);
    statement
}

#[test]
fn every_statement_of_the_page_is_of_a_topic_that_is_tested() {
    let page = include_str!("../../docs/operating.md");
    let before = page.split("```sql\n").map(|it| it.trim_end().rsplit('\n').next().unwrap_or_default());
    let labels: Vec<_> = before.take(page.matches("```sql\n").count()).collect();
    let topics = ["list", "free", "session", "kill", "blocked", "stock", "begun", "ahead"];
    let is_tested = |label: &str| topics.iter().any(|it| label.starts_with(&format!("<!-- {it}: ")));
    assert!(labels.iter().all(|it| is_tested(it)), "{labels:?}");
}

on_every_database! {
    async fn the_page_lists_work_that_has_begun<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let work = async |result: Result<(), Error>| {
            let work = Idempotent::key("pay:7").outside(&leases, async |_| result);
            drop(work.await);
            db.fetch_text(&statement::<S>("begun")).await
        };
        assert_eq!(work(Err(Error::conflict())).await.as_deref(), Some("pay:7"));
        assert_eq!(work(Ok(())).await, None);
    }

    async fn the_page_lists_leases_and_frees_one_by_its_fence<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        assert_eq!(db.fetch_text(&statement::<S>("list")).await, None);
        let lease = leases.lease("nightly").acquire().await.unwrap();
        assert_eq!(db.fetch_text(&statement::<S>("list")).await.as_deref(), Some("nightly"));

        let free = |fence: u64| statement::<S>("free").replace("1764000000000000", &fence.to_string());
        let fence = u64::from(lease.fence());
        assert_eq!(db.execute(&free(fence - 1)).await, 0, "another holder's fence");
        assert_eq!(db.execute(&free(fence)).await, 1);
        assert_eq!(db.fetch_text(&statement::<S>("list")).await, None);
        let next = leases.lease("nightly").try_acquire().await.unwrap().expect("it is free");
        assert!(next.fence() > lease.fence());
        next.release().await.unwrap();
    }

    async fn the_page_counts_what_is_left_in_a_stock<S>(db: TestDb<S>) {
        let stock = Stock::new(db.pool.clone(), "sku:42").segments(4);
        stock.put(200).await.unwrap();
        let sql = statement::<S>("stock");
        assert_eq!(db.fetch_text(&sql).await.as_deref(), Some("sku:42"));
        let left = format!("SELECT quantity FROM ({}) AS stocks", sql.trim().trim_end_matches(';'));
        assert_eq!(db.fetch_i64(&left).await, Some(200));
    }
}

on_every_server! {
    async fn fences_rise_over_a_failover_that_waits_and_not_over_one_that_does_not<S>(db: TestDb<S>) {
        const TTL: Duration = Duration::from_secs(1);
        let leases = Leases::new(db.pool.clone());
        let take = async || {
            let lease = leases.lease("nightly").ttl(TTL).acquire().await.unwrap();
            let fence = lease.fence().as_i64();
            lease.release().await.unwrap();
            fence
        };
        let wait = async || -> f64 {
            db.fetch_text(&statement::<S>("ahead")).await.expect("a number").parse().expect("a number")
        };
        assert!(wait().await <= 0.0, "without a lease");
        let promote = async |fence: i64| {
            db.execute(&format!("UPDATE lockkit_lease SET fence = {fence}, token = NULL, expires_us = 0")).await
        };
        // The clock of the old primary was set back by a minute. The standby has this row, and not the next grant.
        let replicated = take().await + 60_000_000;
        promote(replicated).await;
        let lost = take().await;
        promote(replicated).await;
        assert_eq!(take().await, lost, "the fence repeats");

        promote(replicated).await;
        let wait = wait().await;
        assert!(wait > 0.0 && wait < 60.1, "{wait}");
        // Instead of a wait, all fences are of an earlier time.
        let waited = i64::try_from((Duration::from_secs_f64(wait) + TTL).as_micros()).unwrap();
        promote(replicated - waited).await;
        assert!(take().await > lost - waited + 255, "fences rise");
    }

    async fn the_page_names_the_session_that_holds_a_lock_and_ends_it<S>(db: TestDb<S>) {
        let lock = || SessionLock::new("leader");
        assert_eq!(db.fetch_text(&statement::<S>("session")).await, None);
        let leader = lock().acquire(&db.pool).await.unwrap();
        let holder = lock().holder(&db.pool).await.unwrap().expect("it is held").id;
        assert_eq!(db.fetch_i64(&statement::<S>("session")).await, Some(holder));

        db.execute(&statement::<S>("kill").replace("4711", &holder.to_string())).await;
        tokio::time::timeout(PATIENCE, leader.lost()).await.expect("the holder hears of it");
        assert_eq!(db.fetch_text(&statement::<S>("session")).await, None);
    }

    async fn the_page_shows_the_blocking_session<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id INT PRIMARY KEY, n INT)").await;
        db.execute("INSERT INTO item VALUES (1, 0)").await;
        let update = "UPDATE item SET n = n + 1 WHERE id = 1";
        let id = if S::NAME == "PostgreSQL" { "SELECT pg_backend_pid()" } else { "SELECT CONNECTION_ID()" };
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, update).await.unwrap();
        let mut waiter = lockkit::begin(&db.pool).await.unwrap();
        let waits = S::fetch_i64(&mut waiter, id).await.unwrap().map(|it| it.to_string());
        // Other tests' transactions are there, too.
        let sql = statement::<S>("blocked");
        let is_shown = async || {
            let mut conn = db.pool.acquire().await.unwrap();
            <<S as Server>::DB as support::PlainSql>::fetch_texts(&mut conn, &sql).await.unwrap().contains(&waits)
        };
        assert!(!is_shown().await);
        let waiting = spawn(async move {
            S::execute(&mut waiter, update).await.unwrap();
            waiter.commit().await.unwrap();
        });
        let shown = async {
            while !is_shown().await {
                // MariaDB keeps an answer for those who ask again within 0.1 s.
                tokio::time::sleep(Duration::from_millis(150)).await;
            }
        };
        tokio::time::timeout(PATIENCE, shown).await.expect("the wait shows");
        holder.commit().await.unwrap();
        waiting.await.unwrap();
    }
}

on_databases! {
    [postgres]
    async fn the_page_names_the_holder_of_a_named_lock<S>(db: TestDb<S>) {
        let sql = statement::<S>("session").replace("lockkit:session:", "lockkit:named:");
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        lockkit::NamedLock::new("leader").lock(&mut *tx).await.unwrap();
        let holder = S::fetch_i64(&mut tx, "SELECT pg_backend_pid()").await.unwrap();
        assert_eq!(db.fetch_i64(&sql).await, holder);
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64(&sql).await, None);
    }
}
