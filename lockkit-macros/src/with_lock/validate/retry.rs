//! Whether and how often the body runs again.

use syn::{Expr, Ident, Lit};

use crate::{
    diagnostics::{Given, error},
    with_lock::{
        plan::Retry,
        validate::{
            Checker,
            literal::{is_negative, literal},
        },
    },
};

/// The arguments of a retry, as written.
pub(super) struct Retries {
    pub(super) attempts: Option<Given<Expr>>,
    pub(super) deadline: Option<Given<Expr>>,
    pub(super) retry_if: Option<Given<Expr>>,
    /// `as`: the name of the attempt's number. With `lease` and `session`, which run once, the name of the lock.
    pub(super) bind: Option<Given<Ident>>,
}

impl Checker<'_> {
    /// `None` for a body that runs once.
    pub(super) fn optional_retry(&mut self, given: Retries) -> Option<Retry> {
        if given.attempts.is_some() || given.deadline.is_some() {
            return Some(self.retry(given));
        }
        if let Some(Given { name, .. }) = given.retry_if {
            let message = "`retry_if` has no effect without `attempts` or `deadline`; add one, or remove it";
            self.errors.push(error(&name, message));
        }
        if let Some(Given { name, .. }) = given.bind {
            let message = "`as` is the number of the attempt here, and there is only one; add `attempts` or \
                           `deadline`, or remove it";
            self.errors.push(error(&name, message));
        }
        None
    }

    pub(super) fn retry(&mut self, given: Retries) -> Retry {
        let Retries { attempts, deadline, retry_if, bind } = given;
        if let Some(Given { name, value }) = &attempts {
            self.number(name, value, "at least one attempt is needed to do anything");
        }
        if let Some(given) = &retry_if {
            self.test(given, "an error is worth another attempt");
        }
        let at = attempts.as_ref().or(deadline.as_ref()).map_or(self.at.span(), |it| it.name.span());
        Retry {
            at,
            attempts: attempts.map(|it| it.value),
            deadline: deadline.and_then(|it| self.deadline(it)),
            test: retry_if.map(|it| it.value),
            bind: bind.map(|it| it.value),
        }
    }

    /// Refuses literals where a function says `whether` something is so.
    pub(super) fn test(&mut self, Given { name, value }: &Given<Expr>, whether: &str) {
        if literal(value).is_some() {
            let message = format!(
                "`{name}` is a function that says whether {whether}: write `{name} = path::to::test`, or \
                 `{name} = |err: &MyError| …`"
            );
            self.errors.push(syn::Error::new_spanned(value, message));
        }
    }

    /// Refuses literals that are no whole number, or 0.
    pub(super) fn number(&mut self, name: &Ident, value: &Expr, zero: &str) {
        match literal(value) {
            Some(Lit::Int(number)) if number.base10_digits() == "0" => self.fail(number.span(), zero),
            Some(Lit::Int(_)) => {}
            None if !is_negative(value) => {}
            _ => {
                let message = format!("`{name}` is a whole number, 1 or more: write `{name} = 3`");
                self.errors.push(syn::Error::new_spanned(value, message));
            }
        }
    }
}
