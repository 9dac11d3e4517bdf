//! Counters, gauges and histograms: what they count, and that the dashboard, the alerts and the documentation name what
//! the code emits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use lockkit::testing::MemoryStore;
use lockkit::{Error, Leases, OrConflict, RetryPolicy, SessionLock};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use sqlx::sqlite::SqlitePoolOptions;
use support::TestDb;
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
struct Metric {
    kind: Kind,
    labels: BTreeSet<String>,
}

/// What was seen so far. A histogram counts its values.
struct Recorded {
    snapshotter: Snapshotter,
    metrics: BTreeMap<String, Metric>,
    values: BTreeMap<String, i64>,
}

impl Recorded {
    fn by(recorder: &DebuggingRecorder) -> Self {
        Self { snapshotter: recorder.snapshotter(), metrics: BTreeMap::new(), values: BTreeMap::new() }
    }

    fn look(&mut self) {
        for (key, _, _, value) in self.snapshotter.snapshot().into_vec() {
            let key = key.key();
            let number = |count: u64| i64::try_from(count).expect("few events");
            #[expect(clippy::cast_possible_truncation, reason = "a gauge counts")]
            let (kind, value) = match value {
                DebugValue::Counter(count) => (Kind::Counter, number(count)),
                DebugValue::Gauge(value) => (Kind::Gauge, value.round() as i64),
                DebugValue::Histogram(values) => (Kind::Histogram, number(values.len() as u64)),
            };
            let labels = key.labels().map(|it| it.key().to_owned()).collect();
            let before = self.metrics.insert(key.name().to_owned(), Metric { kind, labels });
            assert!(before.is_none_or(|it| it == self.metrics[key.name()]), "{key}: one kind and one set of labels");
            let labels: Vec<_> = key.labels().map(|it| format!("{}={}", it.key(), it.value())).collect();
            // A snapshot sets counters and gauges to 0.
            *self.values.entry(format!("{}{{{}}}", key.name(), labels.join(","))).or_default() += value;
        }
    }

    /// The value of a metric with these labels, 0 before its first event.
    fn value(&mut self, metric: &str) -> i64 {
        self.look();
        self.values.get(metric).copied().unwrap_or_default()
    }

    /// How many leases with the prefix `order` are held, waited for, and were handed on.
    fn orders(&mut self) -> [i64; 3] {
        ["lockkit_held", "lockkit_waiting", "lockkit_handed_on_total"]
            .map(|it| self.value(&format!("{it}{{strategy=lease,prefix=order}}")))
    }
}

#[tokio::test(start_paused = true)]
async fn gauges_count_the_leases_that_callers_have_and_wait_for() {
    let store = MemoryStore::new();
    let leases = Leases::builder(store.client()).wait(60 * SECOND).build().unwrap();
    let recorder = DebuggingRecorder::new();
    let _metrics = metrics::set_default_local_recorder(&recorder);
    let mut seen = Recorded::by(&recorder);

    let first = leases.lease("order:1").acquire().await.unwrap();
    let waiting = tokio::spawn(leases.lease("order:1").acquire());
    let dropped = tokio::spawn(leases.lease("order:1").acquire());
    let given_up = leases.lease("order:1").wait(SECOND).acquire();
    assert!(given_up.await.unwrap_err().is_contended());
    // The waiters of another process have tickets, which are leases that no caller has.
    let elsewhere = Leases::builder(store.client()).wait(SECOND).build().unwrap();
    assert!(elsewhere.lease("order:1").acquire().await.unwrap_err().is_contended());
    assert_eq!(seen.orders(), [1, 2, 0]);
    dropped.abort();
    dropped.await.unwrap_err();
    assert_eq!(seen.orders(), [1, 1, 0]);

    first.release().await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    assert_eq!(seen.orders(), [1, 0, 1]);

    let share = second.share();
    leases.steal("order:1").await.unwrap();
    assert_eq!(seen.orders(), [0, 0, 1], "it is lost, though the caller still has its handles");
    drop((second, share));

    let several = leases.all(["order:1", "order:2"]).acquire().await.unwrap();
    let tried = leases.lease("order:3").try_acquire().await.unwrap();
    assert_eq!(seen.orders(), [3, 0, 1]);
    drop((several, tried));
    let closed = leases.lease("order:4").acquire().await.unwrap();
    leases.close().await.unwrap();
    drop(closed);
    assert_eq!(seen.orders(), [0, 0, 1]);
}

#[tokio::test(start_paused = true)]
async fn each_statement_that_renews_is_recorded_with_its_outcome() {
    let leases = Leases::new(MemoryStore::new());
    let recorder = DebuggingRecorder::new();
    let _metrics = metrics::set_default_local_recorder(&recorder);
    let mut seen = Recorded::by(&recorder);
    let mut renewals =
        || ["answered", "failed"].map(|it| seen.value(&format!("lockkit_renew_seconds{{outcome={it}}}")));

    let lease = leases.lease("k").ttl(30 * SECOND).acquire().await.unwrap();
    sleep(25 * SECOND).await;
    let [answered, failed] = renewals();
    assert!(answered >= 2 && failed == 0, "{answered} {failed}");
    leases.store().faults().partition();
    lease.lost().await;
    let [before, (answered, failed)] = [(answered, failed), renewals().into()];
    assert!(answered == before.0 && failed >= 2, "{answered} {failed}");
}

