//! Durations: text is checked here, an expression by the compiler.

use std::time::Duration;

use proc_macro2::TokenStream;
use quote::{ToTokens, quote_spanned};
use syn::{Expr, Lit};

use crate::{
    diagnostics::Given,
    with_lock::{
        duration,
        validate::{
            Checker,
            literal::{is_negative, literal},
        },
    },
};

impl Checker<'_> {
    pub(super) fn wait(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        if let Some(Lit::Str(text)) = literal(&given.value)
            && ["forever", "none", "infinite", "unlimited"].contains(&text.value().to_lowercase().as_str())
        {
            self.fail(text.span(), "write `wait = lockkit::Wait::Unbounded`, without quotes");
            return None;
        }
        self.duration(given, |_| None)
    }

    pub(super) fn ttl(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        self.duration(given, duration::fault_of_ttl)
    }

    pub(super) fn keep(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        self.duration(given, duration::fault_of_keep)
    }

    pub(super) fn deadline(&mut self, given: Given<Expr>) -> Option<TokenStream> {
        self.duration(given, duration::fault_of_deadline)
    }

    pub(super) fn duration(
        &mut self,
        given: Given<Expr>,
        fault: impl Fn(Duration) -> Option<&'static str>,
    ) -> Option<TokenStream> {
        let Given { name, value } = given;
        if is_negative(&value) {
            let message = format!(r#"a duration cannot be negative: write `{name} = "30s"`"#);
            self.errors.push(syn::Error::new_spanned(value, message));
            return None;
        }
        match literal(&value) {
            None => return Some(value.into_token_stream()),
            Some(Lit::Str(literal)) => {
                let text = literal.value();
                let checked = duration::parse(&text).and_then(|parsed| match fault(parsed) {
                    Some(fault) => Err(format!("`{text}` {fault}")),
                    None => Ok(parsed),
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
                let text = literal.to_token_stream().to_string();
                let message = if duration::parse(&text).is_ok() {
                    format!(r#"a duration is text: write `{name} = "{text}"`"#)
                } else {
                    format!(
                        r#"a duration has a unit: write `{name} = "30s"`, or give an expression of type `Duration`"#
                    )
                };
                self.fail(literal.span(), message);
            }
        }
        None
    }
}
