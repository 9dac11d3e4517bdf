//! The other libraries, and lockkit on other servers: what they lock on, and where the program is that drives each.

pub(crate) mod lockkit_redis;
pub(crate) mod sqlx_advisory;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use store_servers::redis::Redis;
use store_servers::zookeeper::ZooKeeper;

use crate::crew::Program;
use crate::rounds::Contender;
use crate::scenarios::Scenario;

/// Driven by this program itself.
pub(crate) const SQLX: &str = "sqlx PgAdvisoryLock";
pub(crate) const REDIS: &str = "lockkit-redis lease";

/// The language of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    Itself,
    Rust,
    Python,
    Ruby,
    Java,
}

/// Where a library locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Database,
    Redis,
    ZooKeeper,
}

/// A library, in the way that is measured.
#[derive(Debug, Clone, Copy)]
struct Peer {
    name: &'static str,
    driver: Driver,
    on: On,
    /// Locks a name, and so takes part in `uncontended`. The others lock or check the row itself.
    has_names: bool,
}

const PEERS: [Peer; 12] = [
    Peer { name: REDIS, driver: Driver::Itself, on: On::Redis, has_names: true },
    Peer { name: SQLX, driver: Driver::Itself, on: On::Database, has_names: true },
    Peer { name: "distributed-lock", driver: Driver::Rust, on: On::Database, has_names: true },
    Peer { name: "rslock", driver: Driver::Rust, on: On::Redis, has_names: true },
    Peer { name: "zookeeper-client", driver: Driver::Rust, on: On::ZooKeeper, has_names: true },
    Peer { name: "redis-py", driver: Driver::Python, on: On::Redis, has_names: true },
    Peer { name: "kazoo", driver: Driver::Python, on: On::ZooKeeper, has_names: true },
    Peer { name: "SQLAlchemy with_for_update", driver: Driver::Python, on: On::Database, has_names: false },
    Peer { name: "SQLAlchemy version_id_col", driver: Driver::Python, on: On::Database, has_names: false },
    Peer { name: "ActiveRecord with_lock", driver: Driver::Ruby, on: On::Database, has_names: false },
    Peer { name: "ActiveRecord lock_version", driver: Driver::Ruby, on: On::Database, has_names: false },
    Peer { name: "Curator", driver: Driver::Java, on: On::ZooKeeper, has_names: true },
];

/// The version of a peer, or why it is not there.
type Found = std::result::Result<String, String>;

/// The servers that peers lock on, and what is installed.
#[derive(Debug)]
pub(crate) struct Peers {
    folder: Option<PathBuf>,
    redis: Option<Redis>,
    zookeeper: Option<ZooKeeper>,
    found: BTreeMap<&'static str, Found>,
}

impl Peers {
    /// Looks for what `bench/peers/install` has put into the folder, and starts what they lock on.
    pub(crate) async fn start(folder: Option<&Path>) -> Result<Self> {
        let mut peers =
            Self { folder: folder.map(Path::to_owned), redis: None, zookeeper: None, found: BTreeMap::new() };
        for peer in PEERS {
            let found = peers.look(peer);
            peers.found.insert(peer.name, found);
        }
        let is_wanted = |on| PEERS.iter().any(|it| it.on == on && peers.found[it.name].is_ok());
        let (redis, zookeeper) = (is_wanted(On::Redis), is_wanted(On::ZooKeeper));
        if redis && is_installed("redis-server") {
            let redis = Redis::start();
            lockkit_redis::declare_new(&redis.url()).await?;
            peers.redis = Some(redis);
        }
        if zookeeper && is_installed("java") && Path::new("/usr/share/java/zookeeper.jar").exists() {
            peers.zookeeper = Some(ZooKeeper::alone());
        }
        Ok(peers)
    }

