//! The exhibits, and some with a planted mistake, where a reader may run them: on the toy and SQLite, and on servers.

use std::{
    env,
    fs::{File, Permissions},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    process::{Child, Command},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use store_servers::{folder_for_data, redis::Redis};
use support::{
    MySql, Server as _,
    throwaway::{Launch, free_ports, prepare},
};
use tempfile::TempDir;
use tokio::runtime::Builder;

use crate::{
    exhibit::{Exhibit, Shows},
    exhibits, text,
    text::Style,
    world::{Kind, Servers},
};

#[test]
fn an_exhibit_fails_when_its_recipe_is_cured_or_its_cure_is_broken() {
    let servers = Servers::default();
    for exhibit in exhibits::all() {
        let cured = Exhibit { broken: exhibit.cured, ..exhibit.clone() }.shows(&servers).expect_err(exhibit.slug);
        assert_eq!(cured.to_string(), "the recipe does not break any more");
        let broken = Exhibit { cured: exhibit.broken, ..exhibit }.shows(&servers).expect_err(exhibit.slug);
        assert!(broken.to_string().starts_with("lockkit broke: "), "{broken}");
    }
    planted_mistakes_are_seen(&servers);
}

#[test]
fn on_postgres_all_break_but_the_scan_that_locks_only_what_it_finds() {
    let server = Throwaway::start("postgres", "LOCKKIT_POSTGRES_URL");
    let servers = find(Some(&server.url), None);
    assert_eq!(servers.kind(), Kind::Postgres);
    check(&servers, &["03-full-scan"]);
}

#[test]
fn on_mariadb_all_break() {
    let server = Throwaway::start("mariadb", "LOCKKIT_MARIADB_URL");
    let servers = find(Some(&server.url), None);
    assert_eq!(servers.kind(), Kind::MariaDb);
    check(&servers, &[]);
}

#[test]
fn on_mysql_all_break() {
    if let Some(reason) = MySql::left_out() {
        println!("!!! MySQL IS NOT TESTED: {reason}");
        return;
    }
    let server = Throwaway::start("mysql", "LOCKKIT_MYSQL_URL");
    let servers = find(Some(&server.url), None);
    assert_eq!(servers.kind(), Kind::MySql);
    check(&servers, &[]);
}

#[test]
fn on_a_redis_server_each_run_is_step_by_step_that_on_the_toy() {
    let server = Redis::start();
    let servers = find(None, Some(&server.url()));
    check(&servers, &[]);
    for exhibit in exhibits::all() {
        let show = |servers| exhibit.shows(servers).unwrap_or_else(|err| panic!("{}: {err:#}", exhibit.slug));
        let (there, here) = (show(&servers), show(&Servers::default()));
        let runs = |it: &Shows| [&it.broken, &it.cured].map(|it| text::timeline(it, Style::Plain));
        assert_eq!(runs(&there), runs(&here), "{}", exhibit.slug);
        let is_told = text::exhibit(1, &exhibit, &there, &servers, Style::Plain).contains("runs on the toy only");
        assert_eq!(is_told, exhibit.slug == "10-fail-over", "{}", exhibit.slug);
    }
    find(None, Some(&server.url())); // Which refuses a database that is not empty.
    redis::cmd("SET").arg("mine").arg(1).exec(&mut connection(&server.url())).expect("Redis answers");
    let refused = runtime().block_on(Servers::find(None, Some(&server.url()))).expect_err("the key is the reader's");
    assert!(format!("{refused:#}").contains("is not empty"), "{refused:#}");
}

fn connection(url: &str) -> redis::Connection {
    redis::Client::open(url).and_then(|it| it.get_connection()).expect("connect to Redis")
}

/// All exhibits show what they should, and the recipe holds in these alone.
fn check(servers: &Servers, holds: &[&str]) {
    let mut held = Vec::new();
    for exhibit in exhibits::all() {
        let shows = exhibit.shows(servers).unwrap_or_else(|err| panic!("{}: {err:#}", exhibit.slug));
        let is_told = text::exhibit(1, &exhibit, &shows, servers, Style::Plain).contains("does NOT break");
        assert_eq!(shows.broken.breach().is_none(), is_told, "{}", exhibit.slug);
        held.extend(is_told.then_some(exhibit.slug));
    }
    assert_eq!(held, holds);
    planted_mistakes_are_seen(servers);
}

fn planted_mistakes_are_seen(servers: &Servers) {
    for (exhibit, says) in exhibits::planted() {
        let err = exhibit.shows(servers).expect_err(exhibit.slug);
        assert_eq!(err.root_cause().to_string(), says, "{}", exhibit.slug);
    }
}

/// A server that listens may take a moment more until it answers.
fn find(database: Option<&str>, redis: Option<&str>) -> Servers {
    let until = Instant::now() + Duration::from_mins(1);
    loop {
        match runtime().block_on(Servers::find(database, redis)) {
            Err(err) if Instant::now() > until => panic!("{err:#}"),
            Err(_) => thread::sleep(Duration::from_millis(50)),
            Ok(servers) => return servers,
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A server for one test, or the one that the environment names. It ends with the thread that started it.
struct Throwaway {
    url: String,
    process: Option<(Child, &'static str, TempDir)>,
}

/// Held by the test that starts a server.
static STARTING: Mutex<()> = Mutex::new(());

impl Throwaway {
    fn start(name: &str, variable: &str) -> Self {
        if let Ok(url) = env::var(variable) {
            return Self { url, process: None };
        }
        let folder = tempfile::Builder::new()
            .prefix("lockkit-museum-")
            .permissions(Permissions::from_mode(0o755)) // As root, PostgreSQL runs as another user.
            .tempdir_in(folder_for_data())
            .expect("make a folder");
        // A port is free for others until the server listens.
        let _alone = STARTING.lock();
        let port = free_ports(1).expect("a free port");
        let Launch { commands, url, stop } = prepare(name, folder.path(), port).expect("set the server up");
        let log = File::create(folder.path().join("log")).expect("make a log");
        let mut command = commands.into_iter().next().expect("a server has a program");
        let mut child = command.stdout(log.try_clone().expect("a file")).stderr(log).spawn().expect("start the server");
        let until = Instant::now() + Duration::from_mins(1);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(child.try_wait().expect("ask for the server").is_none(), "{name} has ended");
            assert!(Instant::now() < until, "{name} does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        Self { url, process: Some((child, stop, folder)) }
    }
}

impl Drop for Throwaway {
    fn drop(&mut self) {
        let Some((child, stop, _folder)) = &mut self.process else { return };
        // The standard library only knows SIGKILL, after which PostgreSQL would leave a shared memory segment behind.
        let _ = Command::new("sh").args(["-c", "kill -s $0 $1", stop, &child.id().to_string()]).status();
        let _ = child.wait();
    }
}
