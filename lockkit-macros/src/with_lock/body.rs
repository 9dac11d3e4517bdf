//! The user's body as a future: what it owns, what it borrows, and its type.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{
    FnArg, PatIdent, Signature, Type,
    ext::IdentExt,
    parse_quote,
    visit_mut::{VisitMut, visit_pat_ident_mut, visit_type_mut},
};

use crate::with_lock::{plan::Lock, uses::mentions};

/// Whether a body owns or borrows the arguments of its function and the transactions around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    /// It owns everything it uses.
    Owns,
    /// It borrows the transaction and owns the arguments: the future is then `Send` without `Sync` arguments.
    Lends,
    /// It borrows everything, because it may run again.
    Reruns,
}

impl Mode {
    /// The mode of the body under these locks.
    pub(crate) fn under(locks: &[&Lock]) -> Self {
        let one = |it: &&Lock| match (it.retry(), it.tx()) {
            (Some(_), _) => Self::Reruns,
            (None, Some(_)) => Self::Lends,
            (None, None) => Self::Owns,
        };
        locks.iter().map(one).max().unwrap_or(Self::Owns)
    }
}

/// The body of one lock: what the user wrote, or the next lock.
pub(crate) struct Body {
    /// The arguments that it can own.
    owned: Vec<Ident>,
    /// A `return` that is never reached: it fixes the type of the body from the first line on.
    pin_type: TokenStream,
    /// The tokens between its braces.
    pub(crate) tokens: TokenStream,
    brace: Span,
}

impl Body {
    pub(crate) fn new(
        private: &TokenStream,
        sig: &Signature,
        returns: Option<&Type>,
        tokens: TokenStream,
        brace: Span,
    ) -> Self {
        let mixed = Span::mixed_site();
        let pin_type = returns.cloned().map_or_else(TokenStream::new, |mut returns| {
            EraseOpaque.visit_type_mut(&mut returns);
            quote_spanned! {mixed=>
                if false {
                    return #private::never::<#returns>();
                }
            }
        });
        Self { owned: owned_arguments(sig), pin_type, tokens, brace }
    }

    /// The future. `bound` are the names that the locks give it; they are not arguments.
    pub(crate) fn future(&self, mode: Mode, bound: &[&Ident], first: &TokenStream) -> TokenStream {
        let Self { pin_type, tokens, owned, brace } = self;
        let mixed = Span::mixed_site();
        let mut body = Group::new(Delimiter::Brace, tokens.clone());
        body.set_span(brace.resolved_at(mixed));
        match mode {
            Mode::Owns => quote_spanned!(mixed=> async move { #pin_type #first #body }),
            Mode::Reruns => quote_spanned!(mixed=> async { #pin_type #first #body }),
            Mode::Lends => {
                let is_argument = |it: &&Ident| !bound.contains(it) && mentions(tokens, it);
                let owned: Vec<_> = owned.iter().filter(is_argument).collect();
                let own = (!owned.is_empty()).then(|| {
                    quote_spanned! {mixed=>
                        let (#(#owned,)*) = (#(#owned,)*);
                        // No warning for an argument that only the attribute uses.
                        let _ = (#(&#owned,)*);
                    }
                });
                quote_spanned!(mixed=> async { #pin_type #own #first #body })
            }
        }
    }
}

/// The names of the arguments that can move into the body. A `mut` argument is left out: its `mut` would look unused.
fn owned_arguments(sig: &Signature) -> Vec<Ident> {
    struct Names(Vec<Ident>);
    impl VisitMut for Names {
        fn visit_pat_ident_mut(&mut self, pat: &mut PatIdent) {
            // An upper-case name is a constant.
            let starts = |test: fn(char) -> bool| pat.ident.unraw().to_string().starts_with(test);
            if pat.mutability.is_none() && starts(char::is_lowercase) {
                self.0.push(pat.ident.clone());
            }
            visit_pat_ident_mut(self, pat);
        }
    }
    let mut names = Names(Vec::new());
    for argument in &sig.inputs {
        // An argument with an attribute may be compiled out.
        if let FnArg::Typed(argument) = argument
            && argument.attrs.is_empty()
        {
            names.visit_pat_mut(&mut argument.pat.clone());
        }
    }
    names.0
}

/// `impl Trait` cannot be written inside a body.
struct EraseOpaque;

impl VisitMut for EraseOpaque {
    fn visit_type_mut(&mut self, of: &mut Type) {
        if matches!(of, Type::ImplTrait(_)) {
            *of = parse_quote!(_);
        } else {
            visit_type_mut(self, of);
        }
    }
}
