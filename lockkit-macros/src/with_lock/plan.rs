//! The checked arguments: what the expansion needs, without how it was written.

use proc_macro2::{Span, TokenStream};
use syn::{Expr, Ident, LitStr, Path};

use crate::with_lock::{columns::By, forms::Typed, template::Template};

/// One checked attribute.
pub(crate) struct Plan {
    /// The path of the crate lockkit, if it is not the usual one.
    pub(crate) krate: Option<Path>,
    /// What makes the function's error of an error of lockkit, if not `From`.
    pub(crate) map_err: Option<Expr>,
    pub(crate) lock: Lock,
}

pub(crate) enum Lock {
    Lease(Lease),
    Row(Row),
    Named(Named),
    Session(Session),
    Version(Version),
    Idempotent(Idempotent),
}

/// What a name in the body is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Tx,
    /// One lease or several; `commits` if the attribute commits a transaction under it.
    Lease {
        commits: bool,
    },
    Session,
    Attempt,
    /// The locked rows.
    Rows,
}

impl Lock {
    /// The names that this lock gives to the body.
    pub(crate) fn names(&self) -> Vec<(&Ident, Role)> {
        let (bind, role) = match self {
            Self::Lease(lease) => (lease.bind.as_ref(), Role::Lease { commits: lease.tx.is_some() }),
            Self::Session(session) => (session.bind.as_ref(), Role::Session),
            Self::Row(_) | Self::Named(_) | Self::Version(_) | Self::Idempotent(_) => {
                (self.retry().and_then(|it| it.bind.as_ref()), Role::Attempt)
            }
        };
        let rows = match self {
            Self::Row(row) => row.section.rows.as_ref().map(|it| &it.name),
            _ => None,
        };
        let given = [(self.tx(), Role::Tx), (bind, role), (rows, Role::Rows)];
        given.into_iter().filter_map(|(name, role)| Some((name?, role))).collect()
    }

    /// The transaction that it begins.
    pub(crate) fn tx(&self) -> Option<&Ident> {
        match self {
            Self::Lease(lease) => lease.tx.as_ref(),
            Self::Row(Row { section, .. }) | Self::Named(Named { section, .. }) => Some(&section.tx),
            Self::Session(_) => None,
            Self::Version(version) => version.tx.as_ref().map(|(_, tx)| tx),
            Self::Idempotent(idempotent) => Some(&idempotent.tx),
        }
    }

    /// How often its body may run; `None` for once.
    pub(crate) fn retry(&self) -> Option<&Retry> {
        match self {
            Self::Row(Row { section, .. }) | Self::Named(Named { section, .. }) => section.retry.as_ref(),
            Self::Version(version) => Some(&version.retry),
            Self::Lease(_) | Self::Session(_) | Self::Idempotent(_) => None,
        }
    }
}

pub(crate) struct Lease {
    pub(crate) on: Expr,
    pub(crate) keys: Keys,
    pub(crate) terms: Terms,
    /// A `Duration`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    /// The name of the lease, or of the leases, in the body.
    pub(crate) bind: Option<Ident>,
    pub(crate) tx: Option<Ident>,
    /// The pool of the transaction, if it is guarded by the fence and not committed with the lease.
    pub(crate) pool: Option<Expr>,
}

/// The options of a lease request.
pub(crate) struct Terms {
    /// A `Duration`.
    pub(crate) ttl: Option<TokenStream>,
    /// A `Duration`.
    pub(crate) min_hold: Option<TokenStream>,
    /// The variant of `OnLost`.
    pub(crate) on_lost: Option<Ident>,
    pub(crate) is_fair: bool,
}

pub(crate) struct Row {
    pub(crate) table: LitStr,
    /// Columns with one value each.
    pub(crate) by: Vec<By>,
    /// Columns with several values each.
    pub(crate) by_any: Vec<By>,
    pub(crate) order_by: Vec<Ident>,
    pub(crate) limit: Option<Expr>,
    pub(crate) skips_locked: bool,
    pub(crate) section: Section,
}

pub(crate) struct Named {
    pub(crate) key: Key,
    pub(crate) section: Section,
}

pub(crate) struct Session {
    pub(crate) on: Expr,
    pub(crate) key: Key,
    /// A `Duration` or a `Wait`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    /// The name of the session in the body.
    pub(crate) bind: Option<Ident>,
}

/// Work whose answer is stored in its transaction.
pub(crate) struct Idempotent {
    pub(crate) on: Expr,
    pub(crate) key: Key,
    pub(crate) answers: Answers,
    /// A `Duration` or a `Wait`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    pub(crate) tx: Ident,
}

/// What is stored, and for how long.
pub(crate) struct Answers {
    pub(crate) request: Option<Expr>,
    /// A `Duration`.
    pub(crate) keep: Option<TokenStream>,
    pub(crate) max_answer: Option<Expr>,
    /// A function: whether an error is an answer.
    pub(crate) store_err: Option<Expr>,
}

/// One transaction under a lock.
pub(crate) struct Section {
    pub(crate) on: Expr,
    /// A `Duration` or a `Wait`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    pub(crate) tx: Ident,
    /// The name and type of the locked rows in the body.
    pub(crate) rows: Option<Typed>,
    pub(crate) retry: Option<Retry>,
}

pub(crate) struct Version {
    /// The pool and the transaction's name.
    pub(crate) tx: Option<(Expr, Ident)>,
    pub(crate) retry: Retry,
}

pub(crate) struct Retry {
    /// What makes the body run again: rustc reports there that it moves an argument.
    pub(crate) at: Span,
    pub(crate) attempts: Option<Expr>,
    /// A `Duration`.
    pub(crate) deadline: Option<TokenStream>,
    /// A function: whether an error is worth another attempt.
    pub(crate) test: Option<Expr>,
    /// The name of the attempt's number in the body.
    pub(crate) bind: Option<Ident>,
}

pub(crate) enum Key {
    Template(Template, Span),
    Expr(Expr),
}

pub(crate) enum Keys {
    One(Key),
    Each(Vec<Key>),
    /// An `IntoIterator` of them.
    Expr(Expr),
}
