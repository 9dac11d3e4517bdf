//! The warning that all callers of a function with arguments share one key.
//!
//! It may be meant, so it is no error. A macro cannot warn: the expansion uses a deprecated item at the text, and
//! `key = const "…"` leaves it out. Session locks, which are for roles, are exempt.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};

use crate::{
    diagnostics::list,
    with_lock::{
        bindings::Bindings,
        plan::{Idempotent, Key, Keys, Lease, Lock, Named},
        uses::mentions,
    },
};

/// The warning, if the keys of the lock capture nothing while the function has arguments that no attribute mentions. It
/// is the use of a deprecated item: macros have no other warnings.
pub(crate) fn warning(lock: &Lock, arguments: &Bindings, attributes: &[TokenStream]) -> TokenStream {
    let (argument, key) = match lock {
        Lock::Lease(Lease { keys: Keys::One(key), .. })
        | Lock::Named(Named { key, .. })
        | Lock::Idempotent(Idempotent { key, .. }) => ("key", constant(key)),
        Lock::Lease(Lease { keys: Keys::Each(keys), .. }) => {
            let keys: Option<Vec<_>> = keys.iter().map(constant).collect();
            ("keys", keys.and_then(|it| it.into_iter().next()))
        }
        // A role has one name.
        Lock::Lease(_) | Lock::Session(_) | Lock::Row(_) | Lock::Version(_) => return TokenStream::new(),
    };
    let is_unused = |it: &&Ident| match lock {
        // What is requested does not tell two keys apart: it would be `Mismatch`.
        Lock::Idempotent(Idempotent { on, .. }) => !mentions(&on.to_token_stream(), it),
        _ => !attributes.iter().any(|attribute| mentions(attribute, it)),
    };
    let unused: Vec<_> = arguments.names().filter(is_unused).map(ToString::to_string).collect();
    let (Some((text, span)), Some(first)) = (key, unused.first()) else { return TokenStream::new() };
    let names = list(&unused.iter().map(String::as_str).collect::<Vec<_>>(), "and");
    let (captured, meant) =
        (format!("{text}:{{{first}}}"), if argument == "key" { format!("{text:?}") } else { "[…]".to_owned() });
    let note = format!(
        "all calls lock the same key, for any {names}; capture what tells them apart, such as `{captured:?}`, or write \
         `{argument} = const {meant}` if one lock for all is meant"
    );
    let mixed = Span::mixed_site();
    let name = Ident::new("OneKeyForAllCalls", span.resolved_at(mixed));
    let used = Ident::new("OneKeyForAllCalls", span);
    let item = quote_spanned!(mixed=> #[deprecated(note = #note)] struct #name;);
    let used = quote_spanned!(span=> #used);
    quote!(#item let _ = #used;)
}

fn constant(key: &Key) -> Option<(&str, Span)> {
    match key {
        Key::Template(template, span) => Some((template.constant()?, *span)),
        Key::Expr(_) => None,
    }
}
