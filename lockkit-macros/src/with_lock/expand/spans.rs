//! The spans of the expanded tokens: where rustc reports an error, and which names the body can see.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Expr, GenericArgument, PathArguments, PathSegment, Type, TypePath, spanned::Spanned};

use crate::with_lock::{forms::Typed, rewritten::map};

/// A variable of the expansion. Its prefix keeps it apart from the user's statics, constants and unit structs, which
/// `mixed_site` does not hide from patterns.
pub(crate) fn own(name: &str) -> Ident {
    Ident::new(&format!("{OWN}{name}"), Span::mixed_site())
}

const OWN: &str = "__lockkit_";

/// The span of the first type in a return type, which is that of the value; of the whole type if it shows none.
pub(crate) fn span_of_value(returns: &Type) -> Span {
    if let Type::Path(TypePath { path, .. }) = returns
        && let Some(PathSegment { arguments: PathArguments::AngleBracketed(arguments), .. }) = path.segments.last()
        && let Some(GenericArgument::Type(value)) = arguments.args.first()
    {
        return value.span();
    }
    returns.span()
}

/// The span of the error type in a return type; of the whole type if it does not show its error type.
pub(crate) fn span_of_error(returns: &Type) -> Span {
    if let Type::Path(TypePath { path, .. }) = returns
        && let Some(PathSegment { arguments: PathArguments::AngleBracketed(arguments), .. }) = path.segments.last()
        && let (2, Some(GenericArgument::Type(err))) = (arguments.args.len(), arguments.args.last())
    {
        return err.span();
    }
    returns.span()
}

/// Moves every token of the path to the span; otherwise rustc blames the whole attribute.
pub(crate) fn at(path: &TokenStream, span: Span) -> TokenStream {
    let is_dollar_crate = |it: TokenTree| matches!(it, TokenTree::Ident(it) if it == "$crate");
    if path.clone().into_iter().any(is_dollar_crate) {
        return path.clone();
    }
    map(path.clone(), &|mut token| {
        token.set_span(span);
        token
    })
}

/// Moves the variables of the expansion in a call to the span. rustc reports only one of several errors at the same
/// span.
pub(crate) fn own_at(call: TokenStream, span: Span) -> TokenStream {
    map(call, &|mut token| {
        if matches!(&token, TokenTree::Ident(ident) if ident.to_string().starts_with(OWN)) {
            token.set_span(span);
        }
        token
    })
}

/// A function that tests an error. A path is called, so that what it borrows may be less than the error: `&dyn
/// std::error::Error`.
pub(crate) fn test_of(test: &Expr) -> TokenStream {
    let span = test.span().resolved_at(Span::mixed_site());
    let err = own_at(own("err").into_token_stream(), span);
    match test {
        Expr::Path(_) => quote_spanned!(span=> |#err| #test(#err)),
        _ => test.to_token_stream(),
    }
}

/// The span of the type of the rows.
pub(crate) fn span_of_rows(rows: Option<&Typed>) -> Span {
    let mixed = Span::mixed_site();
    rows.map_or(mixed, |it| it.ty.span().resolved_at(mixed))
}

/// Calls whose tokens are all at the value of `on`, so that rustc reports a missing trait once.
pub(super) struct Reached {
    pub(super) first: Span,
    last: Span,
    path: TokenStream,
}

impl Reached {
    pub(super) fn new(on: &Expr, private: &TokenStream) -> Self {
        let mixed = Span::mixed_site();
        let mut tokens = on.to_token_stream().into_iter().map(|it| it.span().resolved_at(mixed));
        let first = tokens.next().unwrap_or(mixed);
        let last = tokens.last().unwrap_or(first);
        Self { first, last, path: at(private, first) }
    }

    pub(super) fn call(&self, function: &str, arguments: TokenStream) -> TokenStream {
        let Self { last, path, .. } = self;
        let function = Ident::new(function, *last);
        let mut arguments = Group::new(Delimiter::Parenthesis, arguments);
        arguments.set_span(*last);
        quote!(#path::#function #arguments)
    }
}
