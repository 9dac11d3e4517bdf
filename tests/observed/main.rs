//! What lockkit tells: the names of its events, spans and metrics, and that no metric carries a raw key.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkit::testing::{Failure, MemoryStore, Operation};
use lockkit::{Error, Leases, NamedLock, OrConflict, RetryPolicy, RowLock, SessionLock, with_lock};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::TestDb;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Every span and event by its name or message, with the names of its fields.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<BTreeMap<String, BTreeSet<String>>>>);

#[derive(Default)]
struct Fields {
    message: String,
    names: BTreeSet<String>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.names.insert(field.name().to_owned());
        }
    }
}

impl Told {
    fn add(&self, name: String, names: BTreeSet<String>) {
        self.0.lock().unwrap().entry(name).or_default().extend(names);
    }
}

impl<S: Subscriber> Layer<S> for Told {
    fn on_new_span(&self, span: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut fields = Fields::default();
        span.record(&mut fields);
        if span.metadata().target() == "lockkit" {
            self.add(span.metadata().name().to_owned(), fields.names);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if event.metadata().target() == "lockkit" {
            self.add(fields.message, fields.names);
        }
    }
}

/// How often each event was told, by strategy and reason.
#[derive(Clone, Default)]
struct Losses(Arc<Mutex<Vec<(String, String)>>>);

#[derive(Default)]
struct Loss {
    message: String,
    strategy: String,
    reason: String,
}

impl Visit for Loss {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "strategy" => self.strategy = format!("{value:?}"),
            "reason" => self.reason = format!("{value:?}"),
            _ => {}
        }
    }
}