#[tokio::test]
async fn a_session_lock_counts_as_held_until_its_connection_is_free_again() {
    let db = TestDb::<support::Postgres>::new().await;
    let recorder = DebuggingRecorder::new();
    let _metrics = metrics::set_default_local_recorder(&recorder);
    let mut seen = Recorded::by(&recorder);
    let mut held = || seen.value("lockkit_held{strategy=session,prefix=leader}");
    let session = SessionLock::new("leader:eu").acquire(&db.pool).await.unwrap();
    // A task has the connection, and so the lock.
    assert!(session.is_alive().await);
    assert_eq!(held(), 1);
    session.release().await.unwrap();
    assert_eq!(held(), 0);
}

/// Records every metric.
async fn use_all() {
    let often = Duration::from_millis(20);
    let leases = Leases::builder(MemoryStore::new()).renew_every(often).build().unwrap();
    let first = leases.lease("order:1").acquire().await.unwrap();
    assert!(leases.lease("order:1").wait(often).acquire().await.unwrap_err().is_contended());
    while leases.show("order:1").await.unwrap().unwrap().renewals == 0 {
        sleep(often).await;
    }
    let waiting = tokio::spawn(leases.lease("order:1").acquire());
    sleep(often).await;
    first.release().await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    leases.steal("order:1").await.unwrap();
    drop(second);

    let pool = SqlitePoolOptions::new().max_connections(1).acquire_timeout(2 * SECOND);
    let pool = pool.connect("sqlite::memory:").await.unwrap();
    let mut tx = lockkit::begin(&pool).await.unwrap();
    assert!(matches!(lockkit::begin(&pool).await, Err(Error::PoolStarved { .. })));
    sqlx::query("CREATE TABLE t_items (version INTEGER)").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    let retried = RetryPolicy::new().attempts(2).retry(|_| async {
        let stale = sqlx::query("UPDATE t_items SET version = 2 WHERE version = 1").execute(&pool).await;
        stale.expect("update").or_conflict()
    });
    assert!(retried.await.unwrap_err().is_conflict());
}

async fn emitted() -> BTreeMap<String, Metric> {
    let recorder = DebuggingRecorder::new();
    let mut seen = Recorded::by(&recorder);
    let _metrics = metrics::set_default_local_recorder(&recorder);
    use_all().await;
    seen.look();
    let starved = seen.values["lockkit_pool_starved_total{}"];
    assert_eq!(starved, 1, "once for each refused call");
    seen.metrics
}

/// The metrics and the labels that a query names, and the template of its legend or of its message.
fn named(query: &str) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let is_word = |it: char| it.is_ascii_alphanumeric() || it == '_';
    let is_name = |it: &&str| !it.is_empty() && it.chars().all(is_word);
    let metrics = query.split(|it| !is_word(it)).filter(|it| it.starts_with("lockkit_")).collect();
    // The lists of `sum by (prefix)`, `{prefix="order"}`, `{{prefix}}` and `{{ $labels.prefix }}`.
    let within = |begin: &'static str, end: char| query.split(begin).skip(1).filter_map(move |it| it.split(end).next());
    let grouped = within("by (", ')').flat_map(|it| it.split(", "));
    let selected = within("{", '}').flat_map(|it| it.split(", ")).filter_map(|it| it.split_once(['=', '!']));
    let template = within("{{", '}').map(|it| it.trim().trim_start_matches("$labels."));
    let variable = within("label_values(", ')').filter_map(|it| it.rsplit(", ").next());
    let labels = grouped.chain(selected.map(|it| it.0)).chain(template).chain(variable).filter(is_name).collect();
    (metrics, labels)
}

/// The names in a query that the code does not emit.
fn not_emitted(query: &str, emitted: &BTreeMap<String, Metric>) -> Vec<String> {
    let (metrics, labels) = named(query);
    let mut missing = Vec::new();
    for name in metrics {
        let is_part = |part: &str| {
            let of = name.strip_suffix(part).and_then(|it| emitted.get(it));
            of.filter(|it| it.kind == Kind::Histogram)
        };
        // A histogram has these three series, and none of its own name.
        let of_histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(is_part);
        let Some(metric) = of_histogram.or(emitted.get(name).filter(|it| it.kind != Kind::Histogram)) else {
            missing.push(name.to_owned());
            continue;
        };
        // Those of the target are added by Prometheus.
        let is_known = |it: &str| metric.labels.contains(it) || ["job", "instance"].contains(&it);
        let unknown = labels.iter().filter(|it| !(is_known(it) || **it == "le" && name.ends_with("_bucket")));
        missing.extend(unknown.map(|label| format!("{label} of {name}")));
    }
    missing
}

fn text(file: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository");
    fs::read_to_string(root.join(file)).unwrap_or_else(|err| panic!("read {file}: {err}"))
}

