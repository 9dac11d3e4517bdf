//! How a body uses the names that the attribute gives it. Reads the text alone and respects shadowing; a name inside a
//! macro counts as used.
//!
//! The expansion ends the transaction, which is a use, so the compiler alone would never warn of a body that does not
//! use it. If the name does not occur, the expansion keeps the transaction under its own name, and the body gets an
//! unused variable with the given name: the warning is the compiler's. A query is an expression that begins with
//! `sqlx::…`, or a variable that is set to one. A commit inside a called function is not found.

use proc_macro2::{Delimiter, Ident, Span, TokenStream, TokenTree};
use quote::quote;
use syn::{
    Arm, Block, Expr, ExprAsync, ExprCall, ExprClosure, ExprForLoop, ExprIf, ExprLet, ExprMethodCall, ExprPath,
    ExprWhile, Item, Macro, Pat, PatIdent, Path, Stmt,
    ext::IdentExt,
    visit_mut::{self, VisitMut},
};

/// A use of a name that may be an error.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Misuse {
    /// `name.method(…)`
    Call { method: String },
    /// `f(name)` or `x.method(name)`.
    GivenAway { method: Option<String> },
    /// In an `async move` block or a `move` closure.
    Moved,
    /// `sqlx::query(…).execute(&mut name)`, which takes `&mut *name`.
    Executor,
}

/// The methods of sqlx's queries that take an executor.
const EXECUTING: [&str; 7] =
    ["execute", "execute_many", "fetch", "fetch_many", "fetch_all", "fetch_one", "fetch_optional"];

/// Whether the tokens contain the name, as a word or as `{name}` in a string.
pub(crate) fn mentions(tokens: &TokenStream, name: &Ident) -> bool {
    mentions_word(tokens, &name.unraw().to_string())
}

fn mentions_word(tokens: &TokenStream, word: &str) -> bool {
    any(tokens, &|token| match token {
        TokenTree::Ident(ident) => ident.unraw() == word,
        TokenTree::Literal(literal) => captures(&literal.to_string(), word),
        _ => false,
    })
}

fn any(tokens: &TokenStream, test: &impl Fn(&TokenTree) -> bool) -> bool {
    tokens.clone().into_iter().any(|token| match &token {
        TokenTree::Group(group) => any(&group.stream(), test),
        token => test(token),
    })
}

/// Whether a string captures the variable as `format!` does.
fn captures(text: &str, word: &str) -> bool {
    text.split('{').skip(1).any(|part| {
        let rest = part.trim_start().strip_prefix(word);
        rest.is_some_and(|rest| !rest.starts_with(|it: char| it == '_' || it.is_alphanumeric()))
            // The width or precision of another.
            || part.split('}').next().is_some_and(|it| it.contains(&format!("{word}$")))
    })
}

/// Whether the body uses this variable.
pub(crate) fn is_used(body: &TokenStream, name: &Ident) -> bool {
    match first_mention(body, name) {
        None => mentions(body, name),
        // A plain use, and nothing before it could hide the name.
        Some(Mention::Plain) => true,
        Some(Mention::Other) => Finder::run(body, name).is_none_or(|it| it.used),
    }
}

/// The misuses of this variable in the body, each with its place.
pub(crate) fn misuses(body: &TokenStream, name: &Ident) -> Vec<(Span, Misuse)> {
    let word = name.unraw().to_string();
    if !mentions(body, name) || !may_be_misused(body, &word) {
        return Vec::new();
    }
    Finder::run(body, name).map(|it| it.misuses).unwrap_or_default()
}

enum Mention {
    /// `*name`, `&name`, `&mut name` or `name.`
    Plain,
    Other,
}

fn first_mention(tokens: &TokenStream, name: &Ident) -> Option<Mention> {
    let word = name.unraw().to_string();
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let punct =
        |at: Option<&TokenTree>, chars: &str| matches!(at, Some(TokenTree::Punct(it)) if chars.contains(it.as_char()));
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                if let Some(found) = first_mention(&group.stream(), name) {
                    return Some(found);
                }
            }
            TokenTree::Ident(ident) if ident.unraw() == word => {
                let before = at.checked_sub(1).and_then(|it| tokens.get(it));
                let is_plain = punct(before, "*") || punct(tokens.get(at + 1), ".") && !punct(before, ".");
                return Some(if is_plain { Mention::Plain } else { Mention::Other });
            }
            _ => {}
        }
    }
    None
}