    /// Who takes part in a scenario, and in what way.
    pub(crate) fn contenders(&self, scenario: Scenario) -> Vec<Contender> {
        let takes_part = |peer: &&Peer| scenario != Scenario::Uncontended || peer.has_names;
        let contender = |peer: &Peer| {
            let mut contender = Contender::of_lockkit(peer.name);
            contender.program = match self.program(peer.driver) {
                Some(program) if peer.driver != Driver::Itself => Some(program),
                _ => None,
            };
            contender.missing = self.found[peer.name].as_ref().err().cloned();
            match peer.on {
                On::Database => {}
                On::Redis => match &self.redis {
                    Some(redis) => contender.redis = Some(redis.url()),
                    None => drop(contender.missing.get_or_insert_with(|| "not installed: redis-server".to_owned())),
                },
                On::ZooKeeper => match &self.zookeeper {
                    Some(zookeeper) => contender.zookeeper = Some(zookeeper.host()),
                    None => drop(contender.missing.get_or_insert_with(|| "not installed: zookeeper".to_owned())),
                },
            }
            contender
        };
        PEERS.iter().filter(takes_part).map(contender).collect()
    }

    /// Name and version of each that is there.
    pub(crate) fn versions(&self) -> Vec<String> {
        let version = |(name, found): (&&str, &Found)| match found {
            Ok(version) => format!("{name} ({version})"),
            Err(reason) => format!("{name} ({reason})"),
        };
        self.found.iter().map(version).collect()
    }

    /// The servers beside the database.
    pub(crate) fn servers(&self) -> Vec<String> {
        let redis = self.redis.as_ref().map(|_| output(Command::new("redis-server").arg("--version")));
        let redis = redis.map(|it| {
            let version = it.unwrap_or_default();
            let number = version.split_whitespace().find_map(|it| it.strip_prefix("v=")).unwrap_or_default().to_owned();
            format!("Redis {number}")
        });
        let zookeeper = self.zookeeper.as_ref().map(|_| "ZooKeeper of Debian, one node".to_owned());
        redis.into_iter().chain(zookeeper).collect()
    }

    /// Asks the driver for the version of the library.
    fn look(&self, peer: Peer) -> Found {
        if peer.driver == Driver::Itself {
            let version = if peer.name == REDIS { env!("CARGO_PKG_VERSION") } else { "sqlx 0.9" };
            return Ok(version.to_owned());
        }
        let missing = || "not installed".to_owned();
        let Program { command } = self.program(peer.driver).ok_or_else(missing)?;
        let mut asked = Command::new(&command[0]);
        asked.args(&command[1..]).arg("--version").arg(peer.name);
        output(&mut asked).map(|it| it.trim().to_owned()).ok_or_else(missing)
    }

    /// How a driver is started, if its folder is there.
    fn program(&self, driver: Driver) -> Option<Program> {
        let folder = self.folder.as_ref()?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let text = |path: PathBuf| path.to_str().map(ToOwned::to_owned);
        let command = match driver {
            Driver::Itself => Vec::new(),
            Driver::Rust => vec![text(folder.join("rust/bin/peers-driver"))?],
            Driver::Python => vec![text(folder.join("python/bin/python"))?, text(source.join("python/driver.py"))?],
            Driver::Ruby => vec!["ruby".to_owned(), text(source.join("ruby/driver.rb"))?],
            Driver::Java => {
                vec!["java".to_owned(), "-cp".to_owned(), class_path(&text(folder.join("java"))?), "Driver".to_owned()]
            }
        };
        Some(Program { command })
    }
}

/// With one logger, which says nothing.
fn class_path(folder: &str) -> String {
    let names = [
        "curator-client",
        "curator-framework",
        "curator-recipes",
        "zookeeper",
        "zookeeper-jute",
        "guava",
        "slf4j-api",
        "slf4j-nop",
        "postgresql",
    ];
    names.iter().fold(folder.to_owned(), |path, name| path + ":/usr/share/java/" + name + ".jar")
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(["/usr/sbin".into()]).any(|it| it.join(program).is_file())
}
