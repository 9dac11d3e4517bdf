//! `ShedLock`'s table: leases in it, and `ShedLock`'s own statements beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkit::store::{Acquired, Answer, Claim, Grant, LeaseStore, Renewal, ShedLockTable, Token};
use lockkit::testing::{Oracle, conformance, drop_at_every_await};
use lockkit::{Error, Leases, Released};
use sqlx::mysql::MySqlConnectOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{Connection, Database, Pool, Postgres, pool::PoolOptions};
use support::{JoinSet, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::time::{sleep, timeout};

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

const LONG: Duration = Duration::from_secs(600);

/// Connections in the server's own time zone, as Java has them.
pub(crate) trait ServerZone {
    fn in_the_servers_zone(self) -> Self;
}

impl ServerZone for PgConnectOptions {
    fn in_the_servers_zone(self) -> Self {
        self
    }
}

impl ServerZone for SqliteConnectOptions {
    fn in_the_servers_zone(self) -> Self {
        self
    }
}

impl ServerZone for MySqlConnectOptions {
    fn in_the_servers_zone(self) -> Self {
        self.timezone(None)
    }
}

pub(crate) type OptionsOf<DB> = <<DB as Database>::Connection as Connection>::Options;

pub(crate) fn pool<S: Server>(url: &str) -> Pool<S::DB>
where
    OptionsOf<S::DB>: ServerZone,
{
    let options: OptionsOf<S::DB> = url.parse().expect("the URL of a test's database");
    PoolOptions::new().max_connections(8).connect_lazy_with(options.in_the_servers_zone())
}

/// The definition that lockkit documents.
pub(crate) fn our_table(server: &str, name: &str) -> String {
    let (text, time) = match server {
        "SQLite" => ("", "INTEGER"),
        "PostgreSQL" => ("", "TIMESTAMP"),
        "MySQL" => ("CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin", "DATETIME(6)"),
        _ => ("CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin", "DATETIME(6)"),
    };
    format!(
        "CREATE TABLE {name} (name VARCHAR(64) {text} NOT NULL PRIMARY KEY, lock_until {time} NOT NULL,
             locked_at {time} NOT NULL, locked_by VARCHAR(255) NOT NULL)"
    )
}

/// The definition that `ShedLock` documents.
pub(crate) fn javas_table(server: &str) -> &'static str {
    match server {
        "PostgreSQL" => {
            "CREATE TABLE shedlock(name VARCHAR(64) NOT NULL, lock_until TIMESTAMP NOT NULL,
                 locked_at TIMESTAMP NOT NULL, locked_by VARCHAR(255) NOT NULL, PRIMARY KEY (name))"
        }
        _ => {
            "CREATE TABLE shedlock(name VARCHAR(64) NOT NULL, lock_until TIMESTAMP(3) NOT NULL,
                 locked_at TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3), locked_by VARCHAR(255) NOT NULL,
                 PRIMARY KEY (name))"
        }
    }
}

/// `ShedLock` 7.9 with `usingDbTime()`: its statements, with the values in them, for the lock `job`.
pub(crate) struct Java<S: Server> {
    pub(crate) pool: Pool<S::DB>,
}

impl<S: Server> Java<S> {
    pub(crate) async fn run(&self, sql: &str) -> bool {
        let mut conn = self.pool.acquire().await.expect("a connection");
        S::execute(&mut conn, sql).await.unwrap_or_else(|err| panic!("{sql}: {err}")) > 0
    }

    /// The clock, and the end of a lock that lasts so long.
    fn times(seconds: f64) -> (&'static str, String) {
        if S::NAME == "PostgreSQL" {
            let now = "timezone('utc', CURRENT_TIMESTAMP)";
            return (now, format!("{now} + make_interval(secs => {seconds:.3})"));
        }
        let micros = Duration::from_secs_f64(seconds).as_micros();
        ("UTC_TIMESTAMP(3)", format!("TIMESTAMPADD(MICROSECOND, {micros}, UTC_TIMESTAMP(3))"))
    }

