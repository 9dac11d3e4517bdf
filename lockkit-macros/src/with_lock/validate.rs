//! Which argument goes with which kind of lock. Turns the arguments as written into what will be expanded.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Expr, ExprArray, ExprLit, ExprUnary, Ident, Lit, LitStr, UnOp, spanned::Spanned};

use crate::with_lock::{
    args::{Args, Errors, Given, error},
    columns::By,
    duration,
    plan::{Key, Keys, Lease, Lock, Named, Plan, Retry, Row, Section, Session, Terms, Version},
    template::Template,
    words::{STRATEGIES, example, list, meant_strategy, nearest, strategies_with},
};

impl Plan {
    /// `None` when something is wrong; `errors` says what.
    pub(crate) fn new(args: Args, errors: &mut Errors) -> Option<Self> {
        let given = args.of_some_kinds();
        let Args {
            strategy,
            on,
            key,
            keys,
            table,
            by,
            by_any,
            order_by,
            limit,
            skip_locked,
            rows,
            ttl,
            wait,
            min_hold,
            on_lost,
            fair,
            attempts,
            deadline,
            retry_if,
            on_busy,
            bind,
            tx,
            krate,
            broken,
            is_unclear,
        } = args;
        let strategy = match strategy {
            // Something else stands where the kind of lock goes, and is an error already.
            None if is_unclear => return None,
            strategy => errors.note(check_strategy(strategy))?,
        };
        let check = &mut Checker { strategy: strategy.clone(), broken, is_unclear, errors };
        check.belong(given);
        let krate = krate.map_or_else(|| quote!(::lockkit), |it| it.value.to_token_stream());
        let on_busy_name = on_busy.as_ref().map(|it| it.name.clone());
        let on_busy = on_busy.map(|it| it.value);
        let wait = wait.and_then(|it| check.wait(it));
        let lock = match strategy.to_string().as_str() {
            "lease" => {
                let on = check.required(on, "on = &self.leases", "the `Leases` to take it from");
                check.fair(fair.as_ref(), keys.as_ref());
                let keys = check.keys(key, keys);
                let terms = Terms {
                    ttl: ttl.and_then(|it| check.ttl(it)),
                    min_hold: min_hold.and_then(|it| check.duration(it, |_| None)),
                    on_lost: on_lost.and_then(|it| check.on_lost(&it.value)),
                    is_fair: fair.is_some(),
                };
                let (bind, tx) = (bind.map(|it| it.value), tx.map(|it| it.value));
                Lock::Lease(Lease { on: on?, keys: keys?, terms, wait, on_busy, bind, tx })
            }
            "session" => {
                let on = check.required(on, "on = &self.db", "the pool whose connection is to hold it");
                let key = check.one_key(key, keys.as_ref());
                check.no_tx(tx.as_ref());
                Lock::Session(Session { on: on?, key: key?, wait, on_busy, bind: bind.map(|it| it.value) })
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
                let rows = rows.map(|it| it.value);
                if strategy == "named" {
                    let key = check.one_key(key, keys.as_ref());
                    let section = Section { on: on?, wait, on_busy, tx: tx?, rows: None, retry };
                    Lock::Named(Named { key: key?, section })
                } else {
                    let picked = Picked { by, by_any, order_by, limit, skip_locked };
                    check.picked(&picked, rows.is_some());
                    let table = check.required(table, r#"table = "t_items""#, "the table to lock rows of");
                    let table = table.and_then(|it| check.table(&it));
                    let section = Section { on: on?, wait, on_busy, tx: tx?, rows, retry };
                    Lock::Row(picked.into_row(table?, section))
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
    let hint = match meant_strategy(&word) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("use {}", list(&STRATEGIES, "or")),
    };
    Err(error(&strategy, format!("there is no kind of lock `{word}`; {hint}")))
}

/// What says which rows.
struct Picked {
    by: Option<Given<Vec<By>>>,
    by_any: Option<Given<Vec<By>>>,
    order_by: Option<Given<Vec<Ident>>>,
    limit: Option<Given<Expr>>,
    skip_locked: Option<Given<()>>,
}

impl Picked {
    fn into_row(self, table: LitStr, section: Section) -> Row {
        let Self { by, by_any, order_by, limit, skip_locked } = self;
        Row {
            table,
            by: by.map(|it| it.value).unwrap_or_default(),
            by_any: by_any.map(|it| it.value).unwrap_or_default(),
            order_by: order_by.map(|it| it.value).unwrap_or_default(),
            limit: limit.map(|it| it.value),
            skips_locked: skip_locked.is_some(),
            section,
        }
    }
}

struct Checker<'a> {
    strategy: Ident,
    broken: Vec<&'static str>,
    is_unclear: bool,
    errors: &'a mut Errors,
}

impl Checker<'_> {
    fn fail(&mut self, at: Span, message: impl std::fmt::Display) {
        self.errors.push(syn::Error::new(at, message));
    }

    /// Refuses the arguments that this kind of lock does not have: one error for all that belong to the same other kinds.
    fn belong(&mut self, mut left: Vec<Ident>) {
        left.retain(|it| !strategies_with(&it.to_string()).iter().any(|strategy| self.strategy == strategy));
        // One that is missing may be missing only because the kind of lock is the wrong one.
        self.is_unclear |= !left.is_empty();
        while let Some(first) = left.first().cloned() {
            let strategies = strategies_with(&first.to_string());
            let (together, others) =
                left.into_iter().partition::<Vec<_>, _>(|it| strategies_with(&it.to_string()) == strategies);
            left = others;
            let names: Vec<_> = together.iter().map(ToString::to_string).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let (have, them) = if names.len() == 1 { ("has", "it") } else { ("have", "them") };
            let message = format!(
                "{} {have} no effect with `{}`; remove {them}, or use {}",
                list(&names, "and"),
                self.strategy,
                list(strategies, "or")
            );
            self.errors.push(error(&first, message));
        }
    }

    fn required<T>(&mut self, given: Option<Given<T>>, example: &str, what: &str) -> Option<T> {
        let broken = self.is_unclear || self.broken.iter().any(|name| example.starts_with(name));
        if given.is_none() && !broken {
            let message = format!("`{}` needs `{example}`: {what}", self.strategy);
            self.errors.push(error(&self.strategy, message));
        }
        given.map(|it| it.value)
    }

    fn keys(&mut self, key: Option<Given<Expr>>, keys: Option<Given<Expr>>) -> Option<Keys> {
        let Some(Given { name, value }) = keys else {
            let is_broken = key.is_none() && (self.is_unclear || self.broken.contains(&"keys"));
            return if is_broken { None } else { self.one_key(key, None).map(Keys::One) };
        };
        if key.is_some() {
            self.errors.push(error(&name, "`key` and `keys` are both given; keep one of them"));
            return None;
        }
        match ungrouped(&value) {
            Expr::Array(ExprArray { elems, .. }) if elems.is_empty() => {
                let message = "`keys` names no lock; write `keys = [\"account:{from}\", \"account:{to}\"]`";
                self.errors.push(error(&name, message));
                None
            }
            Expr::Array(ExprArray { elems, .. }) => {
                let keys: Vec<_> = elems.iter().map(|it| self.key(it.clone())).collect();
                keys.into_iter().collect::<Option<_>>().map(Keys::Each)
            }
            Expr::Lit(_) => {
                self.errors.push(error(&name, "`keys` is for several; write `key = …` for one, or `keys = […, …]`"));
                None
            }
            _ => Some(Keys::Expr(value)),
        }
    }

    /// The key of a lock that has no `keys`.
    fn one_key(&mut self, key: Option<Given<Expr>>, keys: Option<&Given<Expr>>) -> Option<Key> {
        if key.is_none() && keys.is_some() {
            return None;
        }
        if let Some(Given { name, value }) = &key
            && matches!(ungrouped(value), Expr::Array(_))
        {
            let instead =
                if self.strategy == "lease" { "write `keys = […]` for several" } else { "write `key = \"…\"`" };
            self.errors.push(error(name, format!("`key` is the name of one lock; {instead}")));
            return None;
        }
        let key = self.required(key, r#"key = "order:{user_id}""#, "the name of the lock")?;
        self.key(key)
    }

    fn key(&mut self, key: Expr) -> Option<Key> {
        let literal = match literal(&key) {
            None => return Some(Key::Expr(key)),
            Some(Lit::Str(literal)) => literal,
            Some(other) => {
                self.fail(other.span(), r#"a key is text: write `"order:{user_id}"`, or give a `String` or `Key`"#);
                return None;
            }
        };
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
        if let Some(fault) = fault_of_table(&literal.value()) {
            self.fail(
                literal.span(),
                format!("`{}` cannot be the name of a table: {fault}", literal.value().escape_debug()),
            );
            return None;
        }
        Some(literal.clone())
    }

    /// Checks what says which rows, and that the body knows which of them it got.
    fn picked(&mut self, picked: &Picked, has_rows: bool) {
        let Picked { by, by_any, order_by, limit, skip_locked } = picked;
        let is_queue = order_by.is_some() && limit.is_some() && skip_locked.is_some();
        let is_broken = self.is_unclear || self.broken.iter().any(|it| ["by", "by_any"].contains(it));
        if by.is_none() && by_any.is_none() && !is_queue && !is_broken {
            let message = "`row` needs `by(item_id = item_id)` or `by_any(item_id = item_ids)`: the columns and values of the rows to lock";
            self.errors.push(error(&self.strategy, message));
        }
        for Given { name, value } in [by, by_any].into_iter().flatten() {
            if let (true, Some(example)) = (value.is_empty(), example(&name.to_string())) {
                self.errors.push(error(name, format!("`{name}` names no column; write `{example}`")));
            }
        }
        if let Some(Given { name, value }) = order_by
            && value.is_empty()
        {
            self.errors.push(error(name, "`order_by` names no column; write `order_by(item_id)`"));
        }
        let by = [by, by_any].into_iter().flatten().flat_map(|it| &it.value).map(|it| &it.column);
        self.columns(by);
        self.columns(order_by.iter().flat_map(|it| &it.value));
        if let Some(Given { name, value }) = limit {
            self.number(name, value, "a limit of 0 locks no row");
        }
        if has_rows || self.is_unclear || self.broken.contains(&"rows") {
            return;
        }
        if let Some(Given { name, .. }) = skip_locked {
            let message = "with `skip_locked` the body must know which rows it got: add `rows = items: Vec<Item>`; or write \
                           `wait = \"0s\"` instead, to be busy at once when one of the rows is locked";
            self.errors.push(error(name, message));
        } else if let Some(Given { name, .. }) = limit {
            let message = "with `limit` the body must know which rows it got: add `rows = items: Vec<Item>`";
            self.errors.push(error(name, message));
        }
    }

    /// Refuses columns that cannot be, or are there twice.
    fn columns<'c>(&mut self, columns: impl Iterator<Item = &'c Ident>) {
        let mut seen = Vec::new();
        for column in columns {
            let name = syn::ext::IdentExt::unraw(column).to_string();
            if let Some(fault) = fault_of_name(&name) {
                self.fail(column.span(), format!("`{name}` cannot be the name of a column: {fault}"));
            } else if seen.contains(&name) {
                self.fail(column.span(), format!("the column `{name}` is given twice; remove one"));
            }
            seen.push(name);
        }
    }

    /// Refuses literals that are no `u32`, or 0.
    fn number(&mut self, name: &Ident, value: &Expr, zero: &str) {
        let is_negative = matches!(ungrouped(value), Expr::Unary(ExprUnary { op: UnOp::Neg(_), .. }));
        match literal(value) {
            Some(Lit::Int(number)) if number.base10_digits() == "0" => self.fail(number.span(), zero),
            Some(Lit::Int(_)) => {}
            None if !is_negative => {}
            _ => {
                let message = format!("`{name}` is a whole number, 1 or more: write `{name} = 3`");
                self.errors.push(syn::Error::new_spanned(value, message));
            }
        }
    }

    fn ttl(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        let least = Duration::from_millis(50);
        let short = "is too short to be renewed in time; use `50ms` or more";
        self.duration(given, |it| (it < least).then_some(short))
    }

    fn fair(&mut self, fair: Option<&Given<()>>, keys: Option<&Given<Expr>>) {
        if let (Some(Given { name, .. }), Some(_)) = (fair, keys) {
            let message = "`fair` has no effect with `keys`: several leases have no queue among processes; remove it";
            self.errors.push(error(name, message));
        }
    }

    fn on_lost(&mut self, value: &Expr) -> Option<Ident> {
        let written = value.to_token_stream().to_string();
        let mixed = value.span().resolved_at(Span::mixed_site());
        match written.as_str() {
            "stop" => return Some(Ident::new("Stop", mixed)),
            "continue" => return Some(Ident::new("Continue", mixed)),
            _ => {}
        }
        // Also of `"stop"` and `OnLost::Stop`.
        let word = written.rsplit([':', ' ']).next().unwrap_or_default().trim_matches('"').to_lowercase();
        let message = match nearest(&word, &["stop", "continue"]) {
            Some(meant) => format!("`on_lost` is `stop` or `continue`; did you mean `on_lost = {meant}`?"),
            None => "`on_lost` is `stop` or `continue`: what the body does when its lease is lost".to_owned(),
        };
        self.errors.push(syn::Error::new_spanned(value, message));
        None
    }

    fn no_tx(&mut self, tx: Option<&Given<Ident>>) {
        if let Some(Given { name, .. }) = tx {
            let message = "a session lock may be lost before a commit, so it has no `tx`; use `lease`, whose commit fails then, \
                           or `named` for one transaction";
            self.errors.push(error(name, message));
        }
    }

    fn wait(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        if let Some(Lit::Str(text)) = literal(&given.value)
            && ["forever", "none", "infinite", "unlimited"].contains(&text.value().to_lowercase().as_str())
        {
            let message = if self.strategy == "lease" {
                "the wait for a lease is bounded; write a long one, such as `wait = \"24h\"`"
            } else {
                "write `wait = lockkit::Wait::Forever`, without quotes"
            };
            self.fail(text.span(), message);
            return None;
        }
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
        if let Expr::Unary(ExprUnary { op: UnOp::Neg(_), .. }) = ungrouped(&value) {
            let message = format!(r#"a duration cannot be negative: write `{name} = "30s"`"#);
            self.errors.push(syn::Error::new_spanned(value, message));
            return None;
        }
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
        if let Some(Given { name, value }) = &attempts {
            self.number(name, value, "at least one attempt is needed to do anything");
        }
        if let Some(Given { value, .. }) = &retry_if
            && literal(value).is_some()
        {
            let message = "`retry_if` is a function that says whether an error is worth another attempt: write \
                           `retry_if = path::to::test`, or `retry_if = |err: &MyError| …`";
            self.errors.push(syn::Error::new_spanned(value, message));
        }
        Retry {
            attempts: attempts.map(|it| it.value),
            deadline: deadline.and_then(|it| self.deadline(it)),
            test: retry_if.map(|it| it.value),
            bind: bind.map(|it| it.value),
        }
    }
}

/// The expression itself, when a `macro_rules!` macro passed it on.
fn ungrouped(mut expr: &Expr) -> &Expr {
    while let Expr::Group(group) = expr {
        expr = &group.expr;
    }
    expr
}

fn literal(expr: &Expr) -> Option<&Lit> {
    match ungrouped(expr) {
        Expr::Lit(ExprLit { lit, .. }) => Some(lit),
        _ => None,
    }
}

/// What is wrong with the name of a table, which may have its schema before it.
pub(crate) fn fault_of_table(name: &str) -> Option<&'static str> {
    if name.matches('.').count() > 1 {
        return Some("it has more than a schema and a name; write `app.items`");
    }
    let (schema, table) = name.split_once('.').map_or((None, name), |(schema, table)| (Some(schema), table));
    schema.and_then(fault_of_name).or_else(|| fault_of_name(table))
}

/// What is wrong with the name of a column, or with one part of that of a table. The same rules as in `lockkit/src/ident.rs`.
pub(crate) fn fault_of_name(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if name.len() > 63 {
        Some("it is longer than 63 bytes")
    } else if name.starts_with(|it: char| it.is_ascii_digit()) {
        Some("it starts with a digit")
    } else if name.contains('.') {
        Some("a column is named without its table")
    } else if !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_') {
        Some("only ASCII letters, digits and `_` are allowed")
    } else {
        None
    }
}