/// Whether the body is worth parsing: false for most.
fn may_be_misused(tokens: &TokenStream, word: &str) -> bool {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let is = |at: usize, char| matches!(tokens.get(at), Some(TokenTree::Punct(it)) if it.as_char() == char);
    tokens.iter().enumerate().any(|(at, token)| match token {
        TokenTree::Group(group) => {
            let function = at.checked_sub(1).and_then(|it| tokens.get(it));
            let is_executing = matches!(function, Some(TokenTree::Ident(it)) if EXECUTING.iter().any(|of| it == of));
            let alone =
                group.delimiter() == Delimiter::Parenthesis && has_argument(&group.stream(), word, is_executing);
            alone || may_be_misused(&group.stream(), word)
        }
        TokenTree::Ident(ident) if ident == "move" => true,
        TokenTree::Ident(ident) if ident.unraw() == word => is(at + 1, '.'),
        _ => false,
    })
}

/// Whether one of the arguments is just this word, or a reference to it for sqlx.
fn has_argument(tokens: &TokenStream, word: &str, is_executing: bool) -> bool {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let is_comma = |it: &TokenTree| matches!(it, TokenTree::Punct(it) if it.as_char() == ',');
    tokens.split(is_comma).any(|token| match token {
        [TokenTree::Ident(ident)] => ident.unraw() == word,
        [TokenTree::Punct(_), .., TokenTree::Ident(ident)] => is_executing && ident.unraw() == word,
        _ => false,
    })
}

struct Finder {
    word: String,
    /// Whether another variable of that name hides it here.
    shadowed: bool,
    moving: bool,
    used: bool,
    /// The variables that are queries of sqlx.
    queries: Vec<Ident>,
    misuses: Vec<(Span, Misuse)>,
}

impl Finder {
    /// `None` if the body is not valid Rust; rustc then reports the error.
    fn run(body: &TokenStream, name: &Ident) -> Option<Self> {
        let mut block: Block = syn::parse2(quote!({ #body })).ok()?;
        let word = name.unraw().to_string();
        let mut finder =
            Self { word, shadowed: false, moving: false, used: false, queries: Vec::new(), misuses: Vec::new() };
        finder.visit_block_mut(&mut block);
        Some(finder)
    }

    /// The span of the expression, if it is the variable alone.
    fn variable(&self, expr: &Expr) -> Option<Span> {
        let ident = match expr {
            Expr::Path(ExprPath { qself: None, path, .. }) => path.get_ident()?,
            _ => return None,
        };
        (!self.shadowed && ident.unraw() == self.word).then(|| ident.span())
    }

    fn bind(&mut self, pat: &Pat) {
        struct Binds<'a>(&'a str, bool);
        impl VisitMut for Binds<'_> {
            fn visit_pat_ident_mut(&mut self, pat: &mut PatIdent) {
                self.1 |= pat.ident.unraw() == self.0;
                visit_mut::visit_pat_ident_mut(self, pat);
            }
        }
        let mut binds = Binds(&self.word, false);
        binds.visit_pat_mut(&mut pat.clone());
        self.shadowed |= binds.1;
    }

    fn scope(&mut self, inside: impl FnOnce(&mut Self)) {
        let (shadowed, queries) = (self.shadowed, self.queries.len());
        inside(self);
        self.shadowed = shadowed;
        self.queries.truncate(queries);
    }

    fn moved(&mut self, moves: bool, inside: impl FnOnce(&mut Self)) {
        let moving = self.moving;
        self.moving |= moves;
        inside(self);
        self.moving = moving;
    }

    /// Whether the expression starts with `sqlx::…`, or with a variable that does.
    fn is_query(&self, expr: &Expr) -> bool {
        match expr {
            Expr::MethodCall(call) => self.is_query(&call.receiver),
            Expr::Call(call) => matches!(&*call.func, Expr::Path(it) if is_of_sqlx(&it.path)),
            Expr::Macro(it) => is_of_sqlx(&it.mac.path),
            Expr::Path(it) => it.path.get_ident().is_some_and(|it| self.queries.contains(it)),
            _ => false,
        }
    }

    /// `execute(&mut name)` of a query.
    fn executor(&self, call: &ExprMethodCall) -> Option<Span> {
        let [argument] = call.args.iter().collect::<Vec<_>>()[..] else { return None };
        let lent = match argument {
            Expr::Reference(it) => &it.expr,
            it => it,
        };
        let is_executing = EXECUTING.iter().any(|it| call.method == it) && self.is_query(&call.receiver);
        self.variable(lent).filter(|_| is_executing)
    }

    /// An argument that is the variable alone: given away. For `commit(tx)`, the error points at `commit`.
    fn arguments<'a>(&mut self, method: Option<&Ident>, mut args: impl Iterator<Item = &'a Expr>) {
        if let Some(at) = args.find_map(|it| self.variable(it)) {
            let ending = method.filter(|it| *it == "commit");
            let misuse = Misuse::GivenAway { method: ending.map(Ident::to_string) };
            self.misuses.push((ending.map_or(at, Ident::span), misuse));
        }
    }
}

