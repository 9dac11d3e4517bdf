//! The plan check: whether a row lock would read the whole table. Asks the database once for each statement.
//!
//! A row lock gets a bare connection, which does not know its pool. So the memory of served statements is keyed by the
//! kind of database and the text of the statement. It stores positive answers only and is bounded; in the worst case a
//! scan is not refused. The key has a hash of the values where another value may be read in another way (a partial
//! index), and on MySQL and MariaDB their types, since a number is not looked up in an index of text.

use std::{any::TypeId, collections::HashMap, sync::LazyLock};

use crate::{
    mutex::Mutex,
    observe,
    sql::{Access, Plan, RowOps, RowQuery, Values, failed},
    value::{
        error::{Error, Result},
        key::Key,
    },
};

/// Whether a row lock that would read the whole table is refused. Defaults to [`Deny`](Self::Deny).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlanCheck {
    /// Lock without the check.
    Off,
    /// Log a warning with the plan, and lock.
    Warn,
    /// Refuse with [`Error::FullScan`] before anything is locked.
    #[default]
    Deny,
}

/// Cache key: the kind of database and the text of a selection, with a hash of its values if other values may get
/// another plan.
type Statement = (TypeId, String, Option<u64>);

/// Selections that passed the check in this process, with their access path.
static SERVED_BY_INDEX: LazyLock<Mutex<HashMap<Statement, Access>>> = LazyLock::new(Mutex::default);

/// Size limit of the cache. When it is reached, the cache is emptied.
const REMEMBERED: usize = 4096;

/// The access path of the rows. Refuses a row lock that no index serves, or warns of it. Costs round trips only the
/// first time.
pub(crate) async fn access<DB: RowOps>(
    conn: &mut DB::Connection,
    query: &RowQuery,
    values: &Values<DB>,
    table: &Key,
    check: PlanCheck,
) -> Result<Access> {
    if check == PlanCheck::Off {
        return Ok(Access::default());
    }
    let of_any = of_any_values::<DB>(query, values);
    if let Some(access) = SERVED_BY_INDEX.lock().get(&of_any) {
        return Ok(access.clone());
    }
    let of_these = of_these_values(&of_any, values);
    if let Some(access) = SERVED_BY_INDEX.lock().get(&of_these) {
        return Ok(access.clone());
    }
    // Boxed: seldom needed, and most of the future of a row lock.
    let plan = Box::pin(DB::row_plan(conn, query, values))
        .await
        .map_err(|err| failed::<DB>("checking the plan of a lock on rows of", Some(table), err))?;
    match plan {
        Plan::Served(access) => Ok(remember(of_any, access)),
        Plan::ServedOnce(access) => Ok(remember(of_these, access)),
        Plan::NoRows => Ok(Access::default()),
        Plan::View if check == PlanCheck::Deny => {
            let reason =
                format!("names the view `{table}`, which cannot be locked; lock the rows of the table that it reads");
            Err(Error::InvalidOption { option: "table", reason })
        }
        Plan::View => {
            observe::names_view(table);
            Ok(Access::default())
        }
        Plan::Scan(plan) if check == PlanCheck::Deny => Err(Error::FullScan { table: table.clone(), plan }),
        Plan::Scan(plan) => {
            observe::scans_table(table, &plan);
            Ok(Access::default())
        }
    }
}

fn remember(statement: Statement, access: Access) -> Access {
    let mut served = SERVED_BY_INDEX.lock();
    if served.len() >= REMEMBERED {
        served.clear();
    }
    served.insert(statement, access.clone());
    access
}

/// Removes a selection from the cache, because its index or column no longer exists.
pub(crate) fn forget<DB: RowOps>(query: &RowQuery, values: &Values<DB>) {
    let of_any = of_any_values::<DB>(query, values);
    let mut served = SERVED_BY_INDEX.lock();
    served.remove(&of_these_values(&of_any, values));
    served.remove(&of_any);
}

fn of_any_values<DB: RowOps>(query: &RowQuery, values: &Values<DB>) -> Statement {
    (TypeId::of::<DB>(), DB::row_text(query, values), None)
}

fn of_these_values<DB: RowOps>((database, text, _): &Statement, values: &Values<DB>) -> Statement {
    (*database, text.clone(), Some(values.hash()))
}