impl<S: Subscriber> Layer<S> for Losses {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut loss = Loss::default();
        event.record(&mut loss);
        if loss.message == "lost" {
            self.0.lock().unwrap().push((loss.strategy, loss.reason));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_told_once_however_it_comes() {
    let losses = Losses::default();
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(losses.clone()));
    let told = || std::mem::take(&mut *losses.0.lock().unwrap());
    let lost = |reason: &str| vec![("lease".to_owned(), reason.to_owned())];
    let store = MemoryStore::new();

    // The store cannot be reached while the body runs, and while nobody looks at the lease.
    for runs in [true, false] {
        let leases = Leases::new(store.client());
        let lease = leases.lease("k").acquire().await.unwrap();
        leases.store().faults().partition();
        if runs {
            lease.lost().await;
        } else {
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        assert_eq!(told(), lost("Unreachable"), "with a body: {runs}");
        drop(lease);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(told(), [], "once");
    }

    // It was not renewed in time, and the body of `run` is the first to see it.
    let leases = Leases::new(store.client());
    leases.store().faults().script(Operation::Renew, [Failure::Slow(Duration::from_secs(600)); 100]);
    let ended = leases.lease("k").run(async |_| std::future::pending::<Result<(), Error>>().await).await;
    assert!(ended.unwrap_err().is_lost());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(told().len(), 1);

    // Stolen.
    let leases = Leases::new(store.client());
    let lease = leases.lease("k").acquire().await.unwrap();
    store.steal("k");
    lease.lost().await;
    drop(lease);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(told(), lost("Stolen"));

    // Given back: no loss.
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    leases.lease("k").run(async |_| Ok::<_, Error>(())).await.unwrap();
    leases.close().await.unwrap();
    assert_eq!(told(), []);
}

/// How often a process could not ask to lead.
#[derive(Clone, Default)]
struct Campaigns(Arc<AtomicU32>);

impl<S: Subscriber> Layer<S> for Campaigns {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.fetch_add(u32::from(fields.message == "cannot ask to lead"), Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn each_outage_of_a_store_is_told_once_by_a_process_that_waits_to_lead() {
    let campaigns = Campaigns::default();
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(campaigns.clone()));
    let store = MemoryStore::new();
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let _held = there.lease("k").acquire().await.unwrap();
    let leading = tokio::spawn(here.lease("k").lead(async |_| Ok::<_, Error>(())));
    for outages in 1..=3 {
        here.store().faults().partition();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(campaigns.0.load(Ordering::Relaxed), outages);
        here.store().faults().heal();
        // Another campaign ends in that time, and finds that the lease is held.
        tokio::time::sleep(Duration::from_secs(180)).await;
    }
    assert!(!leading.is_finished());
    leading.abort();
}

#[tokio::test]
async fn the_loss_of_a_session_lock_is_told() {
    let db = TestDb::<support::Postgres>::new().await;
    let losses = Losses::default();
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(losses.clone()));
    let session = SessionLock::new("k").heartbeat(Duration::from_millis(50)).acquire(&db.pool).await.unwrap();
    // Not the locks of other tests, in other databases of the server.
    let end = "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = database
               WHERE locktype = 'advisory' AND granted AND datname = current_database()";
    db.execute(end).await;
    session.lost().await;
    session.release().await.unwrap_err();
    assert_eq!(*losses.0.lock().unwrap(), [("session".to_owned(), "Unreachable".to_owned())]);
}

/// Takes each kind of lock, and has each of them refused, lost and retried.
async fn use_everything(db: &TestDb<support::Sqlite>, told: &Told) {
    // The ttl is the default of 30 s: a machine that stalls for less loses no lease that is not meant to be lost.
    let often = Duration::from_millis(50);
    let leases = Leases::builder(db.pool.clone()).renew_every(often).sweep_every(often).build().unwrap();
    let lease = leases.lease("order:42").acquire().await.unwrap();
    let refused = leases.lease("order:42").wait(Duration::from_millis(20)).acquire().await.unwrap_err();
    assert!(refused.is_contended());
    while !["renewed", "swept"].iter().all(|it| told.0.lock().unwrap().contains_key(*it)) {
        tokio::time::sleep(often).await;
    }
    lease.release().await.unwrap();

    let lost = leases.lease("order:43").run(|lease| {
        let leases = leases.clone();
        async move {
            leases.steal("order:43").await?;
            lease.lost().await;
            std::future::pending::<Result<(), Error>>().await
        }
    });
    assert!(lost.await.unwrap_err().is_lost());

    db.execute("CREATE TABLE t_items (id INTEGER PRIMARY KEY, version INTEGER)").await;
    db.execute("INSERT INTO t_items VALUES (1, 1)").await;
    let mut tx = lockkit::begin(&db.pool).await.unwrap();
    NamedLock::new("user:7").lock(&mut *tx).await.unwrap();
    RowLock::table("t_items").by("id", 1).lock(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();

    let stale = "UPDATE t_items SET version = 3 WHERE id = 1 AND version = 2";
    let retried = RetryPolicy::new().attempts(2).retry(|_| async {
        let mut conn = db.pool.acquire().await.expect("a connection");
        let result = sqlx::query(stale).execute(&mut *conn).await.expect("update");
        result.or_conflict()
    });
    assert!(matches!(retried.await, Err(Error::RetriesExhausted { attempts: 2, .. })));
}

#[tokio::test]
async fn spans_events_and_metrics_have_the_names_that_the_documentation_gives() {
    let db = TestDb::<support::Sqlite>::new().await;
    let told = Told::default();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    {
        let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
        let _metrics = metrics::set_default_local_recorder(&recorder);
        use_everything(&db, &told).await;
    }

    let told = told.0.lock().unwrap();
    let expected = [
        ("lockkit.acquire", vec!["key", "strategy"]),
        ("lockkit.hold", vec!["key", "strategy"]),
        ("acquired", vec!["key", "strategy", "waited"]),
        ("contended", vec!["key", "strategy", "waited"]),
        ("renewed", vec!["leases", "took"]),
        ("lost", vec!["fence", "held", "key", "reason", "strategy"]),
        ("released", vec!["fence", "held", "key", "strategy"]),
        ("committed", vec![]),
        ("retrying", vec!["attempt", "error", "pause"]),
        ("swept", vec!["keys"]),
    ];
    for (name, fields) in expected {
        let found = told.get(name).unwrap_or_else(|| panic!("nothing told of `{name}`: {:?}", told.keys()));
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), fields, "{name}");
    }

    let mut found = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: Vec<_> = key.key().labels().map(|it| format!("{}={}", it.key(), it.value())).collect();
        let count = match value {
            DebugValue::Counter(count) => count,
            DebugValue::Histogram(values) => values.len() as u64,
            // What gauges count is in `tests/metrics`.
            DebugValue::Gauge(_) => continue,
        };
        let text = format!("{}{{{}}}", key.key().name(), labels.join(","));
        assert!(!["42", "43", "user:7"].iter().any(|it| text.contains(it)), "a raw key: {text}");
        found.insert(text, count);
    }
    for (name, count) in [
        ("lockkit_acquired_total{strategy=lease,prefix=order}", 2),
        ("lockkit_acquired_total{strategy=named,prefix=user}", 1),
        ("lockkit_acquired_total{strategy=row,prefix=}", 1),
        ("lockkit_contended_total{strategy=lease,prefix=order}", 1),
        ("lockkit_lost_total{strategy=lease,prefix=order}", 1),
        ("lockkit_retried_total{}", 1),
        ("lockkit_wait_seconds{strategy=lease,prefix=order}", 3),
        ("lockkit_hold_seconds{strategy=lease,prefix=order}", 2),
    ] {
        assert_eq!(found.get(name), Some(&count), "{name} among {found:?}");
    }
}

