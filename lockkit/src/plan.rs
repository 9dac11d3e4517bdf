//! Whether a row lock would read the whole table, asked of the database once for each kind of lock.

use std::{
    any::TypeId,
    collections::HashSet,
    sync::{LazyLock, Mutex, PoisonError},
};

use crate::{
    dialect::{RowOps, RowQuery, failed},
    error::{Error, Result},
    key::Key,
};

/// What to do with a row lock that would read the whole table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlanCheck {
    /// Lock without looking.
    Off,
    /// Log a warning with the plan, and lock.
    Warn,
    /// Refuse with [`Error::FullScan`] before anything is locked.
    #[default]
    Deny,
}

/// The selections that this process has found to use an index: what is remembered is an answer of the planner for the
/// text of a statement, never anything that a lock depends on.
static SERVED_BY_INDEX: LazyLock<Mutex<HashSet<(TypeId, String)>>> = LazyLock::new(Mutex::default);

/// Beyond this many kinds of selections, start to remember anew.
const REMEMBERED: usize = 4096;

/// Refuses, or warns of, a row lock that no index serves. Costs a round trip the first time only.
pub(crate) async fn check_plan<DB: RowOps>(
    conn: &mut DB::Connection,
    query: &RowQuery,
    arguments: &DB::Arguments,
    table: &Key,
    check: PlanCheck,
) -> Result<()> {
    if check == PlanCheck::Off {
        return Ok(());
    }
    let columns: Vec<_> = query.by.iter().map(|it| it.column.as_str()).collect();
    let kind = (TypeId::of::<DB>(), format!("{table} {}", columns.join(" ")));
    let remembered = || SERVED_BY_INDEX.lock().unwrap_or_else(PoisonError::into_inner);
    if remembered().contains(&kind) {
        return Ok(());
    }
    let scan = DB::row_scan(conn, query, arguments)
        .await
        .map_err(|err| failed::<DB>("checking the plan of a lock on rows of", Some(table), err))?;
    match scan {
        Some(plan) if check == PlanCheck::Deny => Err(Error::FullScan { table: table.clone(), plan }),
        Some(plan) => {
            tracing::warn!(%table, plan, "a row lock scans the whole table");
            Ok(())
        }
        None => {
            let mut remembered = remembered();
            if remembered.len() >= REMEMBERED {
                remembered.clear();
            }
            remembered.insert(kind);
            Ok(())
        }
    }
}