    /// `doLock`: inserts the row, or takes it.
    pub(crate) async fn lock(&self, seconds: f64) -> bool {
        let (now, until) = Self::times(seconds);
        let insert = "INTO shedlock(name, lock_until, locked_at, locked_by)";
        if S::NAME == "PostgreSQL" {
            let take = format!(
                " SET lock_until = {until}, locked_at = {now}, locked_by = 'java' \
                 WHERE shedlock.name = 'job' AND shedlock.lock_until <= {now}"
            );
            let insert =
                format!("INSERT {insert} VALUES('job', {until}, {now}, 'java') ON CONFLICT (name) DO UPDATE{take}");
            return self.run(&insert).await || self.run(&format!("UPDATE shedlock{take}")).await;
        }
        let take = format!(
            "UPDATE shedlock SET lock_until = {until}, locked_at = {now}, locked_by = 'java' \
             WHERE name = 'job' AND lock_until <= {now}"
        );
        self.run(&format!("INSERT IGNORE {insert} VALUES('job', {until}, {now}, 'java')")).await
            || self.run(&take).await
    }

    pub(crate) async fn unlock(&self, at_least: f64) -> bool {
        let (now, _) = Self::times(0.0);
        let of = "WHERE name = 'job' AND locked_by = 'java'";
        let least = if S::NAME == "PostgreSQL" {
            format!("locked_at + make_interval(secs => {at_least:.3})")
        } else {
            format!("TIMESTAMPADD(MICROSECOND, {}, locked_at)", Duration::from_secs_f64(at_least).as_micros())
        };
        let until = if S::NAME == "PostgreSQL" {
            format!("CASE WHEN {least} > {now} THEN {least} ELSE {now} END")
        } else {
            format!("IF ({least} > {now} , {least}, {now})")
        };
        self.run(&format!("UPDATE shedlock SET lock_until = {until} {of}")).await
    }

    async fn extend(&self, seconds: f64) -> bool {
        let (now, until) = Self::times(seconds);
        let of = format!("WHERE name = 'job' AND locked_by = 'java' AND lock_until > {now}");
        self.run(&format!("UPDATE shedlock SET lock_until = {until} {of}")).await
    }

