//! The user's body as a future: what it owns, what it borrows, and its type.
//!
//! A body that runs once owns its arguments: the expansion moves each variable that they bind into its block, in their
//! order, also those of patterns, of arguments with a `#[cfg]`, and those that `#[async_trait]` has renamed. A borrowed
//! argument would have to be `Sync`, or the function would lose `Send`. `self` has no second name, so a branch that is
//! never reached moves it. A body that may run again borrows. Its block has the braces of the user, so its edition is
//! the user's.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{
    Type, parse_quote,
    visit_mut::{VisitMut, visit_type_mut},
};

use crate::with_lock::{bindings::Bindings, plan::Lock};

/// Whether a body owns or borrows the arguments of its function and the transactions around it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mode {
    /// It owns everything it uses.
    Owns,
    /// It borrows the transaction and owns the arguments: the future is then `Send` without `Sync` arguments.
    Lends,
    /// It borrows everything, because it may run again, for the reason that stands here.
    Reruns(Span),
}

impl Mode {
    /// The mode of the body under these locks.
    pub(crate) fn under(locks: &[&Lock]) -> Self {
        let one = |it: &&Lock| match (it.retry(), it.tx()) {
            (Some(retry), _) => Self::Reruns(retry.at),
            (None, Some(_)) => Self::Lends,
            (None, None) => Self::Owns,
        };
        let strength = |it: &Self| match it {
            Self::Owns => 0,
            Self::Lends => 1,
            Self::Reruns(_) => 2,
        };
        locks.iter().map(one).max_by_key(strength).unwrap_or(Self::Owns)
    }
}

/// The body of one lock: what the user wrote, or the next lock.
pub(crate) struct Body<'a> {
    arguments: &'a Bindings,
    /// A `return` that is never reached: it fixes the type of the body from the first line on.
    pin_type: TokenStream,
    /// The tokens between its braces.
    pub(crate) tokens: TokenStream,
    brace: Span,
}

impl<'a> Body<'a> {
    pub(crate) fn new(
        private: &TokenStream,
        arguments: &'a Bindings,
        returns: Option<&Type>,
        tokens: TokenStream,
        brace: Span,
    ) -> Self {
        let mixed = Span::mixed_site();
        // Without any statement rustc would call the braces unnecessary.
        let nothing = || quote_spanned!(mixed=> let () = (););
        let pin_type = returns.cloned().map_or_else(nothing, |mut returns| {
            EraseOpaque.visit_type_mut(&mut returns);
            quote_spanned! {mixed=>
                if false {
                    return #private::never::<#returns>();
                }
            }
        });
        Self { arguments, pin_type, tokens, brace }
    }

    /// The future. `bound` are the names that the locks give it; they are not arguments.
    pub(crate) fn future(&self, mode: Mode, bound: &[&Ident], first: &TokenStream) -> TokenStream {
        let Self { arguments, pin_type, tokens, brace } = self;
        let mixed = Span::mixed_site();
        let mut body = Group::new(Delimiter::Brace, quote_spanned!(mixed=> #pin_type #tokens));
        // The edition of the braces says when temporaries of the last expression are dropped.
        body.set_span(*brace);
        let own = || arguments.moved_into(tokens, bound);
        match mode {
            Mode::Reruns(at) => quote_spanned!(at.resolved_at(mixed)=> async { #first #body }),
            Mode::Owns => {
                let own = own();
                quote_spanned!(mixed=> async move { #own #first #body })
            }
            Mode::Lends => {
                let own = own();
                quote_spanned!(mixed=> async { #own #first #body })
            }
        }
    }
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
