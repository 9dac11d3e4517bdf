//! Which argument goes with which kind of lock. Turns the arguments as written into what will be expanded.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Expr, ExprLit, Ident, Lit, LitStr, spanned::Spanned};

use crate::{
    args::{Args, By, Errors, Given, error, list, nearest},
    duration,
    template::Template,
};

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
    Version(Version),
}

pub(crate) struct Lease {
    pub(crate) on: Expr,
    pub(crate) key: Key,
    /// A `Duration`.
    pub(crate) ttl: Option<TokenStream>,
    /// A `Duration`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    /// The name of the lease in the body.
    pub(crate) bind: Option<Ident>,
    pub(crate) tx: Option<Ident>,
}

pub(crate) struct Row {
    pub(crate) table: LitStr,
    pub(crate) by: Vec<By>,
    pub(crate) section: Section,
}

pub(crate) struct Named {
    pub(crate) key: Key,
    pub(crate) section: Section,
}

/// One transaction under a lock.
pub(crate) struct Section {
    pub(crate) on: Expr,
    /// A `Duration` or a `Wait`.
    pub(crate) wait: Option<TokenStream>,
    pub(crate) on_busy: Option<Expr>,
    pub(crate) tx: Ident,
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

const STRATEGIES: [&str; 4] = ["lease", "row", "named", "version"];

/// The arguments that not every kind of lock has.
const HAS: [(&str, &[&str]); 8] = [
    ("key", &["lease", "named"]),
    ("table", &["row"]),
    ("by", &["row"]),
    ("ttl", &["lease"]),
    ("wait", &["lease", "row", "named"]),
    ("attempts", &["row", "named", "version"]),
    ("deadline", &["row", "named", "version"]),
    ("retry_if", &["row", "named", "version"]),
];

impl Plan {
    /// `None` when something is wrong; `errors` says what.
    pub(crate) fn new(args: Args, errors: &mut Errors) -> Option<Self> {
        let Args {
            strategy,
            on,
            key,
            table,
            by,
            ttl,
            wait,
            attempts,
            deadline,
            retry_if,
            on_busy,
            bind,
            tx,
            krate,
            broken,
        } = args;
        let strategy = errors.note(check_strategy(strategy))?;
        let check = &mut Checker { strategy: strategy.clone(), broken, errors };
        check.belongs("key", key.as_ref());
        check.belongs("table", table.as_ref());
        check.belongs("by", by.as_ref());
        check.belongs("ttl", ttl.as_ref());
        check.belongs("wait", wait.as_ref());
        check.belongs("attempts", attempts.as_ref());
        check.belongs("deadline", deadline.as_ref());
        check.belongs("retry_if", retry_if.as_ref());
        let krate = krate.map_or_else(|| quote!(::lockkit), |it| it.value.to_token_stream());
        let on_busy_name = on_busy.as_ref().map(|it| it.name.clone());
        let on_busy = on_busy.map(|it| it.value);
        let wait = wait.and_then(|it| check.wait(it));
        let lock = match strategy.to_string().as_str() {
            "lease" => {
                let on = check.required(on, "on = &self.leases", "the `Leases` to take it from");
                let key = check.key(key);
                let ttl = ttl.and_then(|it| check.ttl(it));
                let (bind, tx) = (bind.map(|it| it.value), tx.map(|it| it.value));
                Lock::Lease(Lease { on: on?, key: key?, ttl, wait, on_busy, bind, tx })
            }
            "version" => {
                if let Some(name) = on_busy_name {
                    let message = "`on_busy` has no effect with `version`, which waits for nobody; remove it";
                    check.errors.push(error(&name, message));
                }
                let tx = check.version_tx(on, tx);
                let retry = check.retry(attempts, deadline, retry_if, bind);
                Lock::Version(Version { tx: tx?, retry })
            }
            _ => {
                let on = check.required(on, "on = &self.db", "the pool to begin the transaction on");
                let tx =
                    check.required(tx, "tx = tx", "the lock lives in a transaction, and this is its name in the body");
                let retry = check.optional_retry(attempts, deadline, retry_if, bind);
                if strategy == "named" {
                    let key = check.key(key);
                    let section = Section { on: on?, wait, on_busy, tx: tx?, retry };
                    Lock::Named(Named { key: key?, section })
                } else {
                    let table = check.required(table, r#"table = "t_items""#, "the table to lock rows of");
                    let table = table.and_then(|it| check.table(&it));
                    let by = check.required(by, "by(item_id = item_id)", "the columns and values of the rows to lock");
                    let by = by.map(|it| check.columns(it));
                    let section = Section { on: on?, wait, on_busy, tx: tx?, retry };
                    Lock::Row(Row { table: table?, by: by?, section })
                }
            }
        };
        errors.is_empty().then_some(Self { krate, lock })
    }
}

fn check_strategy(strategy: Option<Ident>) -> syn::Result<Ident> {
    let Some(strategy) = strategy else {
        let message = format!("which kind of lock? Start with {}: `#[with_lock(lease, …)]`", list(&STRATEGIES, "or"));
        return Err(syn::Error::new(Span::call_site(), message));
    };
    let word = strategy.to_string();
    if STRATEGIES.contains(&word.as_str()) {
        return Ok(strategy);
    }
    Err(error(
        &strategy,
        match nearest(&word, &STRATEGIES) {
            _ if word == "session" => "session locks are not in this version of lockkit; use `lease`".to_owned(),
            Some(meant) => format!("there is no kind of lock `{word}`; did you mean `{meant}`?"),
            None => format!("there is no kind of lock `{word}`; use {}", list(&STRATEGIES, "or")),
        },
    ))
}

struct Checker<'a> {
    strategy: Ident,
    broken: Vec<&'static str>,
    errors: &'a mut Errors,
}

impl Checker<'_> {
    fn fail(&mut self, at: Span, message: impl std::fmt::Display) {
        self.errors.push(syn::Error::new(at, message));
    }

