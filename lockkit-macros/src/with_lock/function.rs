//! The function under the attribute. Its body stays unparsed: rustc and editors see it as the user wrote it.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{
    Attribute, GenericParam, Generics, Meta, MetaNameValue, Path, ReturnType, Signature, Token, TypeParam, Visibility,
    braced,
    parse::{Parse, ParseStream},
    parse_quote,
    spanned::Spanned,
    token,
};

use crate::{
    diagnostics::{Errors, error},
    with_lock::uses::mentions,
};

/// A function with its body.
pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    pub(crate) brace: token::Brace,
    pub(crate) inner_attrs: Vec<Attribute>,
    pub(crate) body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        let item = input.fork();
        let Ok(sig) = input.parse::<Signature>() else {
            return Err(item.error("`#[with_lock]` goes on an `async fn`"));
        };
        if input.peek(Token![;]) {
            let message = "`#[with_lock]` needs a body to run: put it on the implementation of this function";
            return Err(error(&sig.ident, message));
        }
        let body;
        let brace = braced!(body in input);
        Ok(Self { attrs, vis, sig, brace, inner_attrs: body.call(Attribute::parse_inner)?, body: body.parse()? })
    }
}

impl Function {
    /// Removes the `#[with_lock]` attributes below this one, under any path, and returns their paths and arguments from
    /// the upper to the lower.
    pub(crate) fn take_stacked(&mut self) -> Vec<(Path, TokenStream)> {
        let is_with_lock = |it: &Attribute| it.path().segments.last().is_some_and(|it| it.ident == "with_lock");
        let (stacked, others) = std::mem::take(&mut self.attrs).into_iter().partition(is_with_lock);
        self.attrs = others;
        let parts = |it: Attribute| match it.meta {
            Meta::List(list) => (list.path, list.tokens),
            Meta::Path(path) | Meta::NameValue(MetaNameValue { path, .. }) => (path, TokenStream::new()),
        };
        <Vec<Attribute>>::into_iter(stacked).map(parts).collect()
    }

    /// Gives the type parameter of a `Leases<S>` its bound, if it has none at all. rustc would report it at every use.
    pub(crate) fn bind_store(&mut self) -> syn::Result<()> {
        let inputs = self.sig.inputs.to_token_stream();
        let Generics { params, where_clause, .. } = &mut self.sig.generics;
        let is_bound = |it: &TypeParam| {
            let clause = where_clause.as_ref().is_some_and(|clause| mentions(&clause.to_token_stream(), &it.ident));
            clause || !it.bounds.is_empty()
        };
        let unbound = params.iter_mut().find_map(|param| match param {
            GenericParam::Type(param) if !is_bound(param) && contains_leases(inputs.clone(), &param.ident) => {
                Some(param)
            }
            _ => None,
        });
        let Some(store) = unbound else { return Ok(()) };
        store.bounds.push(parse_quote!(::lockkit::LeaseStore));
        let name = &store.ident;
        Err(error(name, format!("leases are kept in a store: write the bound `{name}: lockkit::LeaseStore`")))
    }

    /// Refuses functions that cannot await a lock or return its error.
    pub(crate) fn check(&self, errors: &mut Errors) {
        let Signature { constness, safety, abi, ident, output, .. } = &self.sig;
        if let Some(constness) = constness {
            errors.push(syn::Error::new(constness.span, "a `const fn` cannot wait for a lock; remove `const`"));
        }
        if let syn::Safety::Unsafe(safety) = safety {
            let message =
                "`#[with_lock]` does not go on an `unsafe fn`: put the unsafe part into a function of its own";
            errors.push(syn::Error::new(safety.span, message));
        }
        if let Some(abi) = abi {
            let message = "`#[with_lock]` does not go on an `extern fn`: call a Rust function from it";
            errors.push(syn::Error::new(abi.span(), message));
        }
        if self.sig.asyncness.is_some() && matches!(output, ReturnType::Default) {
            let message = "a function under `#[with_lock]` must return `Result<_, E>` with `E: From<lockkit::Error>`: \
                           taking the lock can fail";
            errors.push(error(ident, message));
        }
    }
}

/// Whether the tokens contain `Leases<name>`.
fn contains_leases(tokens: TokenStream, name: &Ident) -> bool {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_leases = |it: &[TokenTree]| {
        use TokenTree::{Ident, Punct};
        matches!(it, [Ident(leases), Punct(open), Ident(store), Punct(close)]
            if leases == "Leases" && open.as_char() == '<' && store == name && close.as_char() == '>')
    };
    tokens.windows(4).any(is_leases)
        || tokens.into_iter().any(|it| matches!(it, TokenTree::Group(it) if contains_leases(it.stream(), name)))
}
