//! The code around the user's body: calls to `lockkit::__private`.

mod attempts;
mod held;
mod section;
pub(crate) mod spans;

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{Expr, LitStr, Signature, Type};

use crate::with_lock::{
    body::{Body, Mode},
    plan::{Key, Lock, Named},
    template::Piece,
};
use spans::{at, own, own_at, span_of_error};

/// Expands one lock of a function. Its own names are at `mixed_site`: they do not clash with names in the body.
///
/// A body is pinned in place and lent to lockkit. A function that took it by value would double the size of the future, and
/// would be compiled again for every body. The pinned body has its own block, so it is dropped before the lock is given back.
pub(crate) struct Expander<'a> {
    /// `::lockkit::__private`
    private: TokenStream,
    /// The same at the return type: for calls that do not compile if the return type cannot carry an error of lockkit.
    blamed: TokenStream,
    blame: Span,
    body: Body,
    mode: Mode,
    /// The names of this lock and of those above it.
    bound: Vec<&'a Ident>,
}

impl<'a> Expander<'a> {
    pub(crate) fn new(
        krate: &TokenStream,
        sig: &Signature,
        returns: Option<&Type>,
        body: TokenStream,
        brace: Span,
        locks: &[&'a Lock],
    ) -> Self {
        let mixed = Span::mixed_site();
        let blame = returns.map_or_else(|| sig.ident.span(), span_of_error).resolved_at(mixed);
        let private = quote_spanned!(mixed=> #krate::__private);
        let blamed = at(&private, blame);
        let body = Body::new(&private, sig, returns, body, brace);
        let bound = locks.iter().flat_map(|it| it.names()).map(|(name, _)| name).collect();
        Self { private, blamed, blame, body, mode: Mode::under(locks), bound }
    }

    pub(crate) fn expand(&self, lock: &Lock) -> TokenStream {
        match lock {
            Lock::Lease(lease) => self.lease(lease),
            Lock::Row(row) => self.row(row),
            Lock::Named(Named { key, section }) => self.named(key, section),
            Lock::Session(session) => self.session(session),
            Lock::Version(version) => self.version(version),
        }
    }

    /// The body as a future; `first` runs before it.
    fn future(&self, first: &TokenStream) -> TokenStream {
        self.body.future(self.mode, &self.bound, first)
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
        let busy = on_busy.map(|it| {
            quote_spanned! {mixed=>
                ::core::result::Result::Err(#err) if #private::Error::is_contended(&#err) => return #it,
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
        let mixed = Span::mixed_site();
        let (template, span) = match key {
            Key::Expr(key) => return quote_spanned!(mixed=> #private::key(#key)),
            Key::Template(template, span) => (template, *span),
        };
        if let Some(constant) = template.constant() {
            return quote_spanned!(mixed=> #private::key(#constant));
        }
        let reserved = template.reserved();
        let pieces = template.pieces.iter().map(|it| match it {
            Piece::Text(text) => quote_spanned!(mixed=> #private::Piece::Text(#text)),
            Piece::Capture { name, format } => {
                // At the literal, so that the name means what it means to `format!` there.
                let colon = if format.is_empty() { "" } else { ":" };
                let capture = LitStr::new(&format!("{{{name}{colon}{format}}}"), span);
                let capture = quote_spanned!(span.resolved_at(mixed)=> ::core::format_args!(#capture));
                quote_spanned!(mixed=> #private::Piece::Capture(#capture))
            }
        });
        quote_spanned!(mixed=> #private::key_of(#reserved, &[#(#pieces),*]))
    }
}