impl VisitMut for Finder {
    fn visit_block_mut(&mut self, block: &mut Block) {
        self.scope(|uses| {
            for stmt in &mut block.stmts {
                uses.visit_stmt_mut(stmt);
            }
        });
    }

    fn visit_stmt_mut(&mut self, stmt: &mut Stmt) {
        let Stmt::Local(local) = stmt else { return visit_mut::visit_stmt_mut(self, stmt) };
        if let Some(init) = &mut local.init {
            self.visit_expr_mut(&mut init.expr);
            if let Some((_, diverge)) = &mut init.diverge {
                self.visit_expr_mut(diverge);
            }
        }
        self.bind(&local.pat);
        let (Pat::Ident(PatIdent { ident, .. }), Some(init)) = (&local.pat, &local.init) else { return };
        if self.is_query(&init.expr) {
            self.queries.push(ident.clone());
        } else {
            self.queries.retain(|it| it != ident);
        }
    }

    // Items do not see the variables around them; macros do.
    fn visit_item_mut(&mut self, item: &mut Item) {
        if let Item::Macro(item) = item {
            self.visit_macro_mut(&mut item.mac);
        }
    }

    fn visit_macro_mut(&mut self, mac: &mut Macro) {
        self.used |= !self.shadowed && mentions_word(&mac.tokens, &self.word);
    }

    fn visit_expr_path_mut(&mut self, path: &mut ExprPath) {
        if let Some(span) = self.variable(&Expr::Path(path.clone())) {
            self.used = true;
            if self.moving {
                self.misuses.push((span, Misuse::Moved));
            }
        }
    }

    fn visit_expr_method_call_mut(&mut self, call: &mut ExprMethodCall) {
        if self.variable(&call.receiver).is_some() {
            self.misuses.push((call.method.span(), Misuse::Call { method: call.method.to_string() }));
        }
        match self.executor(call) {
            Some(at) => self.misuses.push((at, Misuse::Executor)),
            None => self.arguments(Some(&call.method), call.args.iter()),
        }
        visit_mut::visit_expr_method_call_mut(self, call);
    }

    fn visit_expr_call_mut(&mut self, call: &mut ExprCall) {
        self.arguments(None, call.args.iter());
        visit_mut::visit_expr_call_mut(self, call);
    }

    fn visit_expr_async_mut(&mut self, block: &mut ExprAsync) {
        self.moved(block.capture.is_some(), |it| visit_mut::visit_expr_async_mut(it, block));
    }

    fn visit_expr_closure_mut(&mut self, closure: &mut ExprClosure) {
        self.scope(|uses| {
            for input in &closure.inputs {
                uses.bind(input);
            }
            uses.moved(closure.capture.is_some(), |uses| uses.visit_expr_mut(&mut closure.body));
        });
    }

    fn visit_arm_mut(&mut self, arm: &mut Arm) {
        self.scope(|uses| {
            uses.bind(&arm.pat);
            visit_mut::visit_arm_mut(uses, arm);
        });
    }

    fn visit_expr_for_loop_mut(&mut self, each: &mut ExprForLoop) {
        self.visit_expr_mut(&mut each.expr);
        self.scope(|uses| {
            uses.bind(&each.pat);
            uses.visit_block_mut(&mut each.body);
        });
    }

    fn visit_expr_let_mut(&mut self, binding: &mut ExprLet) {
        self.visit_expr_mut(&mut binding.expr);
        self.bind(&binding.pat);
    }

