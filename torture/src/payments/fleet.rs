//! The processes of the service: started, killed, started again.

use std::cell::RefCell;
use std::env;
use std::net::SocketAddr;
use std::process::Stdio;
use std::rc::Rc;

use anyhow::{Context, Result};
use clap::ValueEnum;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::service::Handler;

/// Where the processes listen. The address of one that was killed stays until there is another one.
pub(super) type Addresses = Rc<RefCell<Vec<SocketAddr>>>;

pub(super) struct Fleet {
    server: &'static str,
    url: String,
    handler: Handler,
    processes: Vec<Child>,
    addresses: Addresses,
}

impl Fleet {
    pub(super) async fn start(server: &'static str, url: &str, handler: Handler, processes: u32) -> Result<Self> {
        let addresses = Addresses::default();
        let mut fleet = Self { server, url: url.to_owned(), handler, processes: Vec::new(), addresses };
        for number in 0..processes {
            let (process, address) = fleet.process(number).await?;
            fleet.processes.push(process);
            fleet.addresses.borrow_mut().push(address);
        }
        Ok(fleet)
    }

    pub(super) fn addresses(&self) -> Addresses {
        Rc::clone(&self.addresses)
    }

    /// Kills a process without any chance to clean up.
    pub(super) async fn kill(&mut self, number: u32) -> Result<()> {
        let process = &mut self.processes[number as usize];
        let ended = process.try_wait()?;
        anyhow::ensure!(ended.is_none(), "a process of the service ended by itself: {ended:?}");
        Ok(process.kill().await?)
    }

    /// Starts a process in the place of one that was killed.
    pub(super) async fn restart(&mut self, number: u32) -> Result<()> {
        let (process, address) = self.process(number).await?;
        self.processes[number as usize] = process;
        self.addresses.borrow_mut()[number as usize] = address;
        Ok(())
    }

    /// Kills all processes. Returns how those ended that had ended by themselves.
    pub(super) async fn finish(self) -> Vec<String> {
        let mut ended = Vec::new();
        for mut process in self.processes {
            match process.try_wait() {
                Ok(None) => drop(process.kill().await),
                other => ended.push(format!("{other:?}")),
            }
        }
        ended
    }

    /// A new process, and where it listens.
    async fn process(&self, number: u32) -> Result<(Child, SocketAddr)> {
        let handler = self.handler.to_possible_value().context("a handler has a name")?;
        // It dies with this program.
        let mut process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(env::current_exe()?)
            .args(["payment-service", "--server", self.server, "--url", &self.url, "--handler", handler.get_name()])
            .args((number % 2 == 1).then_some("--reuse"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut said = String::new();
        BufReader::new(process.stdout.take().context("a process has an output")?).read_line(&mut said).await?;
        let address = said.trim().parse().context("a process of the service did not start")?;
        Ok((process, address))
    }
}
