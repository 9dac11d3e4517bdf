//! What is written between the parentheses of `#[with_lock(…)]`. Knows which arguments there are, not which go together.

use proc_macro2::TokenStream;
use syn::{
    Expr, Ident, Path, Token,
    ext::IdentExt,
    parse::{ParseStream, Parser},
    punctuated::Punctuated,
    token,
};

/// An argument's value, with its name for errors.
pub(crate) struct Given<T> {
    pub(crate) name: Ident,
    pub(crate) value: T,
}

/// One `column = value` of `by(…)`.
pub(crate) struct By {
    pub(crate) column: Ident,
    pub(crate) value: Expr,
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
}

/// Every argument, and an example of it.
const KNOWN: [(&str, &str); 17] = [
    ("on", "on = &self.db"),
    ("key", r#"key = "order:{user_id}""#),
    ("keys", r#"keys = ["account:{from}", "account:{to}"]"#),
    ("table", r#"table = "t_items""#),
    ("by", "by(item_id = item_id)"),
    ("ttl", r#"ttl = "30s""#),
    ("wait", r#"wait = "2s""#),
    ("min_hold", r#"min_hold = "1m""#),
    ("on_lost", "on_lost = continue"),
    ("fair", "fair"),
    ("attempts", "attempts = 3"),
    ("deadline", r#"deadline = "100ms""#),
    ("retry_if", "retry_if = path::to::test"),
    ("on_busy", "on_busy = Ok(None)"),
    ("as", "as = lease"),
    ("tx", "tx = tx"),
    ("crate", "crate = path::to::lockkit"),
];

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
            let mut first = true;
            while !input.is_empty() {
                let name = input.fork().call(Ident::parse_any);
                if let Err(err) = args.parse_one(input, first) {
                    errors.push(err);
                    args.broken.extend(name.ok().and_then(|it| meant(&it.to_string())));
                    skip_argument(input)?;
                }
                first = false;
                if !input.is_empty() {
                    input.parse::<Token![,]>()?;
                }
            }
            Ok(())
        })
        .parse2(tokens);
        errors.note(parsed);
        args
    }

    fn parse_one(&mut self, input: ParseStream<'_>, first: bool) -> syn::Result<()> {
        let name = Ident::parse_any(input)?;
        let has_end = input.is_empty() || input.peek(Token![,]);
        if name == "fair" {
            if !has_end {
                return Err(error(&name, "write `fair` alone, or leave it out"));
            }
            return set(&mut self.fair, name, ());
        }
        let example = KNOWN.iter().find(|(known, _)| name == known).map(|(_, example)| *example);
        let is_by = name == "by";
        let has_value = if is_by { input.peek(token::Paren) } else { input.peek(Token![=]) };
        match example {
            Some(_) if has_value => {}
            Some(example) => return Err(error(&name, format!("write `{example}`"))),
            None if has_end => return self.bare_word(name, first),
            None => return Err(unknown(&name)),
        }
        if is_by {
            let columns;
            syn::parenthesized!(columns in input);
            let columns = columns.parse_terminated(parse_column, Token![,])?;
            return set(&mut self.by, name, Punctuated::into_iter(columns).collect());
        }
        input.parse::<Token![=]>()?;
        match name.to_string().as_str() {
            "on" => set(&mut self.on, name, input.parse()?),
            "key" => set(&mut self.key, name, input.parse()?),
            "keys" => set(&mut self.keys, name, input.parse()?),
            "table" => set(&mut self.table, name, input.parse()?),
            "ttl" => set(&mut self.ttl, name, input.parse()?),
            "wait" => set(&mut self.wait, name, input.parse()?),
            "min_hold" => set(&mut self.min_hold, name, input.parse()?),
            "on_lost" => set(&mut self.on_lost, name, input.parse()?),
            "attempts" => set(&mut self.attempts, name, input.parse()?),
            "deadline" => set(&mut self.deadline, name, input.parse()?),
            "retry_if" => set(&mut self.retry_if, name, input.parse()?),
            "on_busy" => set(&mut self.on_busy, name, input.parse()?),
            "as" => set(&mut self.bind, name, input.parse()?),
            "tx" => set(&mut self.tx, name, input.parse()?),
            "crate" => set(&mut self.krate, name, input.call(Path::parse_mod_style)?),
            _ => unreachable!("BUG: every known argument is parsed"),
        }
    }

    fn bare_word(&mut self, word: Ident, first: bool) -> syn::Result<()> {
        if first {
            self.strategy = Some(word);
            return Ok(());
        }
        if meant(&word.to_string()).is_some() {
            return Err(unknown(&word));
        }
        if let Some(strategy) = &self.strategy {
            return Err(error(&word, format!("one lock at a time: this is a `{strategy}` lock already")));
        }
        let err = error(&word, format!("the kind of lock goes first: `#[with_lock({word}, …)]`"));
        self.strategy = Some(word);
        Err(err)
    }
}

fn parse_column(input: ParseStream<'_>) -> syn::Result<By> {
    let column = input.call(Ident::parse_any)?;
    if !input.peek(Token![=]) {
        return Err(error(&column, format!("write the column and its value: `{column} = {column}`")));
    }
    input.parse::<Token![=]>()?;
    Ok(By { column, value: input.parse()? })
}

/// The one setter: refuses a second value.
fn set<T>(slot: &mut Option<Given<T>>, name: Ident, value: T) -> syn::Result<()> {
    if slot.is_some() {
        return Err(error(&name, format!("`{name}` is given twice; remove one")));
    }
    *slot = Some(Given { name, value });
    Ok(())
}

fn unknown(name: &Ident) -> syn::Error {
    let hint = match meant(&name.to_string()) {
        Some(known) => format!("did you mean `{known}`?"),
        None => format!("there are {}", list(&KNOWN.map(|(known, _)| known), "and")),
    };
    error(name, format!("there is no argument `{name}`; {hint}"))
}

/// The argument of that name, or nearly that name.
fn meant(name: &str) -> Option<&'static str> {
    nearest(name, &KNOWN.map(|(known, _)| known))
}

/// Goes on with the next argument after one that makes no sense.
fn skip_argument(input: ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

pub(crate) fn error(at: &Ident, message: impl std::fmt::Display) -> syn::Error {
    syn::Error::new(at.span(), message)
}

/// "`a`, `b` or `c`".
pub(crate) fn list(words: &[&str], and: &str) -> String {
    let quoted: Vec<_> = words.iter().map(|it| format!("`{it}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} {and} {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|it| (distance(word, it), *it)).min()?;
    (near.0 <= 2 && near.0 < near.1.len()).then_some(near.1)
}

/// How many letters must be inserted, removed, replaced or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        for (slip, known) in [
            ("wiat", "wait"),
            ("atempts", "attempts"),
            ("onbusy", "on_busy"),
            ("tabel", "table"),
            ("kyes", "keys"),
            ("fiar", "fair"),
        ] {
            assert_eq!(meant(slip), Some(known));
        }
        assert_eq!(meant("timeout"), None);
        assert_eq!(nearest("x", &["on", "as"]), None);
    }
}
