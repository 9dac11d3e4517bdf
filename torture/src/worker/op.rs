//! One operation: its number, its account, and the events that it says.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sqlx::Database;

use crate::clock;
use crate::event::{Answer, Event, Kind, Said, What};
use crate::rig::Rig;
use crate::worker::{answer, say};

pub(super) struct Op {
    pub(super) id: i64,
    pub(super) kind: Kind,
    pub(super) key: String,
    pub(super) account: i64,
    worker: u32,
    held: AtomicBool,
    sent: AtomicBool,
    answered: AtomicBool,
    until: AtomicU64,
}

/// Why an operation did not commit, and what that says of its commit if it was sent.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) doing: &'static str,
    pub(super) class: String,
    pub(super) text: String,
    pub(super) answer: Answer,
}

impl Failure {
    pub(super) fn of_the_caller(why: &str) -> Self {
        Self { doing: "waiting", class: "Caller".into(), text: why.into(), answer: Answer::Unknown }
    }

    pub(super) fn refused(class: &str) -> Self {
        Self { doing: "writing", class: class.into(), text: String::new(), answer: Answer::Refused }
    }

    pub(super) fn sql(doing: &'static str, err: &sqlx::Error) -> Self {
        let class = match err {
            sqlx::Error::Database(err) => format!("Sql:{}", err.code().unwrap_or_default()),
            sqlx::Error::PoolTimedOut => "Sql:PoolTimedOut".into(),
            sqlx::Error::Io(_) => "Sql:Io".into(),
            _ => "Sql".into(),
        };
        Self { doing, class, text: err.to_string(), answer: Answer::Unknown }
    }
}

impl From<lockkit::Error> for Failure {
    fn from(err: lockkit::Error) -> Self {
        let class = match &err {
            lockkit::Error::Database { fault, .. } => format!("Database:{fault:?}"),
            lockkit::Error::Lost { reason, .. } => format!("Lost:{reason:?}"),
            other => format!("{other:?}").split([' ', '{', '(']).next().unwrap_or_default().to_owned(),
        };
        let source = std::error::Error::source(&err).map(|it| format!(": {it}")).unwrap_or_default();
        Self { doing: "locking", class, text: format!("{err}{source}"), answer: answer(&err) }
    }
}

impl Op {
    pub(super) fn new(worker: u32, kind: Kind, key: u32, number: u32) -> Self {
        Self {
            id: i64::from(worker) << 40 | (kind as i64) << 32 | i64::from(number),
            kind,
            key: kind.key(key),
            account: kind.account(key),
            worker,
            held: AtomicBool::new(false),
            sent: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            until: AtomicU64::new(0),
        }
    }

    pub(super) fn say(&self, what: What) {
        self.say_of(&self.key, what);
    }

    fn say_of(&self, key: &str, what: What) {
        let event =
            Event { at: clock::now(), worker: self.worker, op: self.id, kind: self.kind, key: key.into(), what };
        say(&Said::Happened(event));
    }

    /// A lock without a fence, or a lease, was granted.
    pub(super) fn granted(&self, fence: i64, until: Option<Instant>) {
        self.granted_of(&self.key, fence, until);
    }

    /// One of several keys was granted.
    pub(super) fn granted_of(&self, key: &str, fence: i64, until: Option<Instant>) {
        self.held.store(true, Ordering::SeqCst);
        let until = until.map_or(u64::MAX, clock::of);
        self.until.store(until, Ordering::SeqCst);
        self.say_of(key, What::Granted { fence, until });
    }

    /// Says how long the lease is trusted, when a renewal has moved that.
    pub(super) fn look(&self, until: Instant) {
        let until = clock::of(until);
        // Two readings of one instant differ by some microseconds.
        if until > self.until.load(Ordering::SeqCst) + clock::MILLISECOND {
            self.until.store(until, Ordering::SeqCst);
            self.say(What::Renewed { until });
        }
    }

    pub(super) fn sent(&self) {
        self.sent.store(true, Ordering::SeqCst);
        self.say(What::Sent);
    }

    /// The holder is about to give the lock back.
    pub(super) fn end(&self) {
        if self.held.swap(false, Ordering::SeqCst) {
            self.say(What::Ended);
        }
    }

    /// The result of the work before the commit. If that failed, the lock is released next.
    pub(super) fn or_end<T>(&self, worked: Result<T, Failure>) -> Result<T, Failure> {
        worked.inspect_err(|_| self.end())
    }

    pub(super) fn is_committing(&self) -> bool {
        self.sent.load(Ordering::SeqCst) && !self.answered.load(Ordering::SeqCst)
    }

    /// The answer of the commit has come.
    pub(super) fn answered(&self, result: &Result<(), Failure>) {
        if self.answered.swap(true, Ordering::SeqCst) {
            return;
        }
        self.say(match result {
            Ok(()) => What::Answered { answer: Answer::Committed, class: "Ok".into() },
            Err(Failure { answer, class, .. }) => What::Answered { answer: *answer, class: class.clone() },
        });
    }

    /// Says how the operation ended: how its commit was answered, or why there was none.
    pub(super) fn conclude(&self, result: Result<(), Failure>) {
        if self.sent.load(Ordering::SeqCst) {
            return self.answered(&result);
        }
        if let Err(Failure { doing, class, text, .. }) = result {
            self.say(What::Failed { doing: doing.into(), class, text });
        }
    }
}

/// The value of an account.
pub(super) async fn value<S: Rig>(conn: &mut <S::DB as Database>::Connection, account: i64) -> Result<i64, Failure> {
    let value = S::fetch_i64(conn, &format!("SELECT value FROM account WHERE id = {account}")).await;
    value.map_err(|err| Failure::sql("read", &err))?.ok_or_else(|| Failure::refused("NoAccount"))
}

/// Writes what follows from the value that was read, with its line in the ledger. `guard` may refuse the row.
pub(super) async fn write<S: Rig>(
    conn: &mut <S::DB as Database>::Connection,
    op: &Op,
    account: i64,
    seen: i64,
    fence: i64,
    guard: &str,
) -> Result<(), Failure> {
    let failed = |err: sqlx::Error| Failure::sql("write", &err);
    let sql = format!("UPDATE account SET value = {}, fence = {fence} WHERE id = {account}{guard}", seen + 1);
    if S::execute(conn, &sql).await.map_err(failed)? != 1 {
        return Err(Failure::refused("OlderFence"));
    }
    enter::<S>(conn, op, account, seen, fence).await
}

/// Writes a line in the ledger.
pub(super) async fn enter<S: Rig>(
    conn: &mut <S::DB as Database>::Connection,
    op: &Op,
    account: i64,
    seen: i64,
    fence: i64,
) -> Result<(), Failure> {
    let sql = format!("INSERT INTO ledger (op, account, seen, fence) VALUES ({}, {account}, {seen}, {fence})", op.id);
    S::execute(conn, &sql).await.map(drop).map_err(|err| Failure::sql("write", &err))
}
