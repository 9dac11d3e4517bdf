//! What will be expanded: the arguments after they were checked. Knows neither how they are written nor what becomes of them.

use proc_macro2::{Span, TokenStream};
use syn::{Expr, Ident, LitStr};

use crate::{args::Typed, columns::By, template::Template};

/// What to expand.
pub(crate) struct Plan {
    /// The path of lockkit.
    pub(crate) krate: TokenStream,
    pub(crate) lock: Lock,
}

pub(crate) enum Lock {
    Lease(Lease),
    Row(Row),
    Named(Named),
    Session(Session),
    Version(Version),
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
}

/// How a lease is to be kept and given back.
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

#[derive(Default)]
pub(crate) struct Retry {
    pub(crate) attempts: Option<Expr>,
    /// A `Duration`.
    pub(crate) deadline: Option<TokenStream>,
    /// Which errors are worth another attempt.
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
