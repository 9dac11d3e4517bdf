//! Commands whose lease is lost, or whose `lockkit` is. Each is a group of three: a shell that ends in some way when it
//! gets SIGTERM, a process that ends with it, and one that ignores it.

use std::{collections::BTreeMap, fs::read_to_string, future::Future, path::Path, sync::Arc, time::Duration};

use rustix::process::Signal;
use support::{Backend, Proxy, Server, TestDb, on_every_database};
use tempfile::{TempDir, tempdir};
use tokio::{join, process::Child, task::JoinSet, time::sleep};

use crate::{exit_code, lockkit, now, output, send, there_is, url};

/// How the shell ends at SIGTERM: what it does, and whether it can say that it got it.
pub(crate) const ENDINGS: [(&str, &str); 3] = [
    ("exit 0", "trap ': >FOLDER/term; exit 0' TERM"),
    ("exit 3", "trap ': >FOLDER/term; exit 3' TERM"),
    ("signal", "trap ': >FOLDER/term; trap - TERM; kill -TERM $$' TERM"),
];

/// How a lease is lost whose store answers.
const LOSSES: [&str; 3] = ["stolen", "killed", "stopped"];

/// Where leases are, as it is without `lockkit` and what is between the two.
pub(crate) trait Place: Send + Sync + 'static {
    /// Of the lease of each command.
    const TTL: Duration = Duration::from_secs(4);

    /// The options that name it.
    fn on(&self) -> Vec<String>;

    /// Until when nobody else can have this lease, in microseconds since 1970. Waits for that moment where only the
    /// store knows it. The lease is held, and not renewed any more.
    fn expiry(&self, key: &str) -> impl Future<Output = i128> + Send;
}

impl<S: Backend> Place for TestDb<S> {
    fn on(&self) -> Vec<String> {
        url(&self.url)
    }

    async fn expiry(&self, key: &str) -> i128 {
        let expires = format!("SELECT expires_us FROM lockkit_lease WHERE name = '{}'", key.replace('\'', "''"));
        self.fetch_i64(&expires).await.expect("it is held").into()
    }
}

/// How long each command was dead before its lease was another's, or alive after a theft, in microseconds. By how the
/// lease is lost, and how the command ends.
pub(crate) type Margins = BTreeMap<(&'static str, &'static str), i128>;

/// Commands whose leases are lost in each way, all at the same time. `place_of` names the place of each.
pub(crate) async fn lose_each<P: Place>(place_of: impl AsyncFn() -> Arc<P>) -> Margins {
    let mut cases = JoinSet::new();
    for ending in ENDINGS {
        for loss in LOSSES {
            let place = place_of().await;
            cases.spawn(async move {
                let on = place.on();
                let running = Running::start(&on, P::TTL, loss, ending).await;
                let margin = if loss == "stolen" {
                    running.stolen(&on).await
                } else {
                    running.signal_lockkit(if loss == "killed" { Signal::KILL } else { Signal::STOP });
                    let followed = running.is_followed_without_overlap(&on);
                    let (expiry, ()) = join!(place.expiry(&running.key), followed);
                    running.margin(expiry)
                };
                ((loss, ending.0), margin)
            });
        }
    }
    cases.join_all().await.into_iter().collect()
}

/// Commands that reach this place by these options, and it falls silent for longer than the ttl. `silence` returns what
/// keeps it silent.
pub(crate) async fn fall_silent<P: Place, T>(
    place: Arc<P>,
    on: &[String],
    silence: impl AsyncFnOnce() -> T,
) -> Margins {
    let mut running = Vec::new();
    for ending in ENDINGS {
        running.push(Running::start(on, P::TTL, "silence", ending).await);
    }
    let silent = silence().await;
    let mut cases = JoinSet::new();
    for mut running in running {
        let place = place.clone();
        cases.spawn(async move {
            let key = running.key.clone();
            let (expiry, ()) = join!(place.expiry(&key), running.is_ended_by_lockkit());
            (running.margin(expiry), running)
        });
    }
    let ended = cases.join_all().await;
    drop(silent);
    let mut margins = Margins::new();
    for (margin, running) in ended {
        running.is_followed_without_overlap(&place.on()).await;
        margins.insert(("silence", running.ending), margin);
    }
    margins
}

/// Shows them, for documents.
pub(crate) fn print(store: &str, margins: Margins) {
    for ((loss, ending), margin) in margins {
        let when = if loss == "stolen" { "after the theft" } else { "before the expiry" };
        println!("{store}, {loss}, {ending}: last sign of life {} ms {when}", margin / 1000);
    }
}

/// A command that runs under a lease.
pub(crate) struct Running {
    key: String,
    ending: &'static str,
    folder: TempDir,
    lockkit: Child,
}

impl Running {
    /// Starts it, and returns when all of it runs.
    pub(crate) async fn start(on: &[String], ttl: Duration, name: &str, (ending, trap): (&'static str, &str)) -> Self {
        let (folder, beat) = (tempdir().expect("a folder"), env!("CARGO_BIN_EXE_test-beat"));
        let path = folder.path().display().to_string();
        let trap = trap.replace("FOLDER", &path);
        let script = format!("(trap '' TERM; exec {beat} {path}/stubborn) & {trap}; {beat} {path}/other & wait");
        let key = format!("{name} '{ending}' \"<script>\"");
        let ttl = format!("{}s", ttl.as_secs());
        let run = ["run", &key, "--ttl", &ttl, "--grace", "1s", "--", "sh", "-c", &script];
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
    pub(crate) async fn is_ended_by_lockkit(&mut self) {
        assert_eq!((exit_code(&mut self.lockkit).await, self.was_asked_to_end()), (Some(79), true), "{}", self.key);
        let last = self.last_sign();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(self.last_sign(), last, "{}: alive after lockkit has ended", self.key);
    }

    /// Sends `lockkit` a signal that it cannot catch.
    pub(crate) fn signal_lockkit(&self, signal: Signal) {
        send(&self.lockkit, signal);
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
        // A process that is stopped while it writes to a SQLite file has the file to itself.
        let its_own = async || if S::NAME == "SQLite" { Arc::new(TestDb::<S>::new().await) } else { db.clone() };
        // The database that is silent is another one.
        let quiet = Arc::new(TestDb::<S>::new().await);
        let mut silent = match S::NAME {
            "SQLite" => Silent::<S>::Locked(quiet.connect().await),
            _ => Silent::Stalled(Proxy::start(&quiet.url)),
        };
        let on = match &silent {
            Silent::Stalled(proxy) => url(proxy.url()),
            Silent::Locked(_) => quiet.on(),
        };
        let silence = async || {
            match &mut silent {
                Silent::Stalled(proxy) => proxy.stall(true),
                Silent::Locked(conn) => drop(S::execute(conn, "BEGIN IMMEDIATE").await.expect("take the write lock")),
            }
            silent
        };
        let (mut margins, of_silence) = join!(lose_each(its_own), fall_silent(quiet, &on, silence));
        margins.extend(of_silence);
        print(S::NAME, margins);
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
