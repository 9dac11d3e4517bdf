//! Where the numbers come from: the command, the commit, the machine, the versions.

use std::process::Command;
use std::{env, fs, thread};

/// What is needed to run it again.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    pub(crate) command: String,
    pub(crate) commit: String,
    pub(crate) profile: &'static str,
    pub(crate) machine: String,
    pub(crate) durable: bool,
    pub(crate) servers: Vec<String>,
    pub(crate) peers: Vec<String>,
}

impl Header {
    pub(crate) fn new(durable: bool) -> Self {
        let arguments: Vec<_> = env::args().skip(1).collect();
        Self {
            command: format!("bench {}", arguments.join(" ")),
            commit: commit(),
            profile: if cfg!(debug_assertions) { "dev" } else { "release" },
            machine: machine(),
            durable,
            servers: Vec::new(),
            peers: Vec::new(),
        }
    }

    pub(crate) fn markdown(&self) -> String {
        let Self { command, commit, profile, machine, durable, servers, peers } = self;
        let commits = if *durable { "wait for the disk" } else { "do not wait for the disk" };
        let peers = if peers.is_empty() { String::new() } else { format!("- Peers:\n  - {}\n", peers.join("\n  - ")) };
        format!(
            "```bash\n{}\n```\n\n- Commit: {commit}, profile {profile}\n- Machine: {machine}\n\
             - Servers: {}; commits {commits}\n{peers}",
            command.replace(" --", " \\\n    --"),
            servers.join(", "),
        )
    }
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    // Other results do not count: one run after the other writes its own.
    let status = ["status", "--porcelain", "--untracked-files=no", ":(top)", ":(top,exclude)docs/benchmarks"];
    let is_changed = git(&status).is_some_and(|it| !it.is_empty());
    if is_changed { format!("{commit} with changes") } else { commit }
}

/// Cores, kind of processor and memory.
fn machine() -> String {
    let cores = thread::available_parallelism().map_or(0, usize::from);
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|it| it.starts_with(name)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let kilobytes: u64 = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0);
    let processor = field("/proc/cpuinfo", "model name");
    format!("{cores} cores ({processor}), {} GB", kilobytes.div_ceil(1_000_000))
}
