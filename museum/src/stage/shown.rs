//! Results of steps, in a word or two.

use lockkit::{Error, Holder, Lease, LeaseStore, Released, Taken, Tx};
use sqlx::sqlite::SqliteQueryResult;

/// What a step gave, for the record. No times and no numbers that differ from run to run.
pub(crate) trait Shown {
    fn shown(&self) -> Option<String>;
}

impl Shown for () {
    fn shown(&self) -> Option<String> {
        None
    }
}

impl Shown for i64 {
    fn shown(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Shown for Option<String> {
    fn shown(&self) -> Option<String> {
        Some(self.clone().unwrap_or_else(|| "(nil)".to_owned()))
    }
}

impl Shown for SqliteQueryResult {
    fn shown(&self) -> Option<String> {
        Some(match self.rows_affected() {
            1 => "1 row".to_owned(),
            rows => format!("{rows} rows"),
        })
    }
}

/// The last one of a pair.
impl<T, U: Shown> Shown for (T, U) {
    fn shown(&self) -> Option<String> {
        self.1.shown()
    }
}

impl Shown for Taken {
    fn shown(&self) -> Option<String> {
        Some(format!("{} taken", self.amount()))
    }
}

impl Shown for Tx<sqlx::Sqlite> {
    fn shown(&self) -> Option<String> {
        None
    }
}

impl<S: LeaseStore> Shown for Lease<S> {
    fn shown(&self) -> Option<String> {
        Some("granted".to_owned())
    }
}

impl Shown for Released {
    fn shown(&self) -> Option<String> {
        Some(if *self == Self::WhileHeld { "released" } else { "was lost before" }.to_owned())
    }
}

impl<T: Shown, E: Named> Shown for Result<T, E> {
    fn shown(&self) -> Option<String> {
        match self {
            Ok(value) => value.shown(),
            Err(err) => Some(format!("Err({})", err.named())),
        }
    }
}

/// An error that has a name.
pub(crate) trait Named {
    fn named(&self) -> String;
}

impl Named for Error {
    fn named(&self) -> String {
        name(self)
    }
}

impl Named for sqlx::Error {
    fn named(&self) -> String {
        match self.as_database_error() {
            // https://www.sqlite.org/rescode.html#busy_snapshot
            Some(err) if err.code().as_deref() == Some("517") => "the snapshot is old".to_owned(),
            Some(err) => err.message().to_owned(),
            None => self.to_string(),
        }
    }
}

impl Named for anyhow::Error {
    fn named(&self) -> String {
        let database = || self.downcast_ref().map(sqlx::Error::named);
        self.downcast_ref().map(name).or_else(database).unwrap_or_else(|| self.to_string())
    }
}

/// The variant of the error, and the holder of the lease.
fn name(err: &Error) -> String {
    match err {
        Error::Contended { holder: Some(holder), .. } => match holder.as_ref() {
            Holder::Lease(lease) => format!("Contended: {} has it", lease.holder),
            _ => "Contended".to_owned(),
        },
        Error::Contended { .. } => "Contended".to_owned(),
        Error::Lost { .. } => "Lost".to_owned(),
        Error::Fenced { .. } => "Fenced".to_owned(),
        Error::Conflict { .. } => "Conflict".to_owned(),
        Error::FullScan { .. } => "FullScan".to_owned(),
        Error::SoldOut { .. } => "SoldOut".to_owned(),
        Error::PoolStarved { .. } => "PoolStarved".to_owned(),
        other => other.to_string(),
    }
}
