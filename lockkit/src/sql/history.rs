//! What is there of lockkit's tables, going by the history of the migrations and by the tables themselves.

use sqlx::{
    SqlStr,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};

use crate::{error::Error, sql::Dialect};

/// The table of the history. Beside the application's own, so that both can be mixed.
pub(super) const HISTORY: &str = "_lockkit_migrations";

/// lockkit's migrations (number, name, statements).
pub(super) fn migrator<const N: usize>(migrations: [(i64, &'static str, &'static str); N]) -> Migrator {
    let migration = |(number, name, sql): (i64, &'static str, _)| {
        Migration::new(number, name.into(), MigrationType::Simple, SqlStr::from_static(sql), false)
    };
    let mut migrator = Migrator::with_migrations(migrations.map(migration).to_vec());
    migrator.dangerous_set_table_name(HISTORY);
    migrator
}

/// One row of the history.
pub(super) struct Applied {
    pub(super) number: i64,
    /// In hexadecimal digits.
    pub(super) checksum: String,
    pub(super) is_complete: bool,
}

/// What is there.
pub(super) enum Schema {
    /// Everything.
    UpToDate,
    /// Less than everything, as the history says.
    Behind,
    /// The history says everything, but a table or column is missing.
    Dropped,
}

/// Compares the history with the migrations. Needs no right to create tables; where the history may not be read either,
/// the tables decide.
pub(super) fn schema<DB: Dialect>(
    migrator: &Migrator,
    history: sqlx::Result<Vec<Applied>>,
    are_tables_there: bool,
) -> Result<Schema, Error> {
    let is_applied = |it: &Migration, history: &[Applied]| {
        let checksum = hex(&it.checksum);
        history.iter().any(|done| done.is_complete && done.number == it.version && done.checksum == checksum)
    };
    match history {
        Ok(history) if history.iter().any(|it| !it.is_complete) => Ok(Schema::Behind),
        Ok(history) if !migrator.iter().all(|it| is_applied(it, &history)) => Ok(Schema::Behind),
        Ok(_) if are_tables_there => Ok(Schema::UpToDate),
        Ok(_) => Ok(Schema::Dropped),
        Err(err) if DB::is_denied(&err) && are_tables_there => Ok(Schema::UpToDate),
        Err(source) if DB::is_denied(&source) => Err(Error::HistoryDenied { source: source.into() }),
        // The history is missing, or whatever is wrong shows again when it is written.
        Err(_) => Ok(Schema::Behind),
    }
}

/// Nothing is wrong where the tables are there and only the history could not be written.
pub(super) fn migrated<DB: Dialect>(done: Result<(), MigrateError>, are_tables_there: bool) -> Result<(), Error> {
    match done {
        Err(MigrateError::Execute(err)) if DB::is_denied(&err) && are_tables_there => Ok(()),
        done => done.map_err(failed),
    }
}

/// The error of a migration of lockkit's. Not a `From`: an application's own migrations would become it by a `?`.
pub(super) fn failed(source: impl Into<MigrateError>) -> Error {
    Error::Migration { source: Box::new(source.into()) }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
