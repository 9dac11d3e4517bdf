//! `#[with_lock(…)]`: parses the arguments, checks them, and writes the calls around the body.

mod args;
pub(crate) mod arguments;
mod bindings;
mod body;
mod columns;
mod duration;
mod expand;
mod forms;
mod function;
mod jumps;
mod one_key;
mod plan;
mod rewritten;
mod stack;
mod strategy;
pub(crate) mod template;
mod uses;
mod validate;

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};

use crate::{
    diagnostics::Errors,
    with_lock::{
        args::Args,
        expand::{Expander, spans::own},
        function::Function,
        plan::Plan,
        rewritten::{Site, rename_self},
    },
};

/// The argument of an attribute that expands to nothing: it only uses an import.
const IN_USE: &str = "__in_use";

/// Expands the attribute. After an error, the function stays as it is, with the error beside it: rustc then does not
/// report the names that the attribute would have given to the body.
pub(crate) fn with_lock(args: TokenStream, item: &TokenStream) -> TokenStream {
    if matches!(&*args.clone().into_iter().collect::<Vec<_>>(), [TokenTree::Ident(only)] if only == IN_USE) {
        return TokenStream::new();
    }
    let mut errors = Errors::default();
    let Some(mut function) = errors.note(syn::parse2::<Function>(item.clone())) else {
        Plan::new(Args::parse(args, &mut errors), &mut errors);
        let errors = errors.into_tokens();
        return quote!(#errors #item);
    };
    let mut attributes = vec![args];
    let stacked = function.take_stacked();
    let in_use = Ident::new(IN_USE, Span::call_site());
    // Uses the imports of the lower attributes, and shows them to editors.
    let used: TokenStream = stacked.iter().map(|(path, _)| quote!(#[#path(#in_use)] const _: () = ();)).collect();
    attributes.extend(stacked.into_iter().map(|(_, args)| args));
    errors.note(function.bind_store());
    let expanded = checked(&attributes, &function, &mut errors);
    let Function { attrs, vis, sig, brace, inner_attrs, body } = &function;
    let (outside, inside) = match expanded {
        Some(expanded) if errors.is_empty() => (TokenStream::new(), expanded),
        _ => (errors.into_tokens(), body.clone()),
    };
    let mut tokens = quote!(#outside #(#attrs)* #vis #sig);
    brace.surround(&mut tokens, |tokens| tokens.extend(quote!(#(#inner_attrs)* #used #inside)));
    tokens
}

/// The body under the locks of these attributes; the first is the outermost. `None` after an error.
fn checked(attributes: &[TokenStream], function: &Function, errors: &mut Errors) -> Option<TokenStream> {
    let Function { sig, brace, body, .. } = function;
    function.check(errors);
    let site = Site::of(sig, body);
    if site.is_none() && sig.constness.is_none() {
        let message = if uses::mentions(body, &Ident::new("block_on", Span::call_site())) {
            "`#[with_lock]` waits for the lock, so it needs an `async fn`; an attribute above it, such as \
             `#[tokio::main]` or `#[tokio::test]`, has made this one a plain `fn`: put `#[with_lock]` on a function \
             that this one calls"
        } else {
            "`#[with_lock]` waits for the lock, so it needs an `async fn`"
        };
        errors.push(syn::Error::new(sig.fn_token.span, message));
    }
    if uses::mentions(body, &own("body")) {
        let message = "this lock would be taken before the one above it, which was expanded first; write both \
                       attributes as `#[with_lock(…)]`, under that name";
        errors.push(syn::Error::new(Span::call_site(), message));
    }
    let self_renamed = site.as_ref().is_some_and(|it| it.self_renamed);
    let mut plans = Vec::new();
    for attribute in attributes.iter().cloned() {
        let attribute = if self_renamed { rename_self(attribute) } else { attribute };
        let args = Args::parse(attribute, errors);
        let strategy = args.strategy.clone();
        plans.push((strategy, Plan::new(args, errors)));
    }
    let plans: Vec<_> = plans.into_iter().map(|(strategy, plan)| Some((strategy?, plan?))).collect::<Option<_>>()?;
    let site = site?;
    let locks: Vec<_> = plans.iter().map(|(strategy, plan)| (strategy, &plan.lock)).collect();
    stack::check(&locks, errors);
    let locks: Vec<_> = locks.into_iter().map(|(_, lock)| lock).collect();
    stack::check_body(&locks, &site.body, errors);
    let mut tokens = site.body.clone();
    for (at, (_, plan)) in plans.iter().enumerate().rev() {
        let mixed = Span::mixed_site();
        // An import, so that rustc reports an unknown path once.
        let (private, import) = match &plan.krate {
            None => (quote_spanned!(mixed=> ::lockkit::__private), None),
            Some(krate) => {
                let private = own("private");
                (private.to_token_stream(), Some(quote_spanned!(mixed=> use #krate::__private as #private;)))
            }
        };
        let expander =
            Expander::new(private, plan.map_err.is_some(), sig, &site, tokens, brace.span.join(), &locks[..=at]);
        let lock = expander.expand(&plan.lock, plan.map_err.as_ref());
        let warning = one_key::warning(&plan.lock, &site.arguments, attributes);
        tokens = quote_spanned!(mixed=> #import #warning #lock);
    }
    // A block of this crate's edition: in the user's, its last expression could drop what it uses in another order.
    let mut block = Group::new(Delimiter::Brace, tokens);
    block.set_span(Span::mixed_site());
    Some(site.fill(TokenTree::from(block).into()))
}
