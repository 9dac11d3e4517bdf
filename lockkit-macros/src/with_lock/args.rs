//! What is written between the parentheses of `#[with_lock(…)]`. Knows which arguments there are, not which go together.

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Expr, ExprLit, Ident, Lit, LitStr, Path, Token, Type,
    ext::IdentExt,
    parse::{ParseStream, Parser},
    token,
};

pub(crate) use crate::with_lock::words::{list, nearest};
use crate::with_lock::{
    columns::{By, parse_by, parse_order},
    words::{STRATEGIES, arguments_of, example, meant_argument, meant_strategy},
};

/// An argument's value, with its name for errors.
pub(crate) struct Given<T> {
    pub(crate) name: Ident,
    pub(crate) value: T,
}

/// The name and type of what the body gets.
pub(crate) struct Typed {
    pub(crate) name: Ident,
    pub(crate) ty: Type,
}

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
    pub(crate) ttl: Option<Given<Expr>>,
    pub(crate) wait: Option<Given<Expr>>,
    pub(crate) min_hold: Option<Given<Expr>>,
    pub(crate) on_lost: Option<Given<Expr>>,
    pub(crate) fair: Option<Given<()>>,
    pub(crate) attempts: Option<Given<Expr>>,
    pub(crate) deadline: Option<Given<Expr>>,
    pub(crate) retry_if: Option<Given<Expr>>,
    pub(crate) on_busy: Option<Given<Expr>>,
    pub(crate) bind: Option<Given<Ident>>,
    pub(crate) tx: Option<Given<Ident>>,
    pub(crate) krate: Option<Given<Path>>,
    /// The arguments that were meant, but could not be understood: they are not missing as well.
    pub(crate) broken: Vec<&'static str>,
    /// Whether an argument could not be understood at all: any that is missing may be meant by it.
    pub(crate) is_unclear: bool,
}

/// Several errors as one.
#[derive(Default)]
pub(crate) struct Errors(Option<syn::Error>);

