//! The rounds of a run: in each of them every contender once, side by side, and each round begins with another.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use tempfile::NamedTempFile;

use crate::args::{Common, CompareArgs, RunArgs};
use crate::crew::Program;
use crate::guard;
use crate::job::Job;
use crate::lines::{self, Line, Setting};
use crate::peers::Peers;
use crate::report::{self, Header};
use crate::sample;
use crate::scenarios::Scenario;
use crate::servers::{Kind, Server};
use crate::stage::Stage;
use crate::strace;

/// Measures scenarios.
pub(crate) async fn run(mut args: RunArgs) -> Result<ExitCode> {
    if args.quick {
        guard::shorten(&mut args);
    }
    let scenarios = or_all(&args.scenarios, |it| !matches!(it, Scenario::Uncontended | Scenario::HotRow));
    let kinds = or_all(&args.databases, |_| true);
    let mut conductor = Conductor::new(&args.common);
    for kind in kinds {
        let Some((server, stage)) = conductor.stage(kind).await? else { continue };
        for scenario in &scenarios {
            for setting in settings(&args, *scenario, kind) {
                let mut contenders: Vec<_> = scenario.contenders(kind).into_iter().map(Contender::of_lockkit).collect();
                if args.quick {
                    let baseline = contenders[0].name.clone();
                    contenders.retain(|it| guard::takes_part(*scenario, &it.name, it.name == baseline));
                }
                conductor.measure(&stage, setting, &contenders).await?;
            }
        }
        stage.strike(&server).await?;
    }
    conductor.finish(args.quick)
}

/// Measures lockkit beside other libraries, on PostgreSQL.
pub(crate) async fn compare(args: CompareArgs) -> Result<ExitCode> {
    let mut conductor = Conductor::new(&args.common);
    let peers = Peers::start(args.peers.as_deref()).await?;
    conductor.header.servers.extend(peers.servers());
    let Some((server, stage)) = conductor.stage(Kind::Postgres).await? else {
        return Ok(ExitCode::FAILURE);
    };
    let crowds = [(Scenario::Uncontended, 1, 1), (Scenario::HotRow, args.tasks, args.processes)];
    for (scenario, tasks, processes) in crowds {
        let keys = scenario.keys().unwrap_or_default();
        let setting = Setting { scenario, database: Kind::Postgres, tasks, processes, keys, hold_ms: 0, rows: 0 };
        let mut contenders: Vec<_> =
            scenario.contenders(Kind::Postgres).into_iter().map(Contender::of_lockkit).collect();
        contenders.extend(peers.contenders(scenario));
        let chosen = |name: &str| args.only.is_empty() || args.only.iter().any(|it| name.contains(it.as_str()));
        let baseline = contenders[0].name.clone();
        contenders.retain(|it| it.name == baseline || chosen(&it.name));
        conductor.measure(&stage, setting, &contenders).await?;
    }
    conductor.header.peers = peers.versions();
    stage.strike(&server).await?;
    conductor.finish(false)
}

/// Somebody who does the work.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// `None`: this program.
    pub(crate) program: Option<Program>,
    /// Why it cannot take part.
    pub(crate) missing: Option<String>,
    /// The servers that it locks on beside the database.
    pub(crate) redis: Option<String>,
    pub(crate) zookeeper: Option<String>,
}

impl Contender {
    pub(crate) fn of_lockkit(name: &str) -> Self {
        Self { name: name.to_owned(), program: None, missing: None, redis: None, zookeeper: None }
    }
}

/// The settings of a scenario that the command line asks for.
fn settings(args: &RunArgs, scenario: Scenario, database: Kind) -> Vec<Setting> {
    let crowds: Vec<_> = if args.quick {
        guard::crowds(scenario)
    } else if args.tasks.is_empty() && args.processes.is_empty() {
        scenario.crowds().to_vec()
    } else {
        let default: Vec<_> = scenario.crowds().iter().map(|it| it.0).collect();
        let tasks = if args.tasks.is_empty() { &default } else { &args.tasks };
        let processes = if args.processes.is_empty() { &[1][..] } else { &args.processes };
        tasks.iter().flat_map(|tasks| processes.iter().map(|processes| (*tasks, *processes))).collect()
    };
    let keys = scenario.keys().map_or_else(|| args.keys.clone(), |keys| vec![keys]);
    let rows = match scenario {
        Scenario::Held => &args.held[..],
        Scenario::Sweep | Scenario::TableSize => &args.rows,
        _ => &[0],
    };
    let mut settings = Vec::new();
    for (tasks, processes) in crowds {
        // Every process has the same number of tasks.
        if processes == 0 || tasks == 0 || tasks % processes != 0 {
            continue;
        }
        for keys in &keys {
            for hold_ms in &args.hold {
                for rows in rows {
                    let (keys, hold_ms, rows) = (*keys, *hold_ms, *rows);
                    let setting = Setting { scenario, database, tasks, processes, keys, hold_ms, rows };
                    if !settings.contains(&setting) {
                        settings.push(setting);
                    }
                }
            }
        }
    }
    settings
}

fn or_all<T: ValueEnum + Copy>(chosen: &[T], is_default: impl Fn(&T) -> bool) -> Vec<T> {
    if chosen.is_empty() { T::value_variants().iter().copied().filter(is_default).collect() } else { chosen.to_vec() }
}

