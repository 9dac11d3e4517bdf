//! The state of lockkit's tables, according to the history of the migrations and the tables themselves.

use sqlx::{
    SqlSafeStr,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};

use crate::{sql::Dialect, value::error::Error};

/// The table of the history. It is separate from the application's own history, so both can be mixed.
pub(super) const HISTORY: &str = "_lockkit_migrations";

/// lockkit's migrations, for sqlx to apply.
pub(super) fn migrator<DB: Dialect>() -> Migrator {
    let migration = |&(number, name, sql): &(i64, &'static str, &'static str)| {
        Migration::new(number, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
    };
    let mut migrator = Migrator::with_migrations(DB::MIGRATIONS.iter().map(migration).collect());
    migrator.dangerous_set_table_name(HISTORY);
    migrator
}

/// One row of the history.
pub(super) struct Applied {
    pub(super) number: i64,
    /// As hexadecimal digits.
    pub(super) checksum: String,
    pub(super) is_complete: bool,
}

/// The state of lockkit's tables.
pub(super) enum Schema {
    /// All migrations are applied.
    UpToDate,
    /// A migration is missing in the history, or incomplete.
    Behind,
    /// The history is complete, but a table or column is missing.
    Dropped,
}

/// Compares the history with the migrations. Needs no CREATE privilege. If the history may not be read either, the
/// tables alone decide.
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
        Err(source) if DB::is_denied(&source) => {
            let hint = "their history may not be read: run them as a user who may create tables, and grant this one \
                        the right to read `_lockkit_migrations`";
            Err(Error::Migration { hint: Some(hint), source: source.into() })
        }
        // The history does not exist, or the same error will occur when it is written.
        Err(_) => Ok(Schema::Behind),
    }
}

/// Ignores a denied write of the history if the tables exist.
pub(super) fn migrated<DB: Dialect>(done: Result<(), MigrateError>, are_tables_there: bool) -> Result<(), Error> {
    match done {
        Err(MigrateError::Execute(err)) if DB::is_denied(&err) && are_tables_there => Ok(()),
        done => done.map_err(failed),
    }
}

/// The error of one of lockkit's migrations. Not a `From`, because `?` would then also convert the errors of an
/// application's own migrations.
pub(super) fn failed(source: impl Into<MigrateError>) -> Error {
    Error::Migration { hint: None, source: Box::new(source.into()) }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
