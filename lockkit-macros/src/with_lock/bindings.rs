//! The variables that the arguments of a function bind.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{
    Attribute, FnArg, Local, Pat, PatIdent, Receiver, ReceiverKind, Signature, Token,
    ext::IdentExt,
    visit_mut::{VisitMut, visit_pat_ident_mut},
};

use crate::with_lock::uses::mentions;

/// The variables of the arguments, in their order.
#[derive(Default)]
pub(crate) struct Bindings {
    /// `self`, if it is no reference.
    receiver: Option<Token![self]>,
    variables: Vec<Variable>,
}

struct Variable {
    name: Ident,
    mutability: Option<Token![mut]>,
    /// The `#[cfg]` of its argument.
    cfgs: Vec<Attribute>,
}

impl Bindings {
    /// Those of a function.
    pub(crate) fn of(sig: &Signature) -> Self {
        let mut bindings = Self::default();
        for input in &sig.inputs {
            match input {
                FnArg::Receiver(Receiver { kind: ReceiverKind::Reference(..), .. }) => {}
                FnArg::Receiver(receiver) => bindings.receiver = Some(receiver.self_token),
                FnArg::Typed(argument) => bindings.add(&argument.pat, &argument.attrs),
            }
        }
        bindings
    }

    /// The names of the variables, but for those that start with `_`.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Ident> {
        self.variables.iter().map(|it| &it.name).filter(|it| !it.unraw().to_string().starts_with('_'))
    }

    /// Those of the statements that stand for the arguments in the code of `#[async_trait]`.
    pub(crate) fn of_locals<'a>(locals: impl Iterator<Item = &'a Local>) -> Self {
        let mut bindings = Self::default();
        for Local { pat, attrs, .. } in locals {
            bindings.add(pat, attrs);
        }
        bindings
    }

    fn add(&mut self, pat: &Pat, attrs: &[Attribute]) {
        let cfgs = attrs.iter().filter(|it| it.path().is_ident("cfg")).cloned().collect();
        let mut names = Names { cfgs, variables: &mut self.variables };
        names.visit_pat_mut(&mut pat.clone());
    }

    /// Moves what the tokens mention into the block around this, so that it is `Send` without `Sync` arguments, and
    /// drops them in the order of the function. `taken` are other variables of these names.
    pub(crate) fn moved_into(&self, tokens: &TokenStream, taken: &[&Ident]) -> TokenStream {
        let mixed = Span::mixed_site();
        let is_moved = |it: &&Variable| !taken.contains(&&it.name) && mentions(tokens, &it.name);
        let variables = self.variables.iter().filter(is_moved).map(|Variable { name, mutability, cfgs }| {
            // Otherwise the first `mut` would be unused.
            let touched = mutability.map(|_| quote_spanned!(mixed=> #(#cfgs)* let _ = &mut #name;));
            quote_spanned! {mixed=>
                #touched
                #(#cfgs)*
                let #mutability #name = #name;
                // No warning for an argument that only the attribute uses.
                #(#cfgs)*
                let _ = &#name;
            }
        });
        // There is no other variable of that name: a move that is never reached.
        let receiver = self.receiver.filter(|it| mentions(tokens, &Ident::new("self", it.span)));
        let receiver = receiver.map(|receiver| {
            quote_spanned! {mixed=>
                if false {
                    ::core::mem::drop(#receiver);
                    ::core::unreachable!();
                }
            }
        });
        quote_spanned!(mixed=> #receiver #(#variables)*)
    }
}

struct Names<'a> {
    cfgs: Vec<Attribute>,
    variables: &'a mut Vec<Variable>,
}

impl VisitMut for Names<'_> {
    fn visit_pat_ident_mut(&mut self, pat: &mut PatIdent) {
        // An upper-case name is a constant, and each side of an or-pattern has the same names.
        let is_variable = pat.ident.unraw().to_string().trim_start_matches('_').starts_with(char::is_lowercase);
        if is_variable && self.variables.iter().all(|it| it.name != pat.ident) {
            let mutability = pat.mutability.filter(|_| pat.by_ref.is_none());
            self.variables.push(Variable { name: pat.ident.clone(), mutability, cfgs: self.cfgs.clone() });
        }
        visit_pat_ident_mut(self, pat);
    }
}
