//! Clusters of the rack's own whose leader changes: each member on a node of its own of a private network, so that it
//! can be killed, stopped, cut off from the others, and started again.

mod group;
mod members;
mod net;
mod patroni;
mod router;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use lockkit_store_servers::folder_for_data;
use rustix::process::{Pid, Signal, getuid, kill_process};
use sqlx::{Connection as _, MySqlConnection};
use support::{Cluster as _, Group, MySql, Server as _, throwaway};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use self::members::Members;
use self::net::Net;
use self::router::Router;
use crate::server::pid;

/// How many members a cluster has.
const MEMBERS: u8 = 3;
/// How long a cluster may take to start, to choose another leader, or to take a member back.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a member of a group may say nothing until an operator starts it again. One that was cut off keeps the
/// sessions of all COMMITs that have no majority, up to its limit of connections, so that nobody can tell it to rejoin.
const SILENCE: Duration = Duration::from_secs(20);

/// What replicates, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// `PostgreSQL` under Patroni, asynchronous.
    Patroni,
    /// `PostgreSQL` under Patroni with `synchronous_mode`.
    PatroniSync,
    /// Group replication of `MySQL` with one primary.
    Group,
    /// Group replication of `MySQL` in which each member is a primary.
    GroupMulti,
}

pub(crate) struct Cluster {
    pub(crate) engine: Engine,
    /// Where its clients are led by, if one member leads: one for each half of them.
    routers: Vec<Router>,
    members: Rc<Members>,
    nodes: Vec<Node>,
    net: Net,
    folder: TempDir,
}

/// The processes of one member, or of what the members meet in.
struct Node {
    folder: PathBuf,
    command: Command,
    child: Child,
}

impl Engine {
    pub(crate) fn of(code: &str) -> Option<Self> {
        Self::from_str(code, false).ok()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Patroni => "Patroni",
            Self::PatroniSync => "Patroni synchronous",
            Self::Group => "group replication",
            Self::GroupMulti => "group replication multi-primary",
        }
    }

    pub(crate) fn is_patroni(self) -> bool {
        matches!(self, Self::Patroni | Self::PatroniSync)
    }

    /// Whether a new leader may lack what the old one acknowledged.
    pub(crate) fn forgets(self) -> bool {
        self == Self::Patroni
    }

    pub(crate) fn has_several_primaries(self) -> bool {
        self == Self::GroupMulti
    }

    /// Why it cannot run here.
    pub(crate) fn left_out(self) -> Option<String> {
        if !getuid().is_root() {
            return Some("network namespaces need root".into());
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = || std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
        let needed: &[(&str, &str)] = match self {
            Self::Patroni | Self::PatroniSync => {
                &[("ip", "iproute2"), ("patroni", "patroni python3-etcd"), ("etcd", "etcd-server")]
            }
            Self::Group | Self::GroupMulti => &[("ip", "iproute2")],
        };
        let missing: Vec<_> = needed
            .iter()
            .filter(|(program, _)| !folders().any(|it| it.join(program).is_file()))
            .map(|(_, package)| *package)
            .collect();
        (!missing.is_empty())
            .then(|| format!("not installed: apt-get install --no-install-recommends {}", missing.join(" ")))
    }
}

