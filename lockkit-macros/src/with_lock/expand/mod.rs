//! The code around the user's body: calls to `lockkit::__private`.

mod answered;
mod attempts;
mod held;
mod section;
pub(crate) mod spans;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::{Expr, Signature, spanned::Spanned};

use crate::{
    key::of_template,
    with_lock::{
        body::{Body, Mode},
        plan::{Key, Lock, Named},
        rewritten::Site,
    },
};
use spans::{at, own, own_at, span_of_error, span_of_value};

/// Expands one lock of a function. Its own names are at `mixed_site`: they do not clash with names in the body.
///
/// A body is pinned in place and lent to lockkit. A function that took it by value would double the size of the future,
/// and would be compiled again for every body. The pinned body has its own block, so it is dropped before the lock is
/// released.
pub(crate) struct Expander<'a> {
    /// `::lockkit::__private`
    private: TokenStream,
    /// The same at the return type: for calls that do not compile if the return type cannot carry an error of lockkit.
    blamed: TokenStream,
    blame: Span,
    /// The type of a successful result: for calls that do not compile if it cannot be stored.
    answer: Span,
    body: Body<'a>,
    mode: Mode,
    /// Whether `map_err` makes the function's error.
    maps: bool,
    /// The names of this lock and of those above it.
    bound: Vec<&'a Ident>,
}

impl<'a> Expander<'a> {
    pub(crate) fn new(
        private: TokenStream,
        maps: bool,
        sig: &Signature,
        site: &'a Site,
        body: TokenStream,
        brace: Span,
        locks: &[&'a Lock],
    ) -> Self {
        let mixed = Span::mixed_site();
        let returns = site.returns.as_ref();
        let blame = returns.map_or_else(|| sig.ident.span(), span_of_error).resolved_at(mixed);
        let blamed = at(&private, blame);
        let answer = returns.map_or_else(|| sig.ident.span(), span_of_value).resolved_at(mixed);
        let body = Body::new(&private, &site.arguments, returns, body, brace);
        let bound = locks.iter().flat_map(|it| it.names()).map(|(name, _)| name).collect();
        Self { private, blamed, blame, answer, body, mode: Mode::under(locks), maps, bound }
    }

    pub(crate) fn expand(&self, lock: &Lock, map_err: Option<&Expr>) -> TokenStream {
        let expanded = match lock {
            Lock::Lease(lease) => self.lease(lease),
            Lock::Row(row) => self.row(row),
            Lock::Named(Named { key, section }) => self.named(key, section),
            Lock::Session(session) => self.session(session),
            Lock::Version(version) => self.version(version),
            Lock::Idempotent(idempotent) => self.idempotent(idempotent),
        };
        match map_err {
            None => expanded,
            Some(convert) => self.map_err(&expanded, convert),
        }
    }

    /// The body as a future; `first` runs before it.
    fn future(&self, first: &TokenStream) -> TokenStream {
        let future = self.body.future(self.mode, &self.bound, first);
        if !self.maps {
            return future;
        }
        let private = &self.private;
        quote_spanned!(Span::mixed_site()=> #private::mapped(#future))
    }

    /// A result of the user as one of the expansion.
    fn result(&self, result: &Expr) -> TokenStream {
        if !self.maps {
            return result.to_token_stream();
        }
        let private = &self.private;
        quote_spanned!(Span::mixed_site()=> #private::into_mapped(#result))
    }

    /// The whole expansion, with the errors of lockkit made errors of the function.
    fn map_err(&self, expanded: &TokenStream, convert: &Expr) -> TokenStream {
        let span = convert.span().resolved_at(Span::mixed_site());
        let private = at(&self.private, span);
        let result = quote_spanned!(Span::mixed_site()=> async { #expanded }.await);
        quote_spanned!(span=> #private::map_err(#result, #convert))
    }

    /// Moves a call to the return type, where rustc reports that the type cannot carry an error of lockkit.
    fn blame(&self, call: TokenStream) -> TokenStream {
        own_at(call, self.blame)
    }

    /// The arms of a `match` that leave the function.
    fn return_failure(&self, on_busy: Option<&Expr>) -> TokenStream {
        let Self { private, blamed, blame, .. } = self;
        let mixed = Span::mixed_site();
        let err = own("err");
        let busy = on_busy.map(|busy| {
            let busy = self.result(busy);
            quote_spanned! {mixed=>
                ::core::result::Result::Err(#err) if #private::Error::is_contended(&#err) => return #busy,
            }
        });
        let failure = self.blame(quote_spanned!(*blame=> #blamed::Outcome::lock_failed(#err)));
        quote_spanned! {mixed=>
            #busy
            ::core::result::Result::Err(#err) => return #failure,
        }
    }

    fn key(&self, key: &Key) -> TokenStream {
        let private = &self.private;
        match key {
            Key::Expr(key) => quote_spanned!(Span::mixed_site()=> #private::key(#key)),
            Key::Template(template, span) => of_template(private, template, *span),
        }
    }
}
