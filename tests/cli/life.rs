//! Commands whose lease is lost, or whose `lockkit` is. Each is a group of three: a shell that ends in some way when it
//! gets SIGTERM, a process that ends with it, and one that ignores it.

use std::{collections::BTreeMap, fs::read_to_string, path::Path, sync::Arc, time::Duration};

use rustix::process::Signal;
use support::{Backend, Proxy, Server, TestDb, on_every_database};
use tempfile::{TempDir, tempdir};
use tokio::{process::Child, task::JoinSet, time::sleep};

use crate::{exit_code, lockkit, now, output, send, there_is, url};

/// How the shell ends at SIGTERM: what it does, and whether it can say that it got it.
const ENDINGS: [(&str, &str); 3] = [
    ("exit 0", "trap ': >FOLDER/term; exit 0' TERM"),
    ("exit 3", "trap ': >FOLDER/term; exit 3' TERM"),
    ("signal", "trap ': >FOLDER/term; trap - TERM; kill -TERM $$' TERM"),
];

/// A command that runs under a lease.
pub(crate) struct Running {
    key: String,
    ending: &'static str,
    folder: TempDir,
    lockkit: Child,
}

impl Running {
    /// Starts it, and returns when all of it runs.
    pub(crate) async fn start(on: &[String], name: &str, (ending, trap): (&'static str, &str)) -> Self {
        let (folder, beat) = (tempdir().expect("a folder"), env!("CARGO_BIN_EXE_test-beat"));
        let path = folder.path().display().to_string();
        let trap = trap.replace("FOLDER", &path);
        let script = format!("(trap '' TERM; exec {beat} {path}/stubborn) & {trap}; {beat} {path}/other & wait");
        let key = format!("{name} '{ending}' \"<script>\"");
        let run = ["run", &key, "--ttl", "4s", "--grace", "1s", "--", "sh", "-c", &script];
        let lockkit = lockkit(on, &run).spawn().expect("start lockkit");
        for name in ["stubborn", "other"] {
            let life = folder.path().join(name);
            there_is(&life).await;
            // It writes a moment after it has made the file.
            while read_to_string(&life).expect("read").is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        }
        Self { key, ending, folder, lockkit }
    }

    /// The last sign of life of any of it.
    fn last_sign(&self) -> i128 {
        ["stubborn", "other"]
            .map(|it| last_beat(&self.folder.path().join(it)))
            .into_iter()
            .max()
            .expect("there are two")
    }

    /// Whether it got SIGTERM, and not only SIGKILL.
    fn was_asked_to_end(&self) -> bool {
        self.folder.path().join("term").exists()
    }

    /// Waits for the lease, and asserts that nothing of this command was alive when the next one began.
    pub(crate) async fn is_followed_without_overlap(&self, on: &[String]) {
        let next = ["run", &self.key, "--wait", "60s", "--", "date", "+%s%6N"];
        let next = output(lockkit(on, &next)).await;
        assert!(next.status.success(), "{}: {next:?}", self.key);
        let began: i128 = String::from_utf8_lossy(&next.stdout).trim().parse().expect("a number");
        let last = self.last_sign();
        assert!(last < began, "{}: alive {} µs after the next one began", self.key, last - began);
    }

    /// Takes the lease away. Returns how long after that the last sign of life was.
    pub(crate) async fn stolen(mut self, on: &[String]) -> i128 {
        let shown = output(lockkit(on, &["show", &self.key, "--json"])).await;
        let lease: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        let stolen = ["steal", &self.key, "--yes", "--fence", &lease["fence"].to_string()];
        let stolen = output(lockkit(on, &stolen)).await;
        assert!(stolen.status.success(), "{stolen:?}");
        let theft = now();
        self.is_ended_by_lockkit().await;
        self.last_sign() - theft
    }

    /// `lockkit` ends it because the lease is lost.
    async fn is_ended_by_lockkit(&mut self) {
        assert_eq!((exit_code(&mut self.lockkit).await, self.was_asked_to_end()), (Some(79), true), "{}", self.key);
        let last = self.last_sign();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(self.last_sign(), last, "{}: alive after lockkit has ended", self.key);
    }

    /// Sends `lockkit` a signal that it cannot catch.
    pub(crate) fn signal_lockkit(&self, signal: Signal) {
        send(&self.lockkit, signal);
    }

    /// When the lease expires, in microseconds since 1970.
    async fn expiry<S: Backend>(&self, db: &TestDb<S>) -> i128 {
        let expires = format!("SELECT expires_us FROM lockkit_lease WHERE name = '{}'", self.key.replace('\'', "''"));
        db.fetch_i64(&expires).await.expect("it is held").into()
    }

    /// How long before this the last sign of life was.
    fn margin(&self, expiry: i128) -> i128 {
        let margin = expiry - self.last_sign();
        assert!(margin > 0, "{}: alive {} µs after the lease has expired", self.key, -margin);
        margin
    }
}

/// The last sign of life of a process.
fn last_beat(path: &Path) -> i128 {
    let beat = read_to_string(path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    beat.trim().parse().expect("a number")
}

/// A database that does not answer those who have their leases in it.
enum Silent<S: Backend> {
    Stalled(Proxy),
    Locked(<S::DB as sqlx::Database>::Connection),
}

on_every_database! {
    async fn a_command_ends_before_another_process_can_have_its_lease<S>(db: TestDb<S>) {
        let db = Arc::new(db);
        let mut cases = JoinSet::new();
        for ending in ENDINGS {
            for loss in ["stolen", "killed", "stopped"] {
                // A process that is stopped while it writes to a SQLite file has the file to itself.
                let db = if S::NAME == "SQLite" { Arc::new(TestDb::<S>::new().await) } else { db.clone() };
                cases.spawn(async move {
                    let on = url(&db.url);
                    let running = Running::start(&on, loss, ending).await;
                    let margin = if loss == "stolen" {
                        running.stolen(&on).await
                    } else {
                        running.signal_lockkit(if loss == "killed" { Signal::KILL } else { Signal::STOP });
                        let expiry = running.expiry(&db).await;
                        running.is_followed_without_overlap(&on).await;
                        running.margin(expiry)
                    };
                    ((loss, ending.0), margin)
                });
            }
        }
        // The same, while a database of its own is silent for longer than the ttl.
        let quiet = TestDb::<S>::new().await;
        let mut silent = match S::NAME {
            "SQLite" => Silent::<S>::Locked(quiet.connect().await),
            _ => Silent::Stalled(Proxy::start(&quiet.url)),
        };
        let on = match &silent {
            Silent::Stalled(proxy) => url(proxy.url()),
            Silent::Locked(_) => url(&quiet.url),
        };
        let mut running = Vec::new();
        for ending in ENDINGS {
            running.push(Running::start(&on, "silence", ending).await);
        }
        match &mut silent {
            Silent::Stalled(proxy) => proxy.stall(true),
            Silent::Locked(conn) => drop(S::execute(conn, "BEGIN IMMEDIATE").await.expect("take the write lock")),
        }
        let mut margins: BTreeMap<_, _> = BTreeMap::new();
        for running in &mut running {
            let expiry = running.expiry(&quiet).await;
            running.is_ended_by_lockkit().await;
            margins.insert(("silence", running.ending), running.margin(expiry));
        }
        drop(silent);
        for running in running {
            running.is_followed_without_overlap(&url(&quiet.url)).await;
        }
        margins.extend(cases.join_all().await);
        for ((loss, ending), margin) in margins {
            let when = if loss == "stolen" { "after the theft" } else { "before the expiry" };
            println!("{}, {loss}, {ending}: last sign of life {} ms {when}", S::NAME, margin / 1000);
        }
    }

    async fn the_guard_makes_a_transaction_fail_when_the_lease_has_passed_on<S>(db: TestDb<S>) {
        let (on, script) = (url(&db.url), r#"printf %s "$LOCKKIT_GUARD""#);
        let run = || async { output(lockkit(&on, &["run", "nightly", "--", "sh", "-c", script])).await.stdout };
        let [first, second] = [run().await, run().await].map(|it| String::from_utf8(it).expect("UTF-8"));
        db.execute(&first).await;
        db.execute(&second).await;
        let stale = sqlx::raw_sql(sqlx::AssertSqlSafe(first)).execute(&db.pool).await;
        assert!(stale.is_err(), "the first one is stale");
        db.execute(&second).await;
    }
}
