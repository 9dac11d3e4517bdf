//! Bodies that `#[async_trait]` or `#[tracing::instrument]` rewrote before this attribute expands.
//!
//! `#[tracing::instrument]` above or below makes a span around the lock. Above, it wraps the body before this attribute
//! sees it; the lock is then inside that span, where `#[async_trait]` has named the arguments.

use proc_macro2::{Delimiter, Group, Ident, Literal, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Block, Expr, Local, Pat, ReturnType, Signature, Stmt, Type};

use crate::with_lock::bindings::Bindings;

/// Where the locks go in a function: around the user's body, inside the code that other attributes wrote around it.
pub(crate) struct Site {
    /// The code around the user's body, with [`HOLE`] where the locks go; `None` if there is none.
    around: Option<TokenStream>,
    /// The arguments, as the user's body names them.
    pub(crate) arguments: Bindings,
    /// The type that the user's body returns, if it is known.
    pub(crate) returns: Option<Type>,
    /// The user's body.
    pub(crate) body: TokenStream,
    /// Whether the body calls `self` `__self`.
    pub(crate) self_renamed: bool,
}

const HOLE: &str = "__lockkit_hole";

impl Site {
    /// `None` if the function is neither async nor `fn … { Box::pin(async move { … }) }`, which `#[async_trait]` makes
    /// of an `async fn`.
    pub(crate) fn of(sig: &Signature, body: &TokenStream) -> Option<Self> {
        if sig.asyncness.is_none() {
            return Self::boxed(sig, body);
        }
        let returns = match &sig.output {
            ReturnType::Type(_, returns) => Some((**returns).clone()),
            ReturnType::Default => None,
        };
        let arguments = Bindings::of(sig);
        let mut site = Self { around: None, arguments, returns, body: TokenStream::new(), self_renamed: false };
        let around = inside_instrumented(body.clone(), &mut |body| {
            site.body = body;
            hole()
        });
        site.around = (!is_hole(&around)).then_some(around);
        Some(site)
    }

