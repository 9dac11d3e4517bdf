//! Which argument goes with which strategy. Turns the arguments as written into what will be expanded.
//!
//! One mistake is one error. An argument that was not understood may be the missing one, so nothing is called missing
//! then; arguments of another kind of lock are reported together. The error stands beside the unchanged function, so
//! rustc does not report that `tx` is unknown in its body.

mod durations;
mod keys;
mod literal;
mod retry;
mod rows;

use proc_macro2::Span;
use quote::ToTokens;
use syn::{Expr, Ident, spanned::Spanned};

use crate::{
    diagnostics::{Errors, Given, error, list, nearest},
    with_lock::{
        args::Args,
        arguments::Argument,
        plan::{Answers, Idempotent, Lease, Lock, Named, Plan, Section, Session, Terms, Version},
        strategy::Strategy,
        validate::{retry::Retries, rows::Picked},
    },
};

impl Plan {
    /// `None` when something is wrong; `errors` says what.
    pub(crate) fn new(mut args: Args, errors: &mut Errors) -> Option<Self> {
        let given = args.given();
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
            row,
            ttl,
            wait,
            min_hold,
            on_lost,
            fair,
            attempts,
            deadline,
            retry_if,
            on_busy,
            map_err,
            bind,
            tx,
            pool,
            request,
            keep,
            max_answer,
            store_err,
            krate,
            broken,
            is_unclear,
        } = args;
        if strategy.is_none() && is_unclear {
            // Something else stands where the strategy goes, and is an error already.
            return None;
        }
        let (strategy, at) = errors.note(check_strategy(strategy))?;
        let check = &mut Checker { strategy, at, broken, is_unclear, errors };
        check.belong(given);
        let krate = krate.map(|it| it.value);
        let map_err = map_err.map(|it| it.value);
        let on_busy = on_busy.map(|it| it.value);
        let wait = wait.and_then(|it| check.wait(it));
        let retries = Retries { attempts, deadline, retry_if, bind };
        let lock = match strategy {
            Strategy::Lease => {
                let on = check.required(on, "on = &self.leases", "the `Leases` to take it from");
                check.fair(fair.as_ref(), keys.as_ref());
                let keys = check.keys(key, keys);
                let terms = Terms {
                    ttl: ttl.and_then(|it| check.ttl(it)),
                    min_hold: min_hold.and_then(|it| check.duration(it, |_| None)),
                    on_lost: on_lost.and_then(|it| check.on_lost(&it.value)),
                    is_fair: fair.is_some(),
                };
                check.guarded(pool.as_ref(), tx.as_ref());
                let (bind, tx) = (retries.bind.map(|it| it.value), tx.map(|it| it.value));
                let pool = pool.map(|it| it.value);
                Lock::Lease(Lease { on: on?, keys: keys?, terms, wait, on_busy, bind, tx, pool })
            }
            Strategy::Row => {
                let (on, tx) = check.transaction(on, tx);
                let retry = check.optional_retry(retries);
                let picked = Picked { by, by_any, order_by, limit, skip_locked };
                let rows = check.rows(rows, row);
                check.picked(&picked, rows.is_some());
                let table = check.required(table, r#"table = "t_items""#, "the table to lock rows of");
                let table = table.and_then(|it| check.table(&it));
                let section = Section { on: on?, wait, on_busy, tx: tx?, rows, retry };
                Lock::Row(picked.into_row(table?, section))
            }
            Strategy::Named => {
                let (on, tx) = check.transaction(on, tx);
                let retry = check.optional_retry(retries);
                let key = check.one_key(key, keys.as_ref());
                let section = Section { on: on?, wait, on_busy, tx: tx?, rows: None, retry };
                Lock::Named(Named { key: key?, section })
            }
            Strategy::Session => {
                let on = check.required(on, "on = &self.db", "the pool whose connection is to hold it");
                let key = check.one_key(key, keys.as_ref());
                Lock::Session(Session { on: on?, key: key?, wait, on_busy, bind: retries.bind.map(|it| it.value) })
            }
            Strategy::Version => {
                let tx = check.version_tx(on, tx);
                let retry = check.retry(retries);
                Lock::Version(Version { tx: tx?, retry })
            }
            Strategy::Idempotent => {
                let (on, tx) = check.transaction(on, tx);
                let key = check.one_key(key, keys.as_ref());
                let answers = check.answers(request, keep, max_answer, store_err);
                Lock::Idempotent(Idempotent { on: on?, key: key?, answers, wait, on_busy, tx: tx? })
            }
        };
        errors.is_empty().then_some(Self { krate, map_err, lock })
    }
}

/// The strategy, and where it is written.
fn check_strategy(word: Option<Ident>) -> syn::Result<(Strategy, Ident)> {
    let Some(word) = word else {
        let message = format!("which kind of lock? Start with {}: `#[with_lock(lease, …)]`", Strategy::any());
        return Err(syn::Error::new(Span::call_site(), message));
    };
    if let Some(strategy) = Strategy::of(&word) {
        return Ok((strategy, word));
    }
    let hint = match Strategy::meant(&word.to_string()) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("use {}", Strategy::any()),
    };
    Err(error(&word, format!("there is no kind of lock `{word}`; {hint}")))
}