    fn belongs<T>(&mut self, option: &str, given: Option<&Given<T>>) {
        let (Some(given), Some((_, strategies))) = (given, HAS.iter().find(|(name, _)| *name == option)) else {
            return;
        };
        if !strategies.iter().any(|it| self.strategy == it) {
            let message = format!(
                "`{option}` has no effect with `{}`; remove it, or use {}",
                self.strategy,
                list(strategies, "or")
            );
            self.errors.push(error(&given.name, message));
        }
    }

    fn required<T>(&mut self, given: Option<Given<T>>, example: &str, what: &str) -> Option<T> {
        let broken = self.broken.iter().any(|name| example.starts_with(name));
        if given.is_none() && !broken {
            let message = format!("`{}` needs `{example}`: {what}", self.strategy);
            self.errors.push(error(&self.strategy, message));
        }
        given.map(|it| it.value)
    }

    fn key(&mut self, given: Option<Given<Expr>>) -> Option<Key> {
        let key = self.required(given, r#"key = "order:{user_id}""#, "the name of the lock")?;
        let Some(Lit::Str(literal)) = literal(&key) else { return Some(Key::Expr(key)) };
        match Template::parse(&literal.value()) {
            Ok(template) => Some(Key::Template(template, literal.span())),
            Err(message) => {
                self.fail(literal.span(), message);
                None
            }
        }
    }

    fn table(&mut self, table: &Expr) -> Option<LitStr> {
        let Some(Lit::Str(literal)) = literal(table) else {
            self.fail(table.span(), r#"the table is a string literal: `table = "t_items"`"#);
            return None;
        };
        if let Some(fault) = fault_of_name(&literal.value()) {
            self.fail(
                literal.span(),
                format!("`{}` cannot be the name of a table: {fault}", literal.value().escape_debug()),
            );
            return None;
        }
        Some(literal.clone())
    }

    fn columns(&mut self, by: Vec<By>) -> Vec<By> {
        if by.is_empty() {
            let message = "`by` names no column; write `by(item_id = item_id)`";
            self.errors.push(error(&self.strategy, message));
        }
        for By { column, .. } in &by {
            let name = syn::ext::IdentExt::unraw(column).to_string();
            if let Some(fault) = fault_of_name(&name) {
                self.fail(column.span(), format!("`{name}` cannot be the name of a column: {fault}"));
            }
        }
        by
    }

    fn ttl(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        let least = Duration::from_millis(50);
        let short = "is too short to be renewed in time; use `50ms` or more";
        self.duration(given, |it| (it < least).then_some(short))
    }

    fn wait(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        self.duration(given, |_| None)
    }

    fn deadline(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        self.duration(given, |it| it.is_zero().then_some("leaves no time for even one attempt"))
    }

    fn duration(
        &mut self,
        given: Given<Expr>,
        fault: impl Fn(Duration) -> Option<&'static str>,
    ) -> Option<TokenStream> {
        let Given { name, value } = given;
        match literal(&value) {
            None => return Some(value.into_token_stream()),
            Some(Lit::Str(literal)) => {
                let text = literal.value();
                let checked = duration::parse(&text).and_then(|it| match fault(it) {
                    Some(fault) => Err(format!("`{text}` {fault}")),
                    None => Ok(it),
                });
                match checked {
                    Ok(duration) => {
                        let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                        return Some(quote_spanned!(literal.span()=> ::core::time::Duration::new(#secs, #nanos)));
                    }
                    Err(message) => self.fail(literal.span(), message),
                }
            }
            Some(literal) => {
                let message = format!(
                    r#"a duration has a unit: write `{name} = "30s"`, or give an expression of type `Duration`"#
                );
                self.fail(literal.span(), message);
            }
        }
        None
    }

    /// The outer `None` is an error.
    #[expect(clippy::option_option)]
    fn version_tx(&mut self, on: Option<Given<Expr>>, tx: Option<Given<Ident>>) -> Option<Option<(Expr, Ident)>> {
        match (on, tx) {
            (None, None) => Some(None),
            (Some(on), Some(tx)) => Some(Some((on.value, tx.value))),
            (Some(Given { name, .. }), None) => {
                self.fail(name.span(), "`on` has no effect without a transaction; add `tx = tx`, or remove it");
                None
            }
            (None, Some(Given { name, .. })) => {
                self.fail(name.span(), "`tx` needs `on = &self.db`: the pool to begin the transaction on");
                None
            }
        }
    }

    fn optional_retry(
        &mut self,
        attempts: Option<Given<Expr>>,
        deadline: Option<Given<Expr>>,
        retry_if: Option<Given<Expr>>,
        bind: Option<Given<Ident>>,
    ) -> Option<Retry> {
        if attempts.is_some() || deadline.is_some() {
            return Some(self.retry(attempts, deadline, retry_if, bind));
        }
        if let Some(Given { name, .. }) = retry_if {
            let message = "`retry_if` has no effect without `attempts` or `deadline`; add one, or remove it";
            self.errors.push(error(&name, message));
        }
        if let Some(Given { name, .. }) = bind {
            let message = "`as` is the number of the attempt here, and there is only one; add `attempts` or `deadline`, or \
                           remove it";
            self.errors.push(error(&name, message));
        }
        None
    }

    fn retry(
        &mut self,
        attempts: Option<Given<Expr>>,
        deadline: Option<Given<Expr>>,
        retry_if: Option<Given<Expr>>,
        bind: Option<Given<Ident>>,
    ) -> Retry {
        if let Some(Given { value, .. }) = &attempts
            && let Some(Lit::Int(number)) = literal(value)
            && number.base10_digits() == "0"
        {
            self.fail(number.span(), "at least one attempt is needed to do anything");
        }
        Retry {
            attempts: attempts.map(|it| it.value),
            deadline: deadline.and_then(|it| self.deadline(it)),
            test: retry_if.map(|it| it.value),
            bind: bind.map(|it| it.value),
        }
    }
}

/// The literal, also when a `macro_rules!` macro passed it on.
fn literal(mut expr: &Expr) -> Option<&Lit> {
    while let Expr::Group(group) = expr {
        expr = &group.expr;
    }
    match expr {
        Expr::Lit(ExprLit { lit, .. }) => Some(lit),
        _ => None,
    }
}

/// What is wrong with the name of a table or column. The same rules as in `lockkit/src/ident.rs`.
pub(crate) fn fault_of_name(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if name.len() > 63 {
        Some("it is longer than 63 bytes")
    } else if name.starts_with(|it: char| it.is_ascii_digit()) {
        Some("it starts with a digit")
    } else if name.contains('.') {
        Some("give the bare name of the table; choose its schema on the connection (search_path, or USE)")
    } else if !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_') {
        Some("only ASCII letters, digits and `_` are allowed")
    } else {
        None
    }
}
