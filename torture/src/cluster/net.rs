//! A network of the rack's own, in which a node can be cut off from the others while its clients still reach it.
//!
//! Each node is a network namespace with two interfaces: one to the clients, which are in the machine's own network,
//! and one to the other nodes. Each leads to a bridge in one more namespace, the switch. A namespace ends with the
//! processes in it, and those die with the rack, so nothing is left behind.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::time::sleep;

/// The bridge that connects the nodes, in the switch.
const NODES: &str = "nodes";
/// The bridge that connects the clients with the nodes, in the switch.
const CLIENTS: &str = "clients";

/// A few nodes and the machine.
pub(crate) struct Net {
    switch: Namespace,
    nodes: Vec<Namespace>,
    /// The third number of the clients' addresses.
    subnet: u8,
}

/// A network namespace, kept by a process that sleeps.
struct Namespace(Child);

impl Net {
    /// A network of this many nodes.
    pub(crate) async fn of(count: u8) -> Result<Self> {
        let switch = Namespace::new().await?;
        for bridge in [CLIENTS, NODES] {
            switch.ip(&format!("link add {bridge} type bridge")).await?;
            switch.ip(&format!("link set {bridge} up")).await?;
        }
        let subnet = uplink(&switch).await?;
        let mut net = Self { switch, nodes: Vec::new(), subnet };
        for node in 0..count {
            let namespace = Namespace::new().await?;
            namespace.ip("link set lo up").await?;
            let addresses = [(CLIENTS, net.for_clients(node)), (NODES, address(node))];
            for (bridge, address) in addresses {
                let (port, pid) = (port(bridge, node), namespace.0.id());
                net.switch.ip(&format!("link add {port} type veth peer name {bridge} netns {pid}")).await?;
                net.switch.ip(&format!("link set {port} master {bridge} up")).await?;
                namespace.ip(&format!("addr add {address}/24 dev {bridge}")).await?;
                namespace.ip(&format!("link set {bridge} up")).await?;
            }
            net.nodes.push(namespace);
        }
        Ok(net)
    }

    /// The node's address for clients.
    pub(crate) fn for_clients(&self, node: u8) -> IpAddr {
        Ipv4Addr::new(198, 18, self.subnet, node + 1).into()
    }

    /// The beginning of a command on a node: its processes see only each other, and all of them die with the rack.
    /// Whatever changes the user forgets the signal for that, and has to ask for it again.
    pub(crate) fn command(&self, node: u8) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "nsenter", &self.nodes[usize::from(node)].option()]);
        command.args(["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--"]);
        command.args(["setpriv", "--pdeathsig", "KILL"]);
        command.stdin(Stdio::null());
        command
    }

    /// Lets no packet between this node and the others pass. Nobody is told.
    pub(crate) async fn cut(&self, node: u8) -> Result<()> {
        // An interface that is down would be seen by its other end.
        self.switch.ip(&format!("link set {} nomaster", port(NODES, node))).await
    }

    pub(crate) async fn heal(&self, node: u8) -> Result<()> {
        self.switch.ip(&format!("link set {} master {NODES}", port(NODES, node))).await
    }
}

/// The node's address for the other nodes.
pub(crate) fn address(node: u8) -> IpAddr {
    Ipv4Addr::new(198, 19, 0, node + 1).into()
}

/// The end, in the switch, of a node's interface.
fn port(bridge: &str, node: u8) -> String {
    format!("{bridge}{node}")
}

/// Connects the switch with the machine, and says by which subnet.
async fn uplink(switch: &Namespace) -> Result<u8> {
    static NEXT: AtomicU8 = AtomicU8::new(0);

    let first = u8::try_from(std::process::id() % 256)?;
    for _ in 0..=u8::MAX {
        let subnet = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let (link, pid) = (format!("lockkit{subnet}"), switch.0.id());
        // Another rack may have it.
        if ip(&["ip"], &format!("link add {link} type veth peer name uplink netns {pid}")).await.is_err() {
            continue;
        }
        switch.ip(&format!("link set uplink master {CLIENTS} up")).await?;
        ip(&["ip"], &format!("addr add 198.18.{subnet}.254/24 dev {link}")).await?;
        ip(&["ip"], &format!("link set {link} up")).await?;
        return Ok(subnet);
    }
    bail!("no network interface can be made: this needs root")
}

impl Namespace {
    async fn new() -> Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "unshare", "--net", "sleep", "infinity"]);
        let mut namespace = Self(command.stdin(Stdio::null()).spawn()?);
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net"));
        let (ours, pid) = (of("self")?, namespace.0.id().to_string());
        // It begins in ours.
        while of(&pid).is_ok_and(|it| it == ours) {
            ensure!(namespace.0.try_wait()?.is_none(), "no network namespace can be made: this needs root");
            sleep(Duration::from_millis(5)).await;
        }
        Ok(namespace)
    }

    fn option(&self) -> String {
        format!("--net=/proc/{}/ns/net", self.0.id())
    }

    async fn ip(&self, arguments: &str) -> Result<()> {
        ip(&["nsenter", &self.option(), "ip"], arguments).await
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

async fn ip(program: &[&str], arguments: &str) -> Result<()> {
    let mut command = tokio::process::Command::new(program[0]);
    command.args(&program[1..]).args(arguments.split_whitespace());
    let output = command.output().await.context("iproute2 and util-linux are needed")?;
    ensure!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