    fn visit_expr_if_mut(&mut self, branch: &mut ExprIf) {
        self.scope(|uses| {
            uses.visit_expr_mut(&mut branch.cond);
            uses.visit_block_mut(&mut branch.then_branch);
        });
        if let Some((_, otherwise)) = &mut branch.else_branch {
            self.visit_expr_mut(otherwise);
        }
    }

    fn visit_expr_while_mut(&mut self, each: &mut ExprWhile) {
        self.scope(|uses| {
            uses.visit_expr_mut(&mut each.cond);
            uses.visit_block_mut(&mut each.body);
        });
    }
}

fn is_of_sqlx(path: &Path) -> bool {
    path.segments.len() > 1 && path.segments[0].ident == "sqlx"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tx() -> Ident {
        Ident::new("tx", Span::call_site())
    }

    fn tokens(body: &str) -> TokenStream {
        body.parse().expect("tokens")
    }

    #[test]
    fn a_name_is_used_unless_another_has_it() {
        for used in [
            "f(&mut *tx)",
            "if a { f(&mut tx).await? }",
            "let f = async || g(&mut tx).await; f().await",
            r#"format!("{tx:?}")"#,
            r#"println!("{:>tx$}", 1)"#,
            "select! { _ = f(&mut *tx) => {} }",
            "let tx = &mut tx; f(tx)",
            "{ let tx = 1; } f(&tx)",
            "let x = if let Some(tx) = a { tx } else { tx };",
            "Some(x { tx })",
            "this is not Rust tx",
        ] {
            assert!(is_used(&tokens(used), &tx()), "{used}");
        }
        for unused in [
            "",
            "f(self.tx, x.tx())",
            "let tx = pool.begin().await?; f(&mut *tx)",
            "a.map(|tx| tx + 1)",
            "match a { Some(tx) => f(&tx), None => {} }",
            "for tx in all { f(&tx) }",
            "while let Some(tx) = next() && tx > 1 { f(&tx) }",
            "fn f(tx: u8) -> u8 { tx }",
            r#"format!("{txt}{{tx}}")"#,
        ] {
            // Doubled braces in a string count as a use, to be safe.
            let is_safe = unused.contains("{{tx");
            assert_eq!(is_used(&tokens(unused), &tx()), is_safe, "{unused}");
        }
    }

    #[test]
    fn what_ends_or_moves_a_name_is_found_where_it_is() {
        let found = |body: &str| misuses(&tokens(body), &tx()).into_iter().map(|(_, it)| it).collect::<Vec<_>>();
        let call = |method: &str| Misuse::Call { method: method.to_owned() };
        assert_eq!(found("tx.commit().await?; Ok(())"), [call("commit")]);
        assert_eq!(found("if a { return tx.rollback().await }"), [call("rollback")]);
        assert_eq!(found("drop(tx)"), [Misuse::GivenAway { method: None }]);
        assert_eq!(found("lease.commit(tx).await"), [Misuse::GivenAway { method: Some("commit".to_owned()) }]);
        assert_eq!(found("spawn(async move { f(&mut *tx).await })"), [Misuse::Moved]);
        assert_eq!(found("let f = move || g(&mut tx);"), [Misuse::Moved]);
        assert_eq!(found("sqlx::query(x).bind(1).execute(&mut tx).await?"), [Misuse::Executor]);
        assert_eq!(found("sqlx::query!(x).fetch_one(&tx).await?"), [Misuse::Executor]);
        assert_eq!(found("let q = ::sqlx::raw_sql(x); let q = q.bind(1); q.fetch_all(tx)"), [Misuse::Executor]);
        for fine in [
            "sqlx::query(x).execute(&mut *tx); sqlx::query(x).bind(&tx)",
            "RowLock::table(x).fetch_one(&mut tx); self.execute(&mut tx); query.execute(&mut tx)",
            "let q = sqlx::query(x); { let q = f(); q.execute(&mut tx); }",
            "f(&mut *tx, &mut tx)",
            "let tx = begin().await?; tx.commit().await",
            "spawn(async move { let tx = begin().await; tx.commit().await })",
            "a.commit(); self.tx.commit()",
        ] {
            assert_eq!(found(fine), [], "{fine}");
        }
    }
}