impl Errors {
    pub(crate) fn push(&mut self, err: syn::Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(err),
            None => self.0 = Some(err),
        }
    }

    /// The value, or the error noted.
    pub(crate) fn note<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|err| self.push(err)).ok()
    }

    /// Nothing, as a compile error, or `compile_error!`s.
    pub(crate) fn into_tokens(self) -> TokenStream {
        self.0.map(syn::Error::into_compile_error).unwrap_or_default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

impl Args {
    /// Parses as much as can be understood; everything else is an error in `errors`.
    pub(crate) fn parse(tokens: TokenStream, errors: &mut Errors) -> Self {
        let mut args = Self::default();
        let parsed = (|input: ParseStream<'_>| {
            let (mut first, mut has_semicolon) = (true, false);
            while !input.is_empty() {
                let name = input.fork().call(Ident::parse_any).map(|it| it.to_string());
                if let Err(err) = args.parse_one(input, first) {
                    errors.push(err);
                    match name.ok().and_then(|it| meant_argument(&it)) {
                        Some(argument) => args.broken.push(argument),
                        None => args.is_unclear = true,
                    }
                    skip_argument(input)?;
                }
                first = false;
                if input.peek(Token![;]) {
                    // One error: a user of semicolons separates all arguments so.
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

    /// The names of the arguments that not every kind of lock has.
    pub(crate) fn of_some_kinds(&self) -> Vec<Ident> {
        fn name<T>(given: Option<&Given<T>>) -> Option<Ident> {
            given.map(|it| it.name.clone())
        }
        let names = [
            name(self.key.as_ref()),
            name(self.keys.as_ref()),
            name(self.table.as_ref()),
            name(self.by.as_ref()),
            name(self.by_any.as_ref()),
            name(self.order_by.as_ref()),
            name(self.limit.as_ref()),
            name(self.skip_locked.as_ref()),
            name(self.rows.as_ref()),
            name(self.ttl.as_ref()),
            name(self.wait.as_ref()),
            name(self.min_hold.as_ref()),
            name(self.on_lost.as_ref()),
            name(self.fair.as_ref()),
            name(self.attempts.as_ref()),
            name(self.deadline.as_ref()),
            name(self.retry_if.as_ref()),
        ];
        names.into_iter().flatten().collect()
    }

    fn parse_one(&mut self, input: ParseStream<'_>, first: bool) -> syn::Result<()> {
        if first && let Some(result) = self.parse_strategy(input) {
            return result;
        }
        if !input.peek(Ident::peek_any) {
            return Err(input.error("an argument is a name and its value, such as `wait = \"2s\"`"));
        }
        let name = Ident::parse_any(input)?;
        let is_alone = ends(input);
        let word = name.to_string();
        match word.as_str() {
            "fair" | "skip_locked" if is_alone || input.peek(Ident::peek_any) => {
                let slot = if word == "fair" { &mut self.fair } else { &mut self.skip_locked };
                return set(slot, name, ());
            }
            "fair" | "skip_locked" => return Err(error(&name, format!("write `{word}` alone, or leave it out"))),
            _ => {}
        }
        let has_parens = matches!(word.as_str(), "by" | "by_any" | "order_by");
        let has_value = if has_parens {
            input.peek(token::Paren)
        } else {
            input.peek(Token![=]) && !input.peek(Token![==]) && !input.peek(Token![=>])
        };
        let example = match example(&word) {
            Some(example) if has_value => example,
            Some(example) => return Err(error(&name, format!("write `{example}`"))),
            None if is_alone => return self.bare_word(name),
            None => return Err(self.unknown(&name)),
        };
        if has_parens {
            let columns;
            syn::parenthesized!(columns in input);
            return match word.as_str() {
                "by" => set(&mut self.by, name, parse_by(&columns)?),
                "by_any" => set(&mut self.by_any, name, parse_by(&columns)?),
                _ => set(&mut self.order_by, name, parse_order(&columns)?),
            };
        }
        input.parse::<Token![=]>()?;
        if ends(input) {
            return Err(error(&name, format!("write `{example}`")));
        }
        match word.as_str() {
            "as" => set(&mut self.bind, name, parse_name(input, example)?),
            "tx" => set(&mut self.tx, name, parse_name(input, example)?),
            "rows" => set(&mut self.rows, name, parse_typed(input, example)?),
            "crate" => set(&mut self.krate, name, input.call(Path::parse_mod_style)?),
            _ => {
                let value = parse_value(input, &name, example)?;
                let slot = match word.as_str() {
                    "on" => &mut self.on,
                    "key" => &mut self.key,
                    "keys" => &mut self.keys,
                    "table" => &mut self.table,
                    "limit" => &mut self.limit,
                    "ttl" => &mut self.ttl,
                    "wait" => &mut self.wait,
                    "min_hold" => &mut self.min_hold,
                    "on_lost" => &mut self.on_lost,
                    "attempts" => &mut self.attempts,
                    "deadline" => &mut self.deadline,
                    "retry_if" => &mut self.retry_if,
                    "on_busy" => &mut self.on_busy,
                    _ => unreachable!("BUG: every known argument is parsed"),
                };
                set(slot, name, value)
            }
        }
    }

    /// The first argument, if it says which kind of lock, in whatever form.
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
            let value = ahead.call(Ident::parse_any).ok().filter(|it| STRATEGIES.iter().any(|known| it == known))?;
            if example(&word.to_string()).is_some() || !ends(&ahead) {
                return None;
            }
            let message = format!("the kind of lock goes first, without a name: {}", written(&value));
            self.strategy = Some(value);
            return Some(Err(error(&word, message)));
        }
        let is_strategy = STRATEGIES.iter().any(|known| word == known);
        if !ends(&ahead) && !is_strategy {
            return None;
        }
        // `fair` goes first by mistake.
        if !is_strategy && example(&word.to_string()).is_some() {
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
        let strategy = meant_strategy(&quoted.value());
        let hint = match strategy {
            Some(strategy) => format!("`{strategy}`"),
            None => list(&STRATEGIES, "or"),
        };
        self.strategy = strategy.map(|it| Ident::new(it, quoted.span()));
        Err(syn::Error::new(quoted.span(), format!("write the kind of lock without quotes: {hint}")))
    }

    fn bare_word(&mut self, word: Ident) -> syn::Result<()> {
        if !STRATEGIES.iter().any(|it| word == it) {
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
                "a key captures variables, and has no arguments: write `key = {key:?}`, or `key = format!(…)` for another value"
            );
            return error(name, message);
        }
        let hint = match (meant_argument(&name.to_string()), &self.strategy) {
            (Some(meant), _) => format!("did you mean `{meant}`?"),
            (None, Some(strategy)) => format!("`{strategy}` has {}", arguments_of(Some(&strategy.to_string()))),
            (None, None) => format!("there are {}", arguments_of(None)),
        };
        error(name, format!("there is no argument `{name}`; {hint}"))
    }
}

/// A name for the body to use.
fn parse_name(input: ParseStream<'_>, example: &str) -> syn::Result<Ident> {
    let message = format!("this is a name for the body to use, without quotes, `mut` or `&`: write `{example}`");
    input.parse().map_err(|err| syn::Error::new(err.span(), message))
}

fn parse_typed(input: ParseStream<'_>, example: &str) -> syn::Result<Typed> {
    let name: Ident = parse_name(input, example)?;
    if !input.peek(Token![:]) {
        return Err(error(&name, format!("the rows need a type, a `Vec` of a `sqlx::FromRow`: write `{example}`")));
    }
    input.parse::<Token![:]>()?;
    let ty = input.parse()?;
    let is_vec = matches!(&ty, Type::Path(it) if it.path.segments.last().is_some_and(|it| it.ident == "Vec"));
    if !is_vec {
        return Err(syn::Error::new_spanned(
            &ty,
            format!("the rows are a `Vec` of a `sqlx::FromRow`: write `{example}`"),
        ));
    }
    Ok(Typed { name, ty })
}

fn parse_value(input: ParseStream<'_>, name: &Ident, example: &str) -> syn::Result<Expr> {
    let value: Expr = input.parse()?;
    let next = input.fork().parse::<Ident>();
    if let (Expr::Lit(ExprLit { lit: Lit::Int(number), .. }), Ok(unit)) = (&value, &next)
        && ["us", "ms", "s", "m", "h"].iter().any(|it| unit == it)
    {
        let message = format!("a duration is text: write `{name} = \"{number}{unit}\"`");
        return Err(syn::Error::new(number.span(), message));
    }
    if !ends(input) && !input.peek(Ident::peek_any) && !input.peek(Lit) {
        return Err(input.error(format!("the value of `{name}` ends before this: write `{example}`")));
    }
    Ok(value)
}

/// Whether an argument ends here.
fn ends(input: ParseStream<'_>) -> bool {
    input.is_empty() || input.peek(Token![,]) || input.peek(Token![;])
}

/// Goes to the start of the next argument.
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

/// The one setter: refuses a second value.
fn set<T>(slot: &mut Option<Given<T>>, name: Ident, value: T) -> syn::Result<()> {
    if slot.is_some() {
        return Err(error(&name, format!("`{name}` is given twice; remove one")));
    }
    *slot = Some(Given { name, value });
    Ok(())
}

/// Goes to the end of an argument that makes no sense.
fn skip_argument(input: ParseStream<'_>) -> syn::Result<()> {
    while !ends(input) {
        input.parse::<TokenTree>()?;
    }
    Ok(())
}

pub(crate) fn error(at: &Ident, message: impl std::fmt::Display) -> syn::Error {
    syn::Error::new(at.span(), message)
}
