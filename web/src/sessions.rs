//! The sessions of the database that wait for each other, as a viewer sees them.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use lockkit_inspect::{Inspect, Line, Waits, with_causes};
use serde::Serialize;
use sqlx::Pool;
use tokio::time::timeout;

/// How long the database may take to say who waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most lines that a viewer gets.
const LINES: usize = 100;

/// The most characters of a statement.
const STATEMENT: usize = 200;

/// A database that is asked who waits for whom. An error is a text for the operator.
#[derive(Clone)]
pub(crate) struct Database(Arc<dyn Fn() -> Answer + Send + Sync>);

type Answer = Pin<Box<dyn Future<Output = Result<Waits, String>> + Send>>;

impl Database {
    pub(crate) fn of<DB: Inspect>(pool: Pool<DB>) -> Self {
        Self(Arc::new(move || {
            let pool = pool.clone();
            Box::pin(async move {
                let asked = async { Waits::of::<DB>(&mut *pool.acquire().await?, &[]).await };
                match timeout(PATIENCE, asked).await {
                    Ok(answer) => answer.map_err(|err| with_causes(&err)),
                    Err(_) => Err(format!("the database has not said within {PATIENCE:?} who waits")),
                }
            })
        }))
    }

    pub(crate) async fn sessions(&self) -> Sessions {
        match (self.0)().await {
            Ok(waits) => Sessions::of(&waits),
            Err(problem) => Sessions { notes: vec![problem], ..Sessions::default() },
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").finish_non_exhaustive()
    }
}

/// Who waits for whom.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Sessions {
    pub(crate) lines: Vec<SessionLine>,
    /// How the first ones are ended, what the user may not see, and what went wrong.
    pub(crate) notes: Vec<String>,
}

/// One session, as text.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SessionLine {
    /// Its place in the tree, its number and its name.
    pub(crate) session: String,
    pub(crate) waits: Option<u64>,
    pub(crate) lock: String,
    pub(crate) transaction: Option<u64>,
    pub(crate) does: String,
}

impl Sessions {
    fn of(waits: &Waits) -> Self {
        let lines = waits.lines();
        let ends = waits.blockers().into_iter().map(|it| format!("To end session {}: {}", it.id, it.end_by));
        let mut notes: Vec<String> = ends.take(LINES).chain(waits.unseen.iter().cloned()).collect();
        if let Some(more @ 1..) = lines.len().checked_sub(LINES) {
            notes.push(format!("{more} more sessions are not shown"));
        }
        Self { lines: lines.iter().take(LINES).map(SessionLine::of).collect(), notes }
    }
}

impl SessionLine {
    fn of(line: &Line<'_>) -> Self {
        let Line { branches, id, session, wait, .. } = line;
        Self {
            session: format!("{branches}{id} {}", session.map_or("", |it| &it.name)),
            waits: wait.map(|it| it.waits_ms),
            lock: line.lock(),
            transaction: session.and_then(|it| it.transaction_ms),
            does: session.map(|it| it.does(STATEMENT)).unwrap_or_default(),
        }
    }
}
