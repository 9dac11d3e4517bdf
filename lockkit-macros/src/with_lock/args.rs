//! Parses the arguments of `#[with_lock(…)]`. Does not know which of them go together.

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Expr, ExprLit, Ident, Lit, LitStr, Path, Token,
    ext::IdentExt,
    parse::{ParseStream, Parser},
    token,
};

use crate::{
    diagnostics::{Errors, Given, error},
    with_lock::{
        arguments::{ARGUMENTS, Argument},
        columns::By,
        forms::{Typed, ends},
        strategy::Strategy,
    },
};

/// The arguments as written.
#[derive(Default)]
pub(crate) struct Args {
    pub(crate) strategy: Option<Ident>,
    pub(crate) on: Option<Given<Expr>>,
    pub(crate) key: Option<Given<Expr>>,
    pub(crate) keys: Option<Given<Expr>>,
    pub(crate) table: Option<Given<Expr>>,
    pub(crate) by: Option<Given<Vec<By>>>,
    pub(crate) by_any: Option<Given<Vec<By>>>,
    pub(crate) order_by: Option<Given<Vec<Ident>>>,
    pub(crate) limit: Option<Given<Expr>>,
    pub(crate) skip_locked: Option<Given<()>>,
    pub(crate) rows: Option<Given<Typed>>,
    pub(crate) row: Option<Given<Typed>>,
    pub(crate) ttl: Option<Given<Expr>>,
    pub(crate) wait: Option<Given<Expr>>,
    pub(crate) min_hold: Option<Given<Expr>>,
    pub(crate) on_lost: Option<Given<Expr>>,
    pub(crate) fair: Option<Given<()>>,
    pub(crate) attempts: Option<Given<Expr>>,
    pub(crate) deadline: Option<Given<Expr>>,
    pub(crate) retry_if: Option<Given<Expr>>,
    pub(crate) on_busy: Option<Given<Expr>>,
    pub(crate) map_err: Option<Given<Expr>>,
    pub(crate) bind: Option<Given<Ident>>,
    pub(crate) tx: Option<Given<Ident>>,
    pub(crate) pool: Option<Given<Expr>>,
    pub(crate) request: Option<Given<Expr>>,
    pub(crate) keep: Option<Given<Expr>>,
    pub(crate) max_answer: Option<Given<Expr>>,
    pub(crate) store_err: Option<Given<Expr>>,
    pub(crate) krate: Option<Given<Path>>,
    /// The arguments whose value is an error already: they do not count as missing.
    pub(crate) broken: Vec<&'static str>,
    /// Whether some argument could not be recognized: it may be any of those that are missing.
    pub(crate) is_unclear: bool,
}

