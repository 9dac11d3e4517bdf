//! Results of steps, in a word or two.

use lockkit::{Error, Holder, Lease, LeaseStore, Released, Taken, Tx, dialect::Dialect};

use crate::world::Changed;

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

impl Shown for Changed {
    fn shown(&self) -> Option<String> {
        Some(match self.0 {
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

impl<DB: Dialect> Shown for Tx<DB> {
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
        let Some(err) = self.as_database_error() else { return self.to_string() };
        match (err.code().as_deref(), err.message()) {
            // https://www.sqlite.org/rescode.html#busy_snapshot, and what PostgreSQL says.
            (Some("517"), _) | (_, "could not serialize access due to concurrent update") => {
                "the snapshot is old".to_owned()
            }
            (_, message) if message.starts_with("Deadlock found") => "deadlock".to_owned(),
            (Some("25P02"), _) => "the transaction is aborted".to_owned(),
            (_, message) => message.to_owned(),
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