    fn boxed(sig: &Signature, body: &TokenStream) -> Option<Self> {
        let Block { stmts, .. } = syn::parse2(quote!({ #body })).ok()?;
        let [Stmt::Expr(Expr::Call(call), None)] = stmts.as_slice() else { return None };
        let (Expr::Path(pin), Some(Expr::Async(boxed)), 1) = (&*call.func, call.args.first(), call.args.len()) else {
            return None;
        };
        if pin.path.segments.last()?.ident != "pin" {
            return None;
        }
        let arguments = Bindings::of(sig);
        let mut site = Self { around: None, arguments, returns: None, body: TokenStream::new(), self_renamed: false };
        let stmts = &boxed.block.stmts;
        let around = inside_instrumented(quote!(#(#stmts)*), &mut |body| site.unwrap_async_trait(body));
        site.around = Some(quote!(#pin(async move { #around })));
        Some(site)
    }

    /// Takes the user's body out of the code that `#[async_trait]` wrote.
    fn unwrap_async_trait(&mut self, body: TokenStream) -> TokenStream {
        let hole = hole();
        // It ends in `let __ret: Type = { body }; __ret`, after statements that rename the arguments.
        if let Ok(Block { stmts, .. }) = syn::parse2(quote!({ #body }))
            && let [head @ .., Stmt::Local(Local { pat: Pat::Type(ret), init: Some(init), .. }), Stmt::Expr(..)] =
                stmts.as_slice()
            && is_ident(&ret.pat, "__ret")
        {
            let locals = || {
                head.iter().filter_map(|stmt| match stmt {
                    Stmt::Local(local) => Some(local),
                    _ => None,
                })
            };
            self.self_renamed = locals().any(|it| is_ident(&it.pat, "__self"));
            self.arguments = Bindings::of_locals(locals());
            self.returns = Some((*ret.ty).clone());
            self.body = init.expr.to_token_stream();
            return quote!(#(#head)* #hole);
        }
        self.body = body;
        hole
    }

    /// The whole body of the function, with the locks around the user's body.
    pub(crate) fn fill(&self, locked: TokenStream) -> TokenStream {
        let Some(around) = &self.around else { return locked };
        map(around.clone(), &|token| match token {
            TokenTree::Ident(ident) if ident == HOLE => Group::new(Delimiter::Brace, locked.clone()).into(),
            token => token,
        })
    }
}

fn hole() -> TokenStream {
    Ident::new(HOLE, Span::mixed_site()).to_token_stream()
}

fn is_hole(tokens: &TokenStream) -> bool {
    let mut tokens = tokens.clone().into_iter();
    tokens.next().is_some_and(|it| is_word(&it, HOLE)) && tokens.next().is_none()
}

fn is_ident(pat: &Pat, name: &str) -> bool {
    matches!(pat, Pat::Ident(pat) if pat.ident == name)
}

/// Renames `self` to `__self` in the arguments of the attribute, as in the body. Also where a text captures it.
pub(crate) fn rename_self(tokens: TokenStream) -> TokenStream {
    map(tokens, &|token| match token {
        TokenTree::Ident(ident) if ident == "self" => Ident::new("__self", ident.span()).into(),
        TokenTree::Literal(literal) => {
            let text = renamed_self(&literal.to_string());
            let renamed = text.and_then(|it| it.parse::<Literal>().ok()).map(|mut renamed| {
                renamed.set_span(literal.span());
                renamed
            });
            renamed.unwrap_or(literal).into()
        }
        token => token,
    })
}

/// The text with `{__self…}` for `{self…}`; `None` without one. A doubled brace captures nothing.
fn renamed_self(text: &str) -> Option<String> {
    let mut parts = text.split('{');
    let mut renamed = parts.next()?.to_owned();
    let (mut opens, mut is_changed) = (false, false);
    for part in parts {
        renamed.push('{');
        opens = !opens;
        let after = part.trim_start().strip_prefix("self").filter(|_| opens);
        if let Some(after) = after.filter(|it| it.starts_with(['}', ':', '.', ' '])) {
            renamed += "__self";
            renamed += after;
            is_changed = true;
        } else {
            renamed += part;
        }
        opens &= part.is_empty();
    }
    is_changed.then_some(renamed)
}

/// Maps every token, also inside groups.
pub(crate) fn map(tokens: TokenStream, change: &impl Fn(TokenTree) -> TokenTree) -> TokenStream {
    let deep = |token| match token {
        TokenTree::Group(group) => change(regrouped(&group, map(group.stream(), change))),
        token => change(token),
    };
    tokens.into_iter().map(deep).collect()
}

fn regrouped(group: &Group, stream: TokenStream) -> TokenTree {
    let mut changed = Group::new(group.delimiter(), stream);
    changed.set_span(group.span());
    changed.into()
}

/// Changes the body inside every `#[tracing::instrument]`; the whole body, if there is none.
fn inside_instrumented(body: TokenStream, change: &mut dyn FnMut(TokenStream) -> TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = body.into_iter().collect();
    let future = tokens.iter().position(|it| is_word(it, "__tracing_instrument_future"));
    // `let __tracing_instrument_future = async move { … };`
    let block = future.and_then(|it| async_block(&tokens[it..]).map(|at| it + at));
    let Some(block) = block else { return change(tokens.into_iter().collect()) };
    replace(&mut tokens, block, |inside| {
        let mut inside: Vec<TokenTree> = inside.into_iter().collect();
        // With `err` or `ret`, the block awaits another `async move` block.
        match async_block(&inside)
            .filter(|it| matches!(inside.get(it + 1), Some(TokenTree::Punct(dot)) if dot.as_char() == '.'))
        {
            Some(awaited) => {
                replace(&mut inside, awaited, |inside| inside_wrapped(inside, change));
                inside.into_iter().collect()
            }
            None => inside_wrapped(inside.into_iter().collect(), change),
        }
    });
    tokens.into_iter().collect()
}

/// `#[tracing::instrument]` writes `if false { return … } { body }`, except around the code of `#[async_trait]`.
fn inside_wrapped(block: TokenStream, change: &mut dyn FnMut(TokenStream) -> TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = block.into_iter().collect();
    if let [.., is_false, TokenTree::Group(_), TokenTree::Group(_)] = tokens.as_slice()
        && is_word(is_false, "false")
    {
        let last = tokens.len() - 1;
        replace(&mut tokens, last, |body| inside_instrumented(body, change));
        return tokens.into_iter().collect();
    }
    inside_instrumented(tokens.into_iter().collect(), change)
}

/// The index of the braces of the first `async move { … }`.
fn async_block(tokens: &[TokenTree]) -> Option<usize> {
    let is_async_move =
        |it: &[TokenTree]| is_word(&it[0], "async") && is_word(&it[1], "move") && matches!(it[2], TokenTree::Group(_));
    tokens.windows(3).position(is_async_move).map(|it| it + 2)
}

fn replace(tokens: &mut [TokenTree], at: usize, change: impl FnOnce(TokenStream) -> TokenStream) {
    if let TokenTree::Group(group) = &tokens[at] {
        tokens[at] = regrouped(group, change(group.stream()));
    }
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_captured_self_is_renamed() {
        for (text, renamed) in [
            ("k:{self}", Some("k:{__self}")),
            ("{self.id}{ self :?}", Some("{__self.id}{__self :?}")),
            ("{{self}}{{{self}}}", Some("{{self}}{{{__self}}}")),
            ("{{self}}", None),
            ("{selfish} self", None),
        ] {
            assert_eq!(renamed_self(text).as_deref(), renamed, "{text}");
        }
    }
}