impl Args {
    /// Parses all arguments; reports those it cannot parse and goes on behind them.
    pub(crate) fn parse(tokens: TokenStream, errors: &mut Errors) -> Self {
        let mut args = Self::default();
        let parsed = (|input: ParseStream<'_>| {
            let strategy = input.fork().call(Ident::parse_any);
            if let Ok(strategy) = strategy
                && let Some(message) = Strategy::by_hand(&strategy.to_string())
            {
                // Its arguments are those of another attribute.
                args.is_unclear = true;
                input.parse::<TokenStream>()?;
                return Err(error(&strategy, message));
            }
            let (mut first, mut has_semicolon) = (true, false);
            while !input.is_empty() {
                let name = input.fork().call(Ident::parse_any).map(|it| it.to_string());
                if let Err(err) = args.parse_one(input, first) {
                    errors.push(err);
                    match name.ok().and_then(|it| Argument::meant(&it)) {
                        Some(argument) => args.broken.push(argument),
                        None => args.is_unclear = true,
                    }
                    skip_argument(input)?;
                }
                first = false;
                if input.peek(Token![;]) {
                    // One error for all semicolons.
                    if !std::mem::replace(&mut has_semicolon, true) {
                        errors.push(input.error("arguments are separated by commas: write `,` instead of `;`"));
                    }
                    input.parse::<Token![;]>()?;
                } else {
                    next_argument(input, errors)?;
                }
            }
            Ok(())
        })
        .parse2(tokens);
        errors.note(parsed);
        args
    }

    /// The arguments that were written, each with its name there, in the order of the table.
    pub(crate) fn given(&mut self) -> Vec<(&'static Argument, Ident)> {
        ARGUMENTS.iter().filter_map(|it| Some((it, it.form.given(self)?))).collect()
    }

    fn parse_one(&mut self, input: ParseStream<'_>, first: bool) -> syn::Result<()> {
        if first && let Some(result) = self.parse_strategy(input) {
            return result;
        }
        if input.peek(LitStr) {
            return Err(self.bare_text(&input.parse()?));
        }
        if !input.peek(Ident::peek_any) {
            return Err(input.error("an argument is a name and its value, such as `wait = \"2s\"`"));
        }
        let name = Ident::parse_any(input)?;
        let is_strategy = Strategy::of(&name).is_some() && ends(input);
        match Argument::named(&name.to_string()).filter(|_| !is_strategy) {
            Some(argument) => argument.form.parse(self, name, input, argument.example),
            None if ends(input) => self.bare_word(name),
            None => Err(self.unknown(&name)),
        }
    }

    /// Parses the first argument, if it is the strategy in any form: a word, a path, a string, or `name = word`.
    fn parse_strategy(&mut self, input: ParseStream<'_>) -> Option<syn::Result<()>> {
        if input.peek(LitStr) {
            return Some(self.quoted_strategy(input));
        }
        let ahead = input.fork();
        let word = ahead.call(Ident::parse_any).ok()?;
        let written = |word: &Ident| format!("`#[with_lock({word}, …)]`");
        if ahead.peek(Token![::]) {
            let path = input.call(Path::parse_mod_style).ok()?;
            let last = path.segments.last().map(|it| it.ident.clone())?;
            let message = format!("the kind of lock is one word: {}", written(&last));
            self.strategy = Some(last);
            return Some(Err(syn::Error::new_spanned(&path, message)));
        }
        if ahead.peek(Token![=]) {
            // `strategy = lease`
            ahead.parse::<Token![=]>().ok()?;
            let value = ahead.call(Ident::parse_any).ok().filter(|it| Strategy::of(it).is_some())?;
            if Argument::named(&word.to_string()).is_some() || !ends(&ahead) {
                return None;
            }
            let message = format!("the kind of lock goes first, without a name: {}", written(&value));
            self.strategy = Some(value);
            return Some(Err(error(&word, message)));
        }
        let is_strategy = Strategy::of(&word).is_some();
        if !ends(&ahead) && !is_strategy {
            return None;
        }
        // An argument without a value, such as `fair`, stands first by mistake.
        if !is_strategy && Argument::named(&word.to_string()).is_some() {
            return None;
        }
        let _ = input.call(Ident::parse_any);
        let has_parens = input.peek(token::Paren);
        let message = format!("the other arguments follow a comma: {}", written(&word));
        let result = if has_parens { Err(error(&word, message)) } else { Ok(()) };
        self.strategy = Some(word);
        Some(result)
    }

    fn quoted_strategy(&mut self, input: ParseStream<'_>) -> syn::Result<()> {
        let quoted: LitStr = input.parse()?;
        let strategy = Strategy::meant(&quoted.value());
        let hint = match strategy {
            Some(strategy) => format!("`{strategy}`"),
            None => Strategy::any(),
        };
        self.strategy = strategy.map(|it| Ident::new(it, quoted.span()));
        Err(syn::Error::new(quoted.span(), format!("write the kind of lock without quotes: {hint}")))
    }

    fn bare_word(&mut self, word: Ident) -> syn::Result<()> {
        if Strategy::of(&word).is_none() {
            return Err(self.unknown(&word));
        }
        if let Some(strategy) = &self.strategy {
            let message =
                format!("one lock for each attribute, and this one takes a `{strategy}` lock already; remove `{word}`");
            return Err(error(&word, message));
        }
        let err = error(&word, format!("the kind of lock goes first: `#[with_lock({word}, …)]`"));
        self.strategy = Some(word);
        Err(err)
    }

    /// The error of a text without the name of its argument.
    fn bare_text(&mut self, text: &LitStr) -> syn::Error {
        let name = match self.strategy.as_ref().and_then(Strategy::of) {
            Some(Strategy::Row) => "table",
            _ => "key",
        };
        let message = format!("an argument has a name: write `{name} = {:?}`", text.value());
        syn::Error::new(text.span(), message)
    }

    /// The error of an argument that does not exist.
    fn unknown(&mut self, name: &Ident) -> syn::Error {
        // `key = "order:{}", id` and `key = "order:{id}", id = order.id`, as in `format!`.
        if let Some(Given { value: Expr::Lit(ExprLit { lit: Lit::Str(key), .. }), .. }) = &self.key
            && (key.value().contains("{}") || key.value().contains(&format!("{{{name}")))
        {
            let key = key.value().replace("{}", &format!("{{{name}}}"));
            self.key = None;
            self.broken.push("key");
            let message = format!(
                "a key captures variables, and has no arguments: write `key = {key:?}`, or `key = format!(…)` for \
                 another value"
            );
            return error(name, message);
        }
        if let Some(message) = Strategy::by_hand(&name.to_string()) {
            return error(name, message);
        }
        let strategy = self.strategy.as_ref().and_then(Strategy::of);
        let hint = match (Argument::meant(&name.to_string()), strategy) {
            (Some(meant), _) => format!("did you mean `{meant}`?"),
            (None, Some(it)) => format!("`{it}` has {}", Argument::all_of(Some(it))),
            (None, None) => format!("there are {}", Argument::all_of(None)),
        };
        error(name, format!("there is no argument `{name}`; {hint}"))
    }
}

/// Skips to the start of the next argument.
fn next_argument(input: ParseStream<'_>, errors: &mut Errors) -> syn::Result<()> {
    if input.is_empty() {
        return Ok(());
    }
    if input.peek(Token![,]) {
        input.parse::<Token![,]>()?;
        if input.peek(Token![,]) {
            errors.push(input.error("there is a comma too many here; remove it"));
        }
        while input.peek(Token![,]) {
            input.parse::<Token![,]>()?;
        }
        return Ok(());
    }
    if input.peek(Ident::peek_any) {
        let next = input.fork().call(Ident::parse_any)?;
        errors.push(error(&next, format!("a comma is missing before `{next}`")));
        return Ok(());
    }
    errors.push(input.error("an argument ends before this, with a comma"));
    skip_argument(input)?;
    if input.peek(Token![,]) {
        input.parse::<Token![,]>()?;
    }
    Ok(())
}

/// Skips the rest of an argument after an error.
fn skip_argument(input: ParseStream<'_>) -> syn::Result<()> {
    while !ends(input) {
        input.parse::<TokenTree>()?;
    }
    Ok(())
}
