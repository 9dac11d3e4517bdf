//! Several `#[with_lock]` on one function: which of them go together, and what their body must not do.
//!
//! The compiler expands the upper attribute first, and the lower one would then see a body with the upper lock inside.
//! So the upper attribute takes those below it along, by the last segment of their path, and puts each into the body of
//! the one above. Two transactions of one name are refused: a write to a row that the outer one has locked would wait
//! for it for ever, and no database detects a deadlock through the client. `version` without its own transaction is
//! refused below a `tx`: each attempt would add its writes to those of the failed one.

use proc_macro2::{Ident, TokenStream};

use crate::{
    diagnostics::{Errors, error},
    with_lock::{
        plan::{Lock, Role},
        uses::{Misuse, misuses},
    },
};

/// Refuses locks that do not nest. They are those of one function, from the upper to the lower, each with the word of
/// its strategy.
pub(crate) fn check(locks: &[(&Ident, &Lock)], errors: &mut Errors) {
    for (at, (strategy, lock)) in locks.iter().enumerate() {
        let above = || locks[..at].iter().map(|(_, above)| *above);
        for (name, role) in lock.names() {
            let taken = above().flat_map(Lock::names).find(|(other, _)| *other == name);
            if let Some((_, other)) = taken {
                errors.push(error(name, same_name(name, role, other)));
            }
        }
        let outer = above().find_map(Lock::tx);
        if let (Some(outer), Some(_)) = (outer, lock.tx())
            && (matches!(lock, Lock::Idempotent(_)) || above().any(|it| matches!(it, Lock::Idempotent(_))))
        {
            let message = format!(
                "`{strategy}` begins another transaction than `{outer}` above, and an answer is stored with the work \
                 of one transaction only: the other one could fail alone; take the lock in the body, on its `&mut *tx`"
            );
            errors.push(error(strategy, message));
        }
        if let (Some(_), None, Some(outer)) = (lock.retry(), lock.tx(), outer) {
            let message = format!(
                "every attempt would write into the one transaction `{outer}` of an attribute above, also those that \
                 fail; put `{strategy}` above that attribute, so that each attempt has a transaction of its own"
            );
            errors.push(error(strategy, message));
        }
    }
}

fn same_name(name: &Ident, role: Role, other: Role) -> String {
    if role == Role::Tx && other == Role::Tx {
        return format!(
            "`{name}` is the transaction of an attribute above, and this attribute begins another one; give that \
             another name, or remove this attribute and take its lock in the body, on `&mut *{name}`"
        );
    }
    format!("an attribute above has the name `{name}` already; use another one")
}

/// Refuses a body that commits, rolls back, moves or releases what the attributes end.
pub(crate) fn check_body(locks: &[&Lock], body: &TokenStream, errors: &mut Errors) {
    let mut said = Vec::new();
    for (name, role) in locks.iter().flat_map(|it| it.names()) {
        for (at, misuse) in misuses(body, name) {
            // `lease.commit(tx)` misuses both names, and is one error.
            if let Some(message) = refusal(name, role, &misuse)
                && !said.contains(&format!("{at:?}"))
            {
                said.push(format!("{at:?}"));
                errors.push(syn::Error::new(at, message));
            }
        }
    }
}

fn refusal(name: &Ident, role: Role, misuse: &Misuse) -> Option<String> {
    let commit = "`#[with_lock]` commits when the body returns `Ok`; remove this `commit` and return `Ok(…)`";
    let method = match misuse {
        Misuse::Call { method } | Misuse::GivenAway { method: Some(method) } => method.as_str(),
        Misuse::GivenAway { method: None } => "",
        Misuse::Moved => "move",
        Misuse::Executor => "executor",
    };
    match (role, method) {
        (Role::Tx | Role::Lease { commits: true }, "commit") => Some(commit.to_owned()),
        (Role::Tx, "rollback") => Some(
            "`#[with_lock]` rolls back when the body returns `Err`; remove this `rollback` and return `Err(…)`"
                .to_owned(),
        ),
        (Role::Tx, "executor") => {
            Some(format!("a query of sqlx takes the connection in the transaction: `&mut *{name}`"))
        }
        (Role::Tx, "move") => Some(format!(
            "`{name}` cannot leave the body: `#[with_lock]` commits it when the body returns `Ok`; remove `move`, or \
             begin a transaction of its own in the task that is spawned here"
        )),
        (Role::Tx, "") => Some(format!(
            "`{name}` stays in the body: `#[with_lock]` commits it when the body returns `Ok` and rolls it back on \
             `Err`; lend it: `&mut {name}`"
        )),
        (Role::Lease { .. } | Role::Session, "release") => Some(format!(
            "`#[with_lock]` gives `{name}` back when the body returns; remove this `release`, and return where the \
             lock is not needed any more"
        )),
        _ => None,
    }
}