/// What a run has so far.
struct Conductor<'a> {
    args: &'a Common,
    header: Header,
    lines: Vec<Line>,
}

impl<'a> Conductor<'a> {
    fn new(args: &'a Common) -> Self {
        Self { args, header: Header::new(args.durable), lines: Vec::new() }
    }

    /// A server and a database on it; `None`, and a word in the header, if it is not installed.
    async fn stage(&mut self, kind: Kind) -> Result<Option<(Server, Stage)>> {
        let Common { postgres, mariadb, mysql, sqlite, durable, .. } = self.args;
        let given = match kind {
            Kind::Postgres => postgres,
            Kind::MariaDb => mariadb,
            Kind::MySql => mysql,
            Kind::Sqlite => sqlite,
        };
        let server = match given {
            Some(url) => Server::given(kind, url)?,
            None => match Server::start(kind, *durable) {
                Ok(server) => server,
                Err(err) => {
                    let reason = err.to_string().lines().next().unwrap_or_default().to_owned();
                    eprintln!("!!! {} IS NOT MEASURED: {err:#}", kind.name());
                    self.header.servers.push(format!("{}: not measured, {reason}", kind.name()));
                    return Ok(None);
                }
            },
        };
        let stage = Stage::make(&server).await.with_context(|| kind.name())?;
        self.header.servers.push(format!("{} {}", kind.name(), stage.version));
        Ok(Some((server, stage)))
    }

    /// Measures all contenders of a setting, round by round.
    async fn measure(&mut self, stage: &Stage, setting: Setting, contenders: &[Contender]) -> Result<()> {
        let mut lines: Vec<_> =
            (0..).zip(contenders).map(|(number, it)| Line::new(setting, &it.name, number == 0)).collect();
        let progress = self.progress(setting, contenders.len());
        for round in 0..self.args.rounds as usize {
            for turn in 0..contenders.len() {
                let number = (round + turn) % contenders.len();
                let (contender, line) = (&contenders[number], &mut lines[number]);
                progress.set_message(contender.name.clone());
                progress.inc(1);
                if let Some(reason) = &contender.missing {
                    line.skipped = Some(reason.clone());
                    continue;
                }
                let mut program = match &contender.program {
                    Some(program) => program.clone(),
                    None => Program::own()?,
                };
                let summary = self.args.strace.then(NamedTempFile::new).transpose()?;
                if let Some(summary) = &summary {
                    program = strace::traced(&program, summary.path())?;
                }
                let jobs = self.jobs(stage, setting, contender);
                let sample = sample::take(stage, &program, &jobs).await.with_context(|| {
                    format!("{} of {} on {}", contender.name, setting.scenario.name(), stage.kind.name())
                })?;
                if let Some(summary) = &summary {
                    line.calls = Some(strace::calls(summary.path(), sample.operations)?);
                }
                line.samples.push(sample);
            }
        }
        progress.finish_and_clear();
        lines::compare(&mut lines);
        report::print(&lines);
        self.lines.extend(lines);
        Ok(())
    }

    fn jobs(&self, stage: &Stage, setting: Setting, contender: &Contender) -> Vec<Job> {
        let Setting { scenario, database, tasks, processes, keys, hold_ms, rows } = setting;
        let milliseconds =
            |seconds: f64| u64::try_from(std::time::Duration::from_secs_f64(seconds).as_millis()).unwrap_or(0);
        let job = |process| Job {
            scenario,
            contender: contender.name.clone(),
            database,
            url: stage.url.clone(),
            redis: contender.redis.clone(),
            zookeeper: contender.zookeeper.clone(),
            process,
            tasks: tasks / processes,
            keys,
            hold_us: hold_ms * 1_000,
            warm_ms: milliseconds(self.args.warm),
            run_ms: milliseconds(self.args.seconds).max(1),
            connections: database.connections(tasks / processes, processes),
            ping: !self.args.no_ping,
            durable: self.args.durable,
            rows,
        };
        (0..processes).map(job).collect()
    }

    fn progress(&self, setting: Setting, contenders: usize) -> ProgressBar {
        let samples = u64::from(self.args.rounds) * contenders as u64;
        let template = "{prefix} [{bar:30}] {pos}/{len} {msg}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let Setting { scenario, database, tasks, processes, .. } = setting;
        let prefix = format!("{} on {}, {tasks} tasks in {processes}", scenario.name(), database.name());
        ProgressBar::new(samples).with_style(style).with_prefix(prefix)
    }

    /// Writes everything, and says whether all is well.
    fn finish(self, quick: bool) -> Result<ExitCode> {
        let Self { args, header, lines } = self;
        if let Some(out) = &args.out {
            report::write(out, &header, &lines)?;
        }
        let mut code = ExitCode::SUCCESS;
        for line in &lines {
            for violation in line.violations() {
                let Setting { scenario, database, .. } = line.setting;
                eprintln!("VIOLATION: {} of {} on {}: {violation}", line.contender, scenario.name(), database.name());
                code = ExitCode::FAILURE;
            }
        }
        for complaint in if quick { guard::complaints(&lines) } else { Vec::new() } {
            eprintln!("TOO SLOW: {complaint}");
            code = ExitCode::FAILURE;
        }
        if code == ExitCode::SUCCESS {
            println!("{} lines, no violation", lines.len());
        }
        Ok(code)
    }
}