/// The queries of the dashboard, each with its legend.
fn queries_of_dashboard() -> Vec<String> {
    let dashboard: serde_json::Value = serde_json::from_str(&text("dashboards/lockkit.json")).expect("JSON");
    let list = |of: &serde_json::Value| of.as_array().cloned().unwrap_or_default();
    let string = |of: &serde_json::Value| of.as_str().unwrap_or_default().to_owned();
    let targets = list(&dashboard["panels"]).iter().flat_map(|it| list(&it["targets"])).collect::<Vec<_>>();
    let variables = list(&dashboard["templating"]["list"]);
    let of_targets = targets.iter().map(|it| format!("{} {}", string(&it["expr"]), string(&it["legendFormat"])));
    of_targets.chain(variables.iter().map(|it| string(&it["definition"]))).collect()
}

#[tokio::test]
async fn dashboard_alerts_and_documentation_name_what_the_code_emits() {
    let emitted = emitted().await;
    let names: BTreeSet<_> = emitted.keys().map(String::as_str).collect();
    let source = text("lockkit/src/observe.rs");
    let in_source = source.split('"').skip(1).step_by(2).filter(|it| it.starts_with("lockkit_"));
    assert_eq!(in_source.collect::<BTreeSet<_>>(), names, "`use_all` records every metric");
    let dashboard = queries_of_dashboard();
    let alerts = text("dashboards/alerts.yaml");
    let alerts: Vec<_> = alerts.split("- alert: ").skip(1).map(str::to_owned).collect();
    assert!(dashboard.len() > 20 && alerts.len() > 5, "{} {}", dashboard.len(), alerts.len());
    for query in dashboard.iter().chain(&alerts) {
        assert_eq!(not_emitted(query, &emitted), [""; 0], "{query}");
    }
    let is_shown = |it: &&&str| dashboard.iter().any(|query| query.contains(**it));
    assert_eq!(names.iter().filter(|it| !is_shown(it)).collect::<Vec<_>>(), [&""; 0], "no panel shows it");

    let mut documented = BTreeMap::new();
    let page = text("docs/operating.md");
    for row in page.lines().filter_map(|it| it.strip_prefix("| `lockkit_")) {
        let [name, described] = [0, 1].map(|it| row.split(" | ").nth(it).expect("a cell"));
        let (kind, labels) = described.split_once("; ").unwrap_or((described, ""));
        let kind = match kind {
            "counter" => Kind::Counter,
            "gauge" => Kind::Gauge,
            "histogram" => Kind::Histogram,
            other => panic!("`{other}` is no kind of metric"),
        };
        let labels = labels.split(", ").filter(|it| !it.is_empty()).map(|it| it.trim_matches('`').to_owned()).collect();
        documented.insert(format!("lockkit_{}", name.trim_end_matches('`')), Metric { kind, labels });
    }
    assert_eq!(documented, emitted);
    let of_crate = text("lockkit/src/lib.rs");
    assert_eq!(names.iter().filter(|it| !of_crate.contains(&format!("`{it}`"))).collect::<Vec<_>>(), [&""; 0]);
}

#[test]
fn the_check_sees_planted_names_that_are_not_emitted() {
    let metric = |kind, labels: &[&str]| Metric { kind, labels: labels.iter().map(|it| (*it).to_owned()).collect() };
    let emitted = BTreeMap::from([
        ("lockkit_lost_total".to_owned(), metric(Kind::Counter, &["strategy", "prefix"])),
        ("lockkit_wait_seconds".to_owned(), metric(Kind::Histogram, &["prefix"])),
    ]);
    let missing = |query: &str| not_emitted(query, &emitted);
    for good in [
        r#"sum by (prefix, job) (rate(lockkit_lost_total{strategy=~"$s", prefix!=""}[5m])) > 0 {{ $labels.prefix }}"#,
        "histogram_quantile(0.9, sum by (prefix, le) (rate(lockkit_wait_seconds_bucket[5m]))) {{prefix}} {{ $value }}",
        "label_values(lockkit_lost_total, prefix)",
    ] {
        assert_eq!(missing(good), [""; 0], "{good}");
    }
    for (bad, name) in [
        ("lockkit_loss_total > 0", "lockkit_loss_total"),
        ("rate(lockkit_wait_seconds[5m])", "lockkit_wait_seconds"),
        ("rate(lockkit_lost_total_count[5m])", "lockkit_lost_total_count"),
        ("sum by (key) (lockkit_lost_total)", "key of lockkit_lost_total"),
        ("sum by (prefix, le) (lockkit_lost_total)", "le of lockkit_lost_total"),
        ("lockkit_wait_seconds_count{strategy=\"lease\"}", "strategy of lockkit_wait_seconds_count"),
        ("lockkit_lost_total {{ $labels.kind }}", "kind of lockkit_lost_total"),
        ("lockkit_lost_total {{kind}}", "kind of lockkit_lost_total"),
        ("label_values(lockkit_lost_total, kind)", "kind of lockkit_lost_total"),
    ] {
        assert_eq!(missing(bad), [name], "{bad}");
    }
}