    /// Asks until it has the lock.
    pub(crate) async fn wait(&self, seconds: f64) {
        let asking = async {
            while !self.lock(seconds).await {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, asking).await.expect("the lock comes free for Java");
    }
}

async fn take(store: &impl LeaseStore, claim: &Claim) -> Grant {
    match store.lease_acquire(claim).await.expect("an answer") {
        Acquired::Granted(grant) => grant,
        held @ Acquired::Held { .. } => panic!("`{}` is not free: {held:?}", claim.key),
    }
}

fn job(ttl: Duration) -> Claim {
    Claim::new("job", Token::random(), "rust", ttl)
}

/// Waits until the lock has expired.
async fn expired(store: &impl LeaseStore) {
    let asking = async {
        while store.lease_look(&"job".into()).await.expect("an answer").is_some() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, asking).await.expect("it expires");
}

on_every_database! {
    async fn shedlocks_table_keeps_every_promise_of_a_store<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "shedlock")).await;
        let kept = conformance::run(async || ShedLockTable::new(db.pool.clone())).await;
        println!("ShedLock's table on {} keeps {kept} promises", S::NAME);
        db.assert_nothing_left().await;
    }

    async fn the_oracle_sees_no_two_holders_in_shedlocks_table<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "cron_lock")).await;
        let oracle = Oracle::new();
        let mut working = JoinSet::new();
        for _ in 0..4 {
            let store = ShedLockTable::new(db.pool.clone()).table("cron_lock").unwrap();
            let leases = Leases::builder(oracle.watch(store)).wait(Duration::from_secs(60)).build().unwrap();
            let oracle = oracle.clone();
            working.spawn(async move {
                for _ in 0..10 {
                    let lease = leases.lease("k").acquire().await.unwrap();
                    let held = oracle.hold(&lease);
                    tokio::task::yield_now().await;
                    drop(held);
                    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        working.join_all().await;
        assert!(oracle.assert_exclusive() >= 40);
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM cron_lock").await, Some(1), "who waits leaves no rows behind");
        db.assert_nothing_left().await;
    }

    async fn what_shedlocks_table_cannot_do_is_refused_with_the_reason<S>(db: TestDb<S>) {
        let leases = Leases::new(ShedLockTable::new(db.pool.clone()));
        let missing = leases.lease("job").acquire().await.unwrap_err();
        let Error::NotMigrated { hint, .. } = &missing else { panic!("{missing:?}") };
        assert!(hint.contains("ShedLock's table is not there"), "{hint}");

        db.execute(&our_table(S::NAME, "shedlock")).await;
        for (refused, option) in [
            (leases.any(["job", "other"]).acquire().await.unwrap_err(), "any"),
            (leases.semaphore("job", 2).acquire().await.unwrap_err(), "semaphore"),
            (leases.rw("job").read().acquire().await.unwrap_err(), "rw"),
            (leases.rw("job").write().try_acquire().await.unwrap_err(), "rw"),
            (leases.lease("job").fair().acquire().await.unwrap_err(), "fair"),
        ] {
            assert!(matches!(&refused, Error::InvalidOption { option: it, .. } if *it == option), "{refused:?}");
        }
        for long in ["x".repeat(65), "ß".repeat(65)] {
            let refused = leases.lease(&long).acquire().await.unwrap_err();
            assert!(
                matches!(&refused, Error::InvalidKey { reason, .. } if reason.contains("64 characters")),
                "{refused:?}"
            );
            assert!(matches!(leases.show(&long).await, Err(Error::InvalidKey { .. })));
        }
        let name = "ß".repeat(64);
        let lease = leases.lease(&name).acquire().await.unwrap();
        assert_eq!(leases.show(&name).await.unwrap().unwrap().fence, lease.fence());
        lease.release().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM shedlock").await, Some(1));
        let bad = ShedLockTable::new(db.pool.clone()).table("a`b").unwrap_err();
        assert!(matches!(bad, Error::InvalidIdentifier { .. }), "{bad:?}");
    }

    async fn a_lease_in_shedlocks_table_is_renewed_and_guards_a_transaction<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "shedlock")).await;
        let leases =
            Leases::builder(ShedLockTable::new(db.pool.clone())).ttl(Duration::from_millis(600)).build().unwrap();
        let lease = leases.lease("job").acquire().await.unwrap();
        let fence = lease.fence();
        sleep(Duration::from_millis(1500)).await;
        assert!(lease.is_trusted());
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        let shown = leases.show("job").await.unwrap().unwrap();
        assert_eq!((shown.fence, shown.renewals, shown.is_this_process), (fence, 0, true));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        lease.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();

        assert_eq!(leases.steal("job").await.unwrap().map(|it| it.fence), Some(fence));
        timeout(PATIENCE, lease.lost()).await.expect("it is stolen");
        let next = leases.lease("job").acquire().await.unwrap();
        assert!(next.fence() > fence && next.previous().is_none());
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        next.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let stale = lockkit::guard(&mut *tx, "shedlock", "job", fence).await.unwrap_err();
        assert!(matches!(stale, Error::Fenced { .. }), "{stale:?}");
        tx.rollback().await.unwrap();
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_every_server! {
    async fn java_and_rust_exclude_each_other<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let (java, store) = (Java::<S> { pool: pool.clone() }, ShedLockTable::new(pool));
        let leases = Leases::new(store.clone());

        assert!(java.lock(600.0).await);
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none(), "Java has it");
        let shown = leases.show("job").await.unwrap().unwrap();
        assert_eq!((&*shown.holder, &*shown.key), ("java", "job"));
        assert!(shown.expires_in > LONG / 2 && shown.expires_in <= LONG, "{shown:?}");
        assert!(java.extend(1200.0).await);
        assert!(leases.show("job").await.unwrap().unwrap().expires_in > LONG);
        assert!(java.unlock(0.0).await);

        let lease = leases.lease("job").acquire().await.unwrap();
        assert!(lease.previous().is_none());
        assert!(!java.lock(600.0).await, "Rust has it");
        assert!(!java.unlock(0.0).await && !java.extend(600.0).await, "it is not Java's");
        lease.extend(LONG).await.unwrap();
        assert!(!java.lock(600.0).await);
        lease.release().await.unwrap();
        java.wait(600.0).await;
        assert!(java.unlock(600.0).await, "and stays taken for the least time");
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        assert!(!java.lock(600.0).await);

        // As an operator frees it.
        assert_eq!(leases.steal("job").await.unwrap().map(|it| it.holder).as_deref(), Some("java"));
        let lease = leases.lease("job").min_hold(LONG).acquire().await.unwrap();
        lease.release().await.unwrap();
        assert!(!java.lock(600.0).await, "it stays taken for the least time");
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        leases.steal("job").await.unwrap().expect("it is taken by nobody");
        java.wait(600.0).await;
    }

    async fn a_waiter_is_granted_the_lock_by_a_release_of_the_other_side<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let java = Java::<S> { pool: pool.clone() };
        let leases = Leases::new(ShedLockTable::new(pool.clone()));

        assert!(java.lock(600.0).await);
        let waiting = {
            let request = leases.lease("job").wait(PATIENCE);
            spawn(async move { request.acquire().await.unwrap() })
        };
        sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        assert!(java.unlock(0.0).await);
        let lease = waiting.await.unwrap();

        let other = Java::<S> { pool };
        let waiting = spawn(async move { other.wait(600.0).await });
        sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        lease.release().await.unwrap();
        waiting.await.unwrap();
        assert_eq!(leases.show("job").await.unwrap().unwrap().holder, "java");
    }

    // The columns of MySQL and MariaDB have milliseconds, so both sides come in the same one.
    async fn fences_rise_across_locks_of_java<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let (java, store) = (Java::<S> { pool: pool.clone() }, ShedLockTable::new(pool));
        let mut last = None;
        for round in 0..60 {
            if round % 3 == 2 {
                java.wait(600.0).await;
                let info = store.lease_look(&"job".into()).await.unwrap().unwrap().info;
                assert!(Some(info.fence) >= last, "Java's time {} follows {last:?}", info.fence);
                assert!(java.unlock(0.0).await);
            } else {
                let claim = job(LONG);
                let fence = take(&store, &claim).await.fence;
                assert!(Some(fence) > last, "{fence} follows {last:?}");
                last = Some(fence);
                assert_eq!(store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap(), Answer::Done);
            }
        }
    }

    async fn a_stale_holder_changes_nothing<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let (java, store) = (Java::<S> { pool: pool.clone() }, ShedLockTable::new(pool));
        let (key, row) = ("job".into(), "SELECT CONCAT(lock_until, locked_at, locked_by) FROM shedlock");

        let stale = job(Duration::from_millis(60));
        take(&store, &stale).await;
        expired(&store).await;
        java.wait(600.0).await;
        let before = db.fetch_text(row).await;
        let renewed = store.lease_renew(&[Renewal::new("job", stale.token, LONG)]).await.unwrap();
        let released = store.lease_release(&key, stale.token, Duration::ZERO).await.unwrap();
        let kept = store.lease_release(&key, stale.token, LONG).await.unwrap();
        assert_eq!((&*renewed, released, kept), (&[Answer::Gone][..], Answer::Gone, Answer::Gone));
        assert_eq!(db.fetch_text(row).await, before);
        assert!(java.unlock(0.0).await);

        java.wait(0.06).await;
        expired(&store).await;
        let claim = job(LONG);
        let grant = take(&store, &claim).await;
        assert_eq!(grant.previous, None, "whether Java had unlocked it, nobody knows");
        let before = db.fetch_text(row).await;
        assert!(!java.unlock(0.0).await && !java.extend(600.0).await && !java.lock(600.0).await);
        assert_eq!(db.fetch_text(row).await, before);

        // A lock that Java took again since an operator looked at it is another one.
        store.lease_release(&key, claim.token, Duration::ZERO).await.unwrap();
        java.wait(600.0).await;
        let seen = store.lease_look(&key).await.unwrap().unwrap().token;
        assert!(java.unlock(0.0).await);
        sleep(Duration::from_millis(5)).await;
        java.wait(600.0).await;
        assert_eq!(store.lease_release(&key, seen, Duration::ZERO).await.unwrap(), Answer::Gone);
        let held = store.lease_look(&key).await.unwrap().unwrap();
        assert_eq!(held.info.holder, "java");
        assert_eq!(store.lease_release(&key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
        assert!(store.lease_look(&key).await.unwrap().is_none());
        assert!(!java.unlock(0.0).await);
    }

    async fn a_table_without_milliseconds_is_refused<S>(db: TestDb<S>) {
        db.execute(&javas_table(S::NAME).replace("(3)", "(0)").replace("TIMESTAMP NOT", "TIMESTAMP(2) NOT")).await;
        let leases = Leases::new(ShedLockTable::new(pool::<S>(&db.url)));
        let refused = leases.lease("job").acquire().await.unwrap_err();
        assert!(matches!(&refused, Error::NotMigrated { hint, .. } if hint.contains("milliseconds")), "{refused:?}");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM shedlock").await, Some(0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_with_a_time_zone_are_refused_on_postgres() {
    let db = TestDb::<support::Postgres>::new().await;
    db.execute(&javas_table("PostgreSQL").replace("TIMESTAMP", "TIMESTAMPTZ")).await;
    // What would happen: the same statement means another instant in another zone, and both sides have the lock.
    let java =
        Java::<support::Postgres> { pool: PoolOptions::new().max_connections(1).connect(&db.url).await.unwrap() };
    java.run("SET TIME ZONE 'Europe/Athens'").await;
    assert!(java.lock(600.0).await);
    let other = Java::<support::Postgres> { pool: db.pool.clone() };
    assert!(other.lock(600.0).await, "two holders");

    let store = ShedLockTable::<Postgres>::new(db.pool.clone());
    let refused = Leases::new(store).lease("job").acquire().await.unwrap_err();
    assert!(matches!(&refused, Error::NotMigrated { hint, .. } if hint.contains("time zone")), "{refused:?}");
}

on_databases! { [mariadb, mysql]
    async fn a_session_in_another_zone_than_javas_is_refused<S>(db: TestDb<S>) {
        let options = |zone: &str| db.url.parse::<MySqlConnectOptions>().unwrap().timezone(zone.to_owned());
        let zone = |zone: &str| PoolOptions::new().max_connections(4).connect_lazy_with(options(zone));
        let (east, west) = (zone("+12:00"), zone("-12:00"));
        db.execute(javas_table(S::NAME)).await;
        // What would happen: the same statement means another instant in another zone, and both sides have the lock.
        assert!(Java::<S> { pool: east.clone() }.lock(600.0).await);
        assert!(Java::<S> { pool: west }.lock(600.0).await, "two holders");

        let leases = Leases::new(ShedLockTable::new(east));
        let refused = leases.lease("job").acquire().await.unwrap_err();
        assert!(matches!(&refused, Error::NotMigrated { hint, .. } if hint.contains("timezone(None)")), "{refused:?}");

        db.execute("DROP TABLE shedlock").await;
        db.execute(&javas_table(S::NAME).replace("TIMESTAMP(3) NOT NULL", "DATETIME(3) NOT NULL")).await;
        let java = Java::<S> { pool: pool::<S>(&db.url) };
        assert!(java.lock(600.0).await);
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none());
        assert!(java.unlock(0.0).await);
        let lease = leases.lease("job").acquire().await.unwrap();
        assert!(!java.lock(600.0).await);
        lease.release().await.unwrap();
        java.wait(600.0).await;
    }
}