/// Checks the arguments of one attribute.
struct Checker<'a> {
    strategy: Strategy,
    /// Where the strategy is written.
    at: Ident,
    broken: Vec<&'static str>,
    is_unclear: bool,
    errors: &'a mut Errors,
}

impl Checker<'_> {
    fn fail(&mut self, at: Span, message: impl std::fmt::Display) {
        self.errors.push(syn::Error::new(at, message));
    }

    /// Whether an argument may be missing only because it, or what was meant by it, is an error already.
    fn is_broken(&self, argument: &str) -> bool {
        self.is_unclear || self.broken.contains(&argument)
    }

    /// Refuses the arguments that the strategy does not take: one error for all that the same other strategies take.
    fn belong(&mut self, given: Vec<(&'static Argument, Ident)>) {
        let strategy = self.strategy;
        let foreign = given.into_iter().filter(|(argument, _)| !argument.is_taken_by(strategy));
        let (refused, mut left): (Vec<_>, Vec<_>) =
            foreign.partition(|(argument, _)| argument.refusal(strategy).is_some());
        // The strategy may be the mistake; then the arguments that it lacks are not missing.
        self.is_unclear |= !left.is_empty();
        while let Some((argument, at)) = left.first() {
            let (strategies, at) = (argument.strategies(), at.clone());
            let (together, others) =
                left.into_iter().partition::<Vec<_>, _>(|(argument, _)| argument.strategies() == strategies);
            left = others;
            let names: Vec<_> = together.iter().map(|(argument, _)| argument.name).collect();
            let (have, them) = if names.len() == 1 { ("has", "it") } else { ("have", "them") };
            let message = format!(
                "{} {have} no effect with `{strategy}`; remove {them}, or use {}",
                list(&names, "and"),
                list(&strategies, "or")
            );
            self.errors.push(error(&at, message));
        }
        for (argument, at) in refused {
            if let Some(message) = argument.refusal(strategy) {
                self.errors.push(error(&at, message));
            }
            if argument.name == "pool" {
                // It was meant as `on`, which is not missing then.
                self.broken.push("on");
            }
        }
    }

    /// The value of an argument that the strategy needs. `example` says how to write it, `what` what it is.
    fn required<T>(&mut self, given: Option<Given<T>>, example: &str, what: &str) -> Option<T> {
        let name = example.split([' ', '(']).next().unwrap_or_default();
        if given.is_none() && !self.is_broken(name) {
            let message = format!("`{}` needs `{example}`: {what}", self.strategy);
            self.errors.push(error(&self.at, message));
        }
        given.map(|it| it.value)
    }

    /// The pool and the transaction of a lock that lives in a transaction.
    fn transaction(&mut self, on: Option<Given<Expr>>, tx: Option<Given<Ident>>) -> (Option<Expr>, Option<Ident>) {
        let on = self.required(on, "on = &self.db", "the pool to begin the transaction on");
        let what = "the lock lives in a transaction, and this is its name in the body";
        (on, self.required(tx, "tx = tx", what))
    }

    /// The pool and the transaction of `version`, which has both or none. The outer `None` is an error.
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

    fn answers(
        &mut self,
        request: Option<Given<Expr>>,
        keep: Option<Given<Expr>>,
        max_answer: Option<Given<Expr>>,
        store_err: Option<Given<Expr>>,
    ) -> Answers {
        if let Some(Given { name, value }) = &max_answer {
            self.number(name, value, "0 bytes hold no answer: even `()` has 4 in JSON");
        }
        if let Some(given) = &store_err {
            self.test(given, "an error is an answer");
        }
        Answers {
            request: request.map(|it| it.value),
            keep: keep.and_then(|it| self.keep(it)),
            max_answer: max_answer.map(|it| it.value),
            store_err: store_err.map(|it| it.value),
        }
    }

    fn guarded(&mut self, pool: Option<&Given<Expr>>, tx: Option<&Given<Ident>>) {
        if let (Some(Given { name, .. }), None) = (pool, tx)
            && !self.is_broken("tx")
        {
            let message = "`pool` is where the transaction begins that the fence guards; add `tx = tx`, or remove it";
            self.errors.push(error(name, message));
        }
    }

    fn fair(&mut self, fair: Option<&Given<()>>, keys: Option<&Given<Expr>>) {
        if let (Some(Given { name, .. }), Some(_)) = (fair, keys) {
            let message = "`fair` has no effect with `keys`: several leases have no queue among processes; remove it";
            self.errors.push(error(name, message));
        }
    }

    /// The variant of `OnLost`.
    fn on_lost(&mut self, value: &Expr) -> Option<Ident> {
        let written = value.to_token_stream().to_string();
        let mixed = value.span().resolved_at(Span::mixed_site());
        match written.as_str() {
            "stop" => return Some(Ident::new("Stop", mixed)),
            "continue" => return Some(Ident::new("Continue", mixed)),
            _ => {}
        }
        // `"stop"` and `OnLost::Stop` mean it, too.
        let word = written.rsplit([':', ' ']).next().unwrap_or_default().trim_matches('"').to_lowercase();
        let message = match nearest(&word, &["stop", "continue"]) {
            Some(meant) => format!("`on_lost` is `stop` or `continue`; did you mean `on_lost = {meant}`?"),
            None => "`on_lost` is `stop` or `continue`: what the body does when its lease is lost".to_owned(),
        };
        self.errors.push(syn::Error::new_spanned(value, message));
        None
    }
}