#[tokio::test]
async fn a_body_under_several_leases_runs_in_a_span_as_one_under_a_single_lease_does() {
    let leases = Leases::new(MemoryStore::new());
    let told = Told::default();
    {
        let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
        leases.all(["order:42", "order:43"]).run(|_| async { Ok::<_, Error>(()) }).await.unwrap();
    }
    let told = told.0.lock().unwrap();
    let fields = told.get("lockkit.hold").unwrap_or_else(|| panic!("no span: {:?}", told.keys()));
    assert_eq!(fields.iter().map(String::as_str).collect::<Vec<_>>(), ["key", "strategy"]);
}

#[tokio::test]
async fn a_theft_on_the_inspector_is_told_with_the_operator() {
    let leases = Leases::new(MemoryStore::new());
    let lease = leases.lease("order:42").acquire().await.unwrap();
    let access = |_: &_| lockkit_web::Access::Steal { by: "ann".to_owned() };
    let inspector: axum::Router = lockkit_web::Inspector::new(leases).access(access).router();
    let body = serde_json::json!({ "key": "order:42", "fence": lease.fence().to_string() }).to_string();
    let request = axum::http::Request::post("/steal").header("content-type", "application/json");
    let request = request.header("sec-fetch-site", "same-origin").header("x-lockkit", "1").body(body).unwrap();
    let told = Told::default();
    {
        let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
        tower::ServiceExt::oneshot(inspector, request).await.unwrap();
    }
    let told = told.0.lock().unwrap();
    let fields = told.get("stolen").unwrap_or_else(|| panic!("not told: {:?}", told.keys()));
    assert_eq!(fields.iter().map(String::as_str).collect::<Vec<_>>(), ["by", "fence", "holder", "key"]);
}

#[tokio::test]
async fn a_cluster_with_several_nodes_is_warned_of_once() {
    warns_once_of::<support::Galera>("Galera cluster").await;
}

#[tokio::test]
async fn a_group_with_several_primaries_is_warned_of_once() {
    warns_once_of::<support::Group>("replication group").await;
}