on_every_server! {
    async fn java_and_rust_never_have_the_lock_at_once<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let inside = Arc::new(AtomicU32::new(0));
        let mut working = JoinSet::new();
        for _ in 0..3 {
            let leases =
                Leases::builder(ShedLockTable::new(pool.clone())).wait(Duration::from_secs(60)).build().unwrap();
            let inside = inside.clone();
            working.spawn(async move {
                for _ in 0..10 {
                    let lease = leases.lease("job").acquire().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "Rust came in while somebody was inside");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        // ShedLock tells its nodes apart by name, so one of them is enough.
        let java = Java::<S> { pool };
        working.spawn(async move {
            for _ in 0..20 {
                java.wait(600.0).await;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "Java came in while somebody was inside");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert!(java.unlock(0.0).await);
            }
        });
        working.join_all().await;
        db.assert_nothing_left().await;
    }

    async fn a_row_that_a_transaction_has_locked_is_not_waited_for<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let (java, store) = (Java::<S> { pool: pool.clone() }, ShedLockTable::new(pool));
        assert!(java.lock(600.0).await && java.unlock(0.0).await);
        let key = "job".into();
        let (free, held) = (job(LONG), job(LONG));
        let asking = async {
            let lock = "BEGIN; UPDATE shedlock SET locked_by = 'locked' WHERE name = 'job'";
            let mut tx = db.connect().await;
            S::execute(&mut tx, lock).await.unwrap();
            let refused = store.lease_acquire(&free).await.unwrap();
            assert_eq!(refused, Acquired::Held { free_in: None });
            S::execute(&mut tx, "ROLLBACK").await.unwrap();

            take(&store, &held).await;
            S::execute(&mut tx, lock).await.unwrap();
            let renewed = store.lease_renew(&[Renewal::new("job", held.token, LONG)]).await.unwrap();
            let released = store.lease_release(&key, held.token, Duration::ZERO).await.unwrap();
            assert_eq!((&*renewed, released), (&[Answer::Busy][..], Answer::Busy));
            S::execute(&mut tx, "ROLLBACK").await.unwrap();
            let renewed = store.lease_renew(&[Renewal::new("job", held.token, LONG)]).await.unwrap();
            let released = store.lease_release(&key, held.token, Duration::ZERO).await.unwrap();
            assert_eq!((&*renewed, released), (&[Answer::Done][..], Answer::Done));
        };
        timeout(PATIENCE, asking).await.expect("no operation waits for the row");
    }

    async fn a_lease_outlives_broken_connections_and_is_lost_in_a_silence<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let proxy = Proxy::start(&db.url);
        let java = Java::<S> { pool: pool::<S>(&db.url) };
        let leases =
            Leases::builder(ShedLockTable::new(pool::<S>(proxy.url()))).ttl(Duration::from_secs(3)).build().unwrap();
        let lease = leases.lease("job").acquire().await.unwrap();
        for _ in 0..3 {
            proxy.reset();
            sleep(Duration::from_millis(1200)).await;
            assert!(lease.is_trusted() && !java.lock(600.0).await);
        }
        proxy.stall(true);
        timeout(PATIENCE, lease.lost()).await.expect("nobody answers its renewals");
        java.wait(600.0).await;
        proxy.stall(false);
        drop(lease.release().await);
        assert!(leases.lease("job").try_acquire().await.unwrap().is_none(), "Java still has it");
        assert!(java.extend(600.0).await);
    }

    async fn a_grant_that_was_never_heard_of_is_released<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let proxy = Proxy::start(&db.url);
        let java = Java::<S> { pool: pool::<S>(&db.url) };
        let leases =
            Leases::builder(ShedLockTable::new(pool::<S>(proxy.url()))).ttl(LONG).holder("unheard").build().unwrap();
        assert!(java.lock(600.0).await && java.unlock(0.0).await);
        proxy.hold_replies_to("unheard");
        let asking = leases.lease("job").wait(PATIENCE);
        let asking = spawn(async move { asking.acquire().await.map(drop) });
        let granted = async {
            while db.fetch_i64("SELECT COUNT(*) FROM shedlock WHERE locked_by LIKE 'unheard#%'").await != Some(1) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, granted).await.expect("the server grants it");
        asking.abort();
        proxy.reset();
        proxy.pass_replies();
        java.wait(600.0).await;
        assert!(java.unlock(0.0).await);
    }

    async fn a_dropped_request_leaves_no_lock<S>(db: TestDb<S>) {
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let leases = Leases::new(ShedLockTable::new(pool));
        // A lock that is left lives for 30 s, which is longer than the wait.
        let drops = drop_at_every_await(|| leases.lease("job").wait(PATIENCE).acquire())
            .then(async |_| {
                let lease = leases.lease("job").wait(PATIENCE).acquire().await.expect("nobody has it");
                lease.release().await.expect("an answer");
            })
            .await;
        assert!(drops.completed && drops.points > 0, "{drops:?}");
    }
}

on_every_server! {
    async fn its_locks_are_taken_and_released_though_the_pool_is_full<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "shedlock")).await;
        let pool = db.pool_of(1).await;
        let leases = Leases::new(ShedLockTable::new(pool.clone()));
        let _only = pool.acquire().await.unwrap();
        let lease = leases.lease("job").wait(Duration::ZERO).acquire().await.expect("a free lock is granted");
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    }
}
