//! Bodies that another attribute has rewritten before this one sees them: `#[async_trait]` and `#[tracing::instrument]`.

use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Block, Expr, Local, Pat, Stmt, Type};

/// A function that `#[async_trait]` has turned from `async fn` into `fn … { Box::pin(async move { … }) }`.
pub(crate) struct Boxed {
    /// `Box::pin`, as it wrote it.
    pub(crate) pin: TokenStream,
    /// What it does first: it names the arguments anew.
    pub(crate) head: TokenStream,
    /// What the function returned.
    pub(crate) returns: Option<Type>,
    /// The body.
    pub(crate) body: TokenStream,
    /// Whether `self` is `__self` in the body.
    pub(crate) self_renamed: bool,
}

impl Boxed {
    /// `None` when the body has another shape.
    pub(crate) fn parse(body: &TokenStream) -> Option<Self> {
        let Block { stmts, .. } = syn::parse2(quote!({ #body })).ok()?;
        let [Stmt::Expr(Expr::Call(call), None)] = stmts.as_slice() else { return None };
        let (Expr::Path(pin), Some(Expr::Async(boxed)), 1) = (&*call.func, call.args.first(), call.args.len()) else {
            return None;
        };
        if pin.path.segments.last()?.ident != "pin" {
            return None;
        }
        let pin = pin.to_token_stream();
        let stmts = boxed.block.stmts.as_slice();
        // Its last statements are `let __ret: Type = { body }; __ret`.
        if let [head @ .., Stmt::Local(Local { pat: Pat::Type(ret), init: Some(init), .. }), Stmt::Expr(..)] = stmts
            && is_ident(&ret.pat, "__ret")
        {
            let self_renamed = head.iter().any(|it| matches!(it, Stmt::Local(local) if is_ident(&local.pat, "__self")));
            return Some(Self {
                pin,
                head: quote!(#(#head)*),
                returns: Some((*ret.ty).clone()),
                body: init.expr.to_token_stream(),
                self_renamed,
            });
        }
        Some(Self { pin, head: TokenStream::new(), returns: None, body: quote!(#(#stmts)*), self_renamed: false })
    }
}

fn is_ident(pat: &Pat, name: &str) -> bool {
    matches!(pat, Pat::Ident(pat) if pat.ident == name)
}

/// The arguments of the attribute as they read inside such a body.
pub(crate) fn rename_self(tokens: TokenStream) -> TokenStream {
    map(tokens, &|token| match token {
        TokenTree::Ident(ident) if ident == "self" => Ident::new("__self", ident.span()).into(),
        token => token,
    })
}

/// Every token, those inside of groups too, mapped.
pub(crate) fn map(tokens: TokenStream, change: &impl Fn(TokenTree) -> TokenTree) -> TokenStream {
    let deep = |token| match token {
        TokenTree::Group(group) => {
            let mut inside = Group::new(group.delimiter(), map(group.stream(), change));
            inside.set_span(group.span());
            change(inside.into())
        }
        token => change(token),
    };
    tokens.into_iter().map(deep).collect()
}

/// Lets the future that `#[tracing::instrument]` wrote borrow instead of own, so that the body can run again, and leaves
/// the transaction where it is. It is awaited right behind, so nothing that it borrows ends before it.
pub(crate) fn lend_to_instrumented(body: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = body.into_iter().collect();
    let Some(start) = tokens.iter().position(|it| is_word(it, "__tracing_instrument_future")) else {
        return tokens.into_iter().collect();
    };
    let is_end = |it: &TokenTree| matches!(it, TokenTree::Punct(punct) if punct.as_char() == ';');
    let end = tokens[start..].iter().position(is_end).map_or(tokens.len(), |it| start + it);
    let future = without_move(&tokens[start..end], 1);
    tokens.splice(start..end, future);
    tokens.into_iter().collect()
}

/// Removes `move` from `async move { … }` here and, `depth` groups down, where the block is awaited at once.
fn without_move(tokens: &[TokenTree], depth: u32) -> Vec<TokenTree> {
    let mut kept = Vec::with_capacity(tokens.len());
    for (at, token) in tokens.iter().enumerate() {
        let of_async = at > 0 && is_word(&tokens[at - 1], "async") && is_word(token, "move");
        let awaited = matches!(tokens.get(at + 2), Some(TokenTree::Punct(dot)) if dot.as_char() == '.');
        if of_async && (depth > 0 || awaited) {
            continue;
        }
        match token {
            TokenTree::Group(group) if depth > 0 && group.delimiter() == Delimiter::Brace => {
                let inside: Vec<_> = group.stream().into_iter().collect();
                let mut lent = Group::new(Delimiter::Brace, without_move(&inside, depth - 1).into_iter().collect());
                lent.set_span(group.span());
                kept.push(lent.into());
            }
            token => kept.push(token.clone()),
        }
    }
    kept
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == word)
}