async fn warns_once_of<S: support::Cluster>(what: &str) {
    let Some(db) = TestDb::<S>::unless_left_out().await else { return };
    for is_told in [true, false] {
        let told = Told::default();
        {
            let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
            lockkit::begin(&db.pool_of(1).await).await.unwrap().rollback().await.unwrap();
        }
        let told = told.0.lock().unwrap();
        assert_eq!(told.keys().any(|it| it.contains(what)), is_told, "{:?}", told.keys());
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_request_takes_on_its_way_is_not_counted_as_a_lease_of_the_caller() {
    let store = MemoryStore::new();
    let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
    let told = Told::default();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    {
        let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
        let _metrics = metrics::set_default_local_recorder(&recorder);
        let held =
            (here.lease("order:42").acquire().await.unwrap(), here.rw("order:7").read().acquire().await.unwrap());
        // A ticket, and a ticket and the writer's lease.
        let wait = Duration::from_millis(300);
        there.lease("order:42").wait(wait).acquire().await.unwrap_err();
        there.rw("order:7").write().wait(wait).acquire().await.unwrap_err();
        held.0.release().await.unwrap();
        held.1.release().await.unwrap();
    }
    let mut found = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let count = match value {
            DebugValue::Counter(count) => count,
            DebugValue::Histogram(values) => values.len() as u64,
            // What gauges count is in `tests/metrics`.
            DebugValue::Gauge(_) => continue,
        };
        *found.entry(key.key().name().to_owned()).or_insert(0) += count;
    }
    let of = |name: &str| found.get(name).copied().unwrap_or(0);
    assert_eq!((of("lockkit_acquired_total"), of("lockkit_contended_total")), (2, 2), "{found:?}");
    assert_eq!((of("lockkit_hold_seconds"), of("lockkit_lost_total")), (2, 0), "{found:?}");
}

#[tokio::test(start_paused = true)]
async fn two_bodies_that_take_two_leases_in_opposite_orders_are_named() {
    let leases = Leases::builder(MemoryStore::new()).wait(Duration::from_secs(5)).build().unwrap();
    let told = Told::default();
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(told.clone()));
    let both = async |first: &str, second: &str| {
        let inner = async |_| {
            tokio::time::sleep(Duration::from_millis(10)).await;
            leases.lease(second).run(|_| async { Ok::<_, Error>(()) }).await
        };
        leases.lease(first).run(inner).await
    };
    let name = "two callers wait for each other's lease: acquire both in one order, or together by `Leases::all`";
    // In one order, the second waits for the first, and nobody for the second.
    let (one, other) = tokio::join!(both("a", "b"), both("a", "b"));
    assert!(one.is_ok() && other.is_ok() && !told.0.lock().unwrap().contains_key(name));
    let (one, other) = tokio::join!(both("a", "b"), both("b", "a"));
    assert!(one.is_err() || other.is_err());
    let told = told.0.lock().unwrap();
    let fields = told.get(name).unwrap_or_else(|| panic!("not named: {:?}", told.keys()));
    assert_eq!(fields.iter().map(String::as_str).collect::<Vec<_>>(), ["key", "other"]);
}

/// The fields of each event about a transaction that stays open.
#[derive(Clone, Default)]
struct Long(Arc<Mutex<Vec<BTreeMap<String, String>>>>);

struct Texts(BTreeMap<String, String>);

impl Visit for Texts {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl<S: Subscriber> Layer<S> for Long {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut texts = Texts(BTreeMap::new());
        event.record(&mut texts);
        if texts.0.get("message").is_some_and(|it| it == "a transaction stays open") {
            self.0.lock().unwrap().push(texts.0);
        }
    }
}

impl Long {
    async fn until(&self, events: usize) {
        while self.0.lock().unwrap().len() < events {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

const ATTRIBUTE: u32 = line!() + 1;
#[with_lock(row, on = pool, table = "t_items", by(id = 1_i64), tx = tx)]
async fn stays_open(pool: &sqlx::SqlitePool, long: &Long) -> Result<(), Error> {
    sqlx::query("SELECT 1").execute(&mut *tx).await.expect("select");
    long.until(2).await;
    Ok(())
}

#[tokio::test]
async fn a_transaction_that_stays_open_is_told_of_once_with_its_locks_and_its_line() {
    let db = TestDb::<support::Sqlite>::new().await;
    db.execute("CREATE TABLE t_items (id INTEGER PRIMARY KEY)").await;
    db.execute("INSERT INTO t_items VALUES (1)").await;
    let long = Long::default();
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry().with(long.clone()));
    // The locks must be taken before, on a busy machine too.
    let after = Duration::from_millis(500);
    lockkit::dialect::warn_of_long_transactions(after);

    let line = line!() + 1;
    let mut tx = lockkit::begin(&db.pool).await.unwrap();
    NamedLock::new("user:7").lock(&mut tx).await.unwrap();
    RowLock::table("t_items").by("id", 1).lock(&mut tx).await.unwrap();
    long.until(1).await;
    tokio::time::sleep(after * 3).await;
    tx.rollback().await.unwrap();
    stays_open(&db.pool, &long).await.unwrap();
    lockkit::dialect::warn_of_long_transactions(None);

    let told = long.0.lock().unwrap();
    let of = |number: usize, field: &str| told[number][field].clone();
    assert_eq!(told.len(), 2, "each once: {told:?}");
    assert_eq!(of(0, "locks"), "named lock `user:7`, row lock of `t_items`");
    assert!(of(0, "begun_at").contains(&format!("observed/main.rs:{line}:")), "{told:?}");
    assert_eq!(of(1, "locks"), "row lock of `t_items`");
    assert!(of(1, "begun_at").contains(&format!("observed/main.rs:{ATTRIBUTE}:")), "{told:?}");
}
