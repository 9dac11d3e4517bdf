//! The worker processes of one sample: started, let go at the same time, and heard.

use std::env;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::job::{Job, Said, Seen};

/// The program of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) command: Vec<String>,
}

impl Program {
    /// This program.
    pub(crate) fn own() -> Result<Self> {
        let path: PathBuf = env::current_exe()?;
        let command = vec![path.to_str().context("a path in UTF-8")?.to_owned(), "worker".to_owned()];
        Ok(Self { command })
    }
}

/// How long a worker may take to connect and to make what it needs, and to end after its time.
const PATIENCE: Duration = Duration::from_secs(180);

/// What all workers saw, and how many operations they had done before they were let go.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) warm: u64,
    pub(crate) seen: Vec<Seen>,
}

/// Lets the jobs be done at the same time. `before` is called when all workers are ready.
pub(crate) async fn work<F: Future<Output = Result<()>>>(
    program: &Program,
    jobs: &[Job],
    before: impl FnOnce() -> F,
) -> Result<Heard> {
    let mut workers = Vec::new();
    for job in jobs {
        workers.push(Worker::start(program, job).await?);
    }
    let mut warm = 0;
    for worker in &mut workers {
        let Said::Ready { done } = worker.hear().await? else { bail!("a worker reported before it was let go") };
        warm += done;
    }
    before().await?;
    for worker in &mut workers {
        worker.tell("go").await?;
    }
    let mut seen = Vec::new();
    for worker in &mut workers {
        let Said::Finished(of_one) = worker.hear().await? else { bail!("a worker was ready twice") };
        seen.push(*of_one);
    }
    for mut worker in workers {
        let status = timeout(PATIENCE, worker.child.wait()).await.context("a worker does not end")??;
        if !status.success() {
            bail!("a worker ended with {status}");
        }
    }
    Ok(Heard { warm, seen })
}

/// A worker process. It dies with this handle.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    async fn start(program: &Program, job: &Job) -> Result<Self> {
        let (name, arguments) = program.command.split_first().context("a program has a name")?;
        let mut child = Command::new(name)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let input = child.stdin.take().context("a worker has no standard input")?;
        let output = child.stdout.take().context("a worker has no standard output")?;
        let mut worker = Self { child, input, output: BufReader::new(output).lines() };
        worker.tell(&serde_json::to_string(job)?).await?;
        Ok(worker)
    }

    async fn tell(&mut self, line: &str) -> Result<()> {
        self.input.write_all(format!("{line}\n").as_bytes()).await.context("a worker has ended; see above")
    }

    async fn hear(&mut self) -> Result<Said> {
        let line = timeout(PATIENCE, self.output.next_line()).await.context("a worker says nothing")??;
        let line = line.context("a worker failed; see above")?;
        serde_json::from_str(&line).with_context(|| {
            let start: String = line.chars().take(200).collect();
            format!("a worker said {start:?}")
        })
    }
}
