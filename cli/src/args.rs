//! What the user writes. The comments are the help of the program.

#![expect(clippy::doc_markdown, reason = "the help is plain text")]

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use clap_complete::Shell;
use lockkit::Wait;

/// Locks that your services have in their database: run a command under one, see who holds them, take one away.
#[derive(Debug, Parser)]
#[command(name = "lockkit", version, max_term_width = 100, after_help = EXITS)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) on: On,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXITS: &str = "Exit codes: 0 done, 1 an error, 64 usage, 69 the database cannot be reached, 75 held by another \
process, 78 the tables are missing (`lockkit migrate` makes them), 79 the lease is lost or not held";

/// Where the leases are.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct On {
    /// The database: postgres://, mysql://, mariadb:// or sqlite:// [default: DATABASE_URL, also from .env]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) url: Option<String>,

    /// Leases that are not in the database: redis://, rediss://, zookeeper://hosts/root or etcd://hosts
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// Do not read the file .env
    #[arg(long, global = true)]
    pub(crate) no_dotenv: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a lease, and end it when the lease is lost
    Run(RunArgs),
    /// Show who blocks whom now: locks of rows, named and session locks, and leases
    Explain(ExplainArgs),
    /// Look for what harms locks, and print the statement that mends it; ends with 2 if something must be mended
    Doctor(DoctorArgs),
    /// List the leases that are held
    Ls(LsArgs),
    /// Show one lease; ends with 79 if it is not held
    Show(ShowArgs),
    /// Take a lease away from its holder
    Steal(StealArgs),
    /// End with 0 if the lease is held with this fence, and with 79 otherwise
    Check(CheckArgs),
    /// Show the leases and who blocks whom on a page, until ctrl-c
    Web(WebArgs),
    /// Make the tables of lockkit, or write their SQL into a folder
    Migrate(MigrateArgs),
    /// Print the completions for a shell
    Completions { shell: Shell },
    /// Write the manual pages into a folder
    Man { folder: PathBuf },
    #[command(name = "__sentinel", hide = true)]
    Sentinel,
    #[command(name = "__launch", hide = true)]
    Launch(LaunchArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = RUN_HELP)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct RunArgs {
    /// The name of the lease
    pub(crate) name: String,

    /// The command and its arguments; no shell reads them
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,

    /// How long to wait for the lease, or `forever`
    #[arg(short, long, default_value = "10s", value_parser = wait, value_name = "TIME")]
    pub(crate) wait: Wait,

    /// Do not wait
    #[arg(short, long, conflicts_with = "wait")]
    pub(crate) nonblock: bool,

    /// Hold it beside others that share it
    #[arg(short, long)]
    pub(crate) shared: bool,

    /// Hold one of so many permits
    #[arg(long, conflicts_with = "shared", value_name = "N")]
    pub(crate) permits: Option<u32>,

    /// Wait in the order of arrival
    #[arg(long)]
    pub(crate) fair: bool,

    /// For how long nobody else has it if this machine dies
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub(crate) ttl: Duration,

    /// Keep it for so long from the start, however soon the command ends: for cron on several machines
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub(crate) at_least: Duration,

    /// From SIGTERM to SIGKILL; at most a third of the ttl
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub(crate) grace: Duration,

    /// The exit code if another process holds the lease
    #[arg(short = 'E', long, default_value_t = 75, value_name = "CODE")]
    pub(crate) busy_exit: u8,

    /// The name that others see; by default user@host/process
    #[arg(long, value_name = "TEXT")]
    pub(crate) holder: Option<String>,

    /// Say when the lease is taken and given back
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct WebArgs {
    /// Where to serve it; only this machine may reach that
    #[arg(long, default_value = "127.0.0.1:8642", value_name = "ADDRESS")]
    pub(crate) bind: SocketAddr,

    /// Whoever sees the page may take leases away
    #[arg(long)]
    pub(crate) steal: bool,
}

const RUN_HELP: &str = "\
The command finds LOCKKIT_KEY, LOCKKIT_FENCE and LOCKKIT_HOLDER in its environment, LOCKKIT_PREVIOUS if the last \
holder died (its fence and name), and with a database LOCKKIT_GUARD: a statement that makes a transaction fail unless \
it has the newest fence:

    psql -1 -v ON_ERROR_STOP=1 -c \"$LOCKKIT_GUARD\" -f close_month.sql

Signals go to the command and all that it has started. When it ends, what it leaves running is ended, too, but not a \
process that has left its process group, such as a daemon. A lease that is taken away ends the command by SIGTERM, \
and by SIGKILL after the grace. One that cannot be renewed ends it before another process can have the lease. If \
lockkit is killed or stopped, its sentinel, a second process, ends the command. A machine that sleeps is noticed \
when it wakes: only the guard stops what the command does then.

Exit codes: that of the command (128 + N if signal N ended it), 79 if the lease was lost, 126 the command cannot be \
run, 127 it was not found, and those of `lockkit --help`";

fn wait(text: &str) -> Result<Wait, humantime::DurationError> {
    if text == "forever" { Ok(Wait::Unbounded) } else { humantime::parse_duration(text).map(Wait::AtMost) }
}

/// Those who hold a lock stand above those who wait for it. PostgreSQL and MySQL know named and session locks by a hash
/// only; --key names it. Leases show the processes that have waited for 50 ms.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ExplainArgs {
    /// The key of a named or session lock; can be given several times
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Vec<String>,

    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Exit codes: 0 nothing to mend, 1 a warning with --strict, 2 something must be mended")]
pub(crate) struct DoctorArgs {
    /// Check the rights of this role, which the services use, instead of those of the user (PostgreSQL)
    #[arg(long, value_name = "ROLE")]
    pub(crate) role: Option<String>,

    /// Acquire, renew and release a lease some times, and say which ttl is safe
    #[arg(long)]
    pub(crate) latency: bool,

    /// The ttl of your leases, for --latency
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub(crate) ttl: Duration,

    /// Check that an index serves this statement, so that it does not lock a whole table; values, not placeholders
    #[arg(long, value_name = "SQL")]
    pub(crate) query: Vec<String>,

    /// Check that the server has room for so many processes with so many connections each, such as 12x10
    #[arg(long, value_parser = pools, value_name = "NxM")]
    pub(crate) pools: Option<(u32, u32)>,

    /// End with 1 if there are warnings
    #[arg(long)]
    pub(crate) strict: bool,

    /// Print a JSON object for each finding, on a line of its own
    #[arg(long)]
    pub(crate) json: bool,
}

fn pools(text: &str) -> Result<(u32, u32), String> {
    let parsed = text.split_once('x').and_then(|(processes, each)| Some((processes.parse().ok()?, each.parse().ok()?)));
    parsed.ok_or_else(|| "write processes x connections, such as 12x10".to_owned())
}

#[derive(Debug, clap::Args)]
pub(crate) struct LsArgs {
    /// Only leases whose names start so
    #[arg(default_value = "")]
    pub(crate) prefix: String,

    /// Also those whose holder died and that nobody has taken since; a database keeps them for a week
    #[arg(long)]
    pub(crate) all: bool,

    /// Print a JSON object for each lease, on a line of its own
    #[arg(long)]
    pub(crate) json: bool,

    /// Print the list again after each such time
    #[arg(long, value_parser = humantime::parse_duration, num_args = 0..=1, default_missing_value = "1s")]
    #[arg(require_equals = true, value_name = "TIME")]
    pub(crate) watch: Option<Duration>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The name of the lease
    pub(crate) name: String,

    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StealArgs {
    /// The name of the lease
    pub(crate) name: String,

    /// Do not ask; needs --fence
    #[arg(long, requires = "fence")]
    pub(crate) yes: bool,

    /// Only if it is held with this fence, as `ls` shows it
    #[arg(long)]
    pub(crate) fence: Option<u64>,

    /// Only if its holder is dead: waits until the lease expires, and ends with 75 if it is renewed
    #[arg(long, conflicts_with_all = ["yes", "fence"])]
    pub(crate) if_dead: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// The name of the lease
    pub(crate) name: String,

    /// The fence that its holder was given
    #[arg(long)]
    pub(crate) fence: u64,
}

#[derive(Debug, clap::Args)]
pub(crate) struct MigrateArgs {
    /// Change nothing, and write the SQL into this folder: for sqlx-cli or for migrations of your own
    #[arg(long, value_name = "FOLDER")]
    pub(crate) print: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LaunchArgs {
    /// The process that launches.
    pub(crate) parent: i32,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}
