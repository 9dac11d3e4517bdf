//! The user's body as a future: what it owns, what it borrows, and of what type it is.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{
    FnArg, PatIdent, Signature, Type,
    ext::IdentExt,
    parse_quote,
    visit_mut::{VisitMut, visit_pat_ident_mut, visit_type_mut},
};

use crate::rewritten::lend_to_instrumented;

/// A function's body.
pub(crate) struct Body {
    /// The arguments that it may own.
    owned: Vec<Ident>,
    /// A `return` that is never reached, so that its type is known from its first line.
    pin_type: TokenStream,
    /// What is between its braces.
    tokens: TokenStream,
    brace: Span,
}

impl Body {
    pub(crate) fn new(sig: &Signature, returns: Option<Type>, tokens: TokenStream, brace: Span) -> Self {
        let mixed = Span::mixed_site();
        let pin_type = returns.map_or_else(TokenStream::new, |mut returns| {
            EraseOpaque.visit_type_mut(&mut returns);
            quote_spanned! {mixed=>
                #[allow(
                    unreachable_code,
                    clippy::diverging_sub_expression,
                    clippy::empty_loop,
                    clippy::let_unit_value,
                    clippy::needless_return,
                    clippy::type_complexity
                )]
                if false {
                    let never: #returns = loop {};
                    return never;
                }
            }
        });
        Self { owned: owned_arguments(sig), pin_type, tokens, brace }
    }

    /// The body of a lock that is taken once: it owns the arguments.
    pub(crate) fn owning(&self) -> TokenStream {
        let Self { pin_type, tokens, .. } = self;
        let body = self.braced(tokens.clone());
        quote_spanned!(Span::mixed_site()=> async move { #pin_type #body })
    }

    /// The body of a transaction that runs once: it borrows the transaction and owns the arguments, so that these need
    /// not be `Sync` for the future to be `Send`.
    pub(crate) fn lending(&self, bound: &[Option<&Ident>]) -> TokenStream {
        let Self { pin_type, tokens, owned, .. } = self;
        let shadowed = |it: &&Ident| !bound.iter().flatten().any(|bound| bound == it);
        let owned = owned.iter().filter(shadowed);
        let body = self.braced(lend_to_instrumented(tokens.clone()));
        quote_spanned! {Span::mixed_site()=>
            async {
                #pin_type
                #(
                    #[allow(unused_variables, clippy::redundant_locals)]
                    let #owned = #owned;
                )*
                #body
            }
        }
    }

    /// The body of an attempt: it borrows, because there may be another.
    pub(crate) fn rerun(&self, bind: Option<&TokenStream>) -> TokenStream {
        let Self { pin_type, tokens, .. } = self;
        let body = self.braced(lend_to_instrumented(tokens.clone()));
        quote_spanned!(Span::mixed_site()=> async { #pin_type #bind #body })
    }

    fn braced(&self, body: TokenStream) -> Group {
        let mut body = Group::new(Delimiter::Brace, body);
        body.set_span(self.brace.resolved_at(Span::mixed_site()));
        body
    }
}

/// The arguments to hand over to a body by name. `mut` ones are left out, lest their `mut` look unused.
fn owned_arguments(sig: &Signature) -> Vec<Ident> {
    struct Names(Vec<Ident>);
    impl VisitMut for Names {
        fn visit_pat_ident_mut(&mut self, pat: &mut PatIdent) {
            // One in upper case is a constant.
            let starts = |test: fn(char) -> bool| pat.ident.unraw().to_string().starts_with(test);
            if pat.mutability.is_none() && starts(char::is_lowercase) {
                self.0.push(pat.ident.clone());
            }
            visit_pat_ident_mut(self, pat);
        }
    }
    let mut names = Names(Vec::new());
    for argument in &sig.inputs {
        // One with an attribute may be compiled out.
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