impl Cluster {
    /// Sets a cluster up and waits until all members take part.
    ///
    /// The thread that calls this must live as long as the cluster, which dies with it.
    pub(crate) async fn start(engine: Engine) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("lockkit-torture-cluster-")
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in(folder_for_data())?;
        let net = Net::of(MEMBERS + u8::from(engine.is_patroni())).await?;
        let members = Members { engine, addresses: (0..MEMBERS).map(|it| net.for_clients(it)).collect() };
        let mut cluster =
            Self { engine, routers: Vec::new(), members: Rc::new(members), nodes: Vec::new(), net, folder };
        if engine.is_patroni() {
            cluster.start_patroni()?;
        } else {
            cluster.start_group().await?;
        }
        cluster.complete().await?;
        Ok(cluster)
    }

    fn start_patroni(&mut self) -> Result<()> {
        let bin = postgres_programs()?;
        // The members look for it from their first moment on.
        let folder = self.folder_of("etcd")?;
        let etcd = patroni::etcd(&self.net, MEMBERS, &folder);
        let etcd = Node::start(etcd, folder)?;
        for member in 0..MEMBERS {
            let folder = self.folder_of(&format!("member{member}"))?;
            ensure!(Command::new("chown").arg("postgres").arg(&folder).status()?.success(), "no user postgres");
            let synchronous = self.engine == Engine::PatroniSync;
            let command = patroni::member(&self.net, member, MEMBERS, synchronous, &bin, &folder)?;
            self.nodes.push(Node::start(command, folder)?);
        }
        self.nodes.push(etcd);
        Ok(())
    }

    async fn start_group(&mut self) -> Result<()> {
        for member in 0..MEMBERS {
            let folder = self.folder_of(&format!("member{member}"))?;
            let path = folder.clone();
            let launch = tokio::task::spawn_blocking(move || throwaway::prepare("mysql", &path, 0)).await??;
            throwaway::forget_its_number(&folder)?;
            let server = launch.commands.first().context("a server has a program")?;
            let one_primary = !self.engine.has_several_primaries();
            let command = group::member(&self.net, member, MEMBERS, one_primary, server);
            self.nodes.push(Node::start(command, folder)?);
        }
        for node in &mut self.nodes {
            let deadline = Instant::now() + PATIENCE;
            while let Err(err) = group::prepare(&node.folder).await {
                if node.child.try_wait()?.is_some() || Instant::now() > deadline {
                    return Err(err.context(node.end_of_log()));
                }
                sleep(Duration::from_millis(100)).await;
            }
            node.command.arg(group::READ_ONLY);
        }
        group::found(&self.nodes[0].folder).await
    }

    fn folder_of(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder)?;
        Ok(folder)
    }

    /// Leads clients to a database, and returns the URLs for them. Must be called within a `LocalSet`.
    pub(crate) async fn open(&mut self, database: &str, ttl: Duration) -> Result<Vec<String>> {
        if self.engine.has_several_primaries() {
            return Ok(self.members.all().into_iter().map(|it| self.members.url(it, database)).collect());
        }
        let leader = self.leader().await?;
        self.routers.clear();
        for _ in 0..2 {
            self.routers.push(Router::start(&self.members, leader, database, ttl * 3).await?);
        }
        Ok(self.routers.iter().map(|it| it.url().to_owned()).collect())
    }

    /// Leads nobody any more.
    pub(crate) fn close(&mut self) {
        self.routers.clear();
    }

    /// The administrator's URL of a database by way of the leader.
    pub(crate) async fn url(&self, database: &str) -> Result<String> {
        Ok(self.members.url(self.leader().await?, database))
    }

    /// The member that leads, as soon as one does.
    pub(crate) async fn leader(&self) -> Result<u8> {
        self.leader_among(&self.members.all()).await
    }

    /// Another member that leads, as soon as one does; one of several primaries, as soon as it counts this one out.
    pub(crate) async fn successor(&self, member: u8) -> Result<u8> {
        let others = self.members.others(member);
        let deadline = Instant::now() + PATIENCE;
        while self.engine.has_several_primaries() && !self.members.has_lost_one(others[0]).await {
            ensure!(Instant::now() < deadline, "member {member} is not missed after {PATIENCE:?}");
            sleep(Duration::from_millis(100)).await;
        }
        self.leader_among(&others).await
    }

    async fn leader_among(&self, members: &[u8]) -> Result<u8> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(leader) = self.members.leader_among(members).await {
                return Ok(leader);
            }
            ensure!(Instant::now() < deadline, "no leader after {PATIENCE:?}\n{}", self.ends_of_logs());
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Asks for another leader, as an operator does.
    pub(crate) async fn switch_over(&self, leader: u8) -> Result<()> {
        if self.engine.is_patroni() {
            let request = format!("POST /switchover\n{{\"leader\": \"member{leader}\"}}");
            // It answers when it is done; what came of it is seen by whoever leads.
            let _ = self.members.patroni(leader, &request).await;
            return Ok(());
        }
        let next = self.members.others(leader)[0];
        let mut conn = MySqlConnection::connect(&self.members.url(next, "")).await?;
        MySql::execute(&mut conn, "SELECT group_replication_set_as_primary(@@server_uuid)").await?;
        conn.close().await?;
        Ok(())
    }

    /// Kills all processes of a member at once, as a power cut does.
    pub(crate) fn kill(&mut self, member: u8) -> Result<()> {
        self.node(member).kill()
    }

    /// Starts a member again after a kill.
    pub(crate) fn start_again(&mut self, member: u8) -> Result<()> {
        let is_patroni = self.engine.is_patroni();
        let node = self.node(member);
        if is_patroni {
            patroni::forget_the_old_server(&node.folder);
        }
        node.child = node.command.spawn()?;
        Ok(())
    }

    /// Stops all processes of a member.
    pub(crate) fn freeze(&mut self, member: u8) {
        self.node(member).signal(Signal::STOP);
        self.divide_clients(member);
    }

    pub(crate) fn thaw(&mut self, member: u8) {
        self.node(member).signal(Signal::CONT);
    }

    /// Cuts a member off from the others.
    pub(crate) async fn cut(&self, member: u8) -> Result<()> {
        self.divide_clients(member);
        self.net.cut(member).await
    }

    pub(crate) async fn heal(&self, member: u8) -> Result<()> {
        self.net.heal(member).await
    }

    /// Half of the clients reach this member alone, and the others do not reach it.
    fn divide_clients(&self, member: u8) {
        if let [near, far] = &*self.routers {
            near.see(&[member]);
            far.see(&self.members.others(member));
        }
    }

    /// All clients reach all members again.
    pub(crate) fn unite_clients(&self) {
        for router in &self.routers {
            router.see(&self.members.all());
        }
    }

    /// Waits until all members take part, and helps them as an operator does. Returns those that it started again.
    pub(crate) async fn complete(&mut self) -> Result<Vec<u8>> {
        let deadline = Instant::now() + PATIENCE;
        let (mut silent_since, mut restarted) = (BTreeMap::new(), Vec::new());
        loop {
            let is_complete = if self.engine.is_patroni() {
                self.members.are_replicas().await
            } else {
                self.all_join(&mut silent_since).await
            };
            if is_complete {
                return Ok(restarted);
            }
            ensure!(Instant::now() < deadline, "a member is missing after {PATIENCE:?}\n{}", self.ends_of_logs());
            // The group goes on without one member, and not without two.
            if silent_since.len() == 1
                && let Some(silent) = silent_since.first_entry()
                && silent.get().elapsed() >= SILENCE
            {
                let (member, _) = silent.remove_entry();
                self.kill(member)?;
                self.start_again(member)?;
                restarted.push(member);
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Lets the members of a group take part. Returns whether all do. Each is asked: one that was expelled may not know
    /// it yet. Notes since when a member has said nothing.
    async fn all_join(&self, silent_since: &mut BTreeMap<u8, Instant>) -> bool {
        let mut all_joined = true;
        for (member, node) in self.members.all().into_iter().zip(&self.nodes) {
            let asked = Instant::now();
            let joins = timeout(SILENCE, group::join(&node.folder, self.engine.has_several_primaries())).await;
            if let Ok(Ok(online)) = joins {
                silent_since.remove(&member);
                all_joined &= online == i64::from(MEMBERS);
            } else {
                silent_since.entry(member).or_insert(asked);
                all_joined = false;
            }
        }
        all_joined
    }

    /// Waits until each primary of several has what the others have committed, so that no read misses it.
    pub(crate) async fn catch_up(&self) -> Result<()> {
        if self.engine.has_several_primaries() {
            for member in self.members.all() {
                Group::caught_up(&self.members.url(member, "")).await?;
            }
        }
        Ok(())
    }

    fn ends_of_logs(&self) -> String {
        self.nodes.iter().map(Node::end_of_log).collect::<Vec<_>>().join("\n")
    }

    fn node(&mut self, member: u8) -> &mut Node {
        &mut self.nodes[usize::from(member)]
    }
}

impl Node {
    fn start(mut command: Command, folder: PathBuf) -> Result<Self> {
        let log = File::create_new(folder.join("log"))?;
        let child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        Ok(Self { folder, command, child })
    }

    fn kill(&mut self) -> Result<()> {
        // The kernel kills the others of the namespace with its first process, which dies with this one.
        self.signal(Signal::KILL);
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends a signal to all processes, the oldest first.
    fn signal(&self, signal: Signal) {
        let mut found: Vec<Pid> = pid(&self.child).into_iter().collect();
        let mut next = 0;
        while let Some(parent) = found.get(next).copied() {
            if next > 0 {
                // Gone by itself.
                let _ = kill_process(parent, signal);
            }
            let threads = fs::read_dir(format!("/proc/{}/task", parent.as_raw_nonzero())).into_iter().flatten();
            for thread in threads.flatten() {
                let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                found.extend(children.split_whitespace().filter_map(|it| Pid::from_raw(it.parse().ok()?)));
            }
            next += 1;
        }
    }

    fn end_of_log(&self) -> String {
        let text = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        format!("{}: {}", self.folder.display(), lines[lines.len().saturating_sub(4)..].join("\n"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The folder of the newest `PostgreSQL` that Debian has installed.
fn postgres_programs() -> Result<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").context("postgresql is not installed")?;
    let folders = versions.flatten().map(|it| it.path().join("bin"));
    folders.filter(|it| it.join("postgres").is_file()).max().context("postgresql is not installed")
}
