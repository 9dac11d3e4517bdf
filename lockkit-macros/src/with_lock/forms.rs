//! The forms that an argument can have, and how each is parsed into its field of [`Args`].

use syn::{
    Expr, ExprLit, Ident, Lit, Path, Token, Type,
    ext::IdentExt,
    parse::{ParseBuffer, ParseStream},
    parse_quote_spanned, token,
};

use crate::{
    diagnostics::{Given, error, set},
    krate::parse_crate,
    with_lock::{
        args::Args,
        columns::{By, parse_by, parse_order},
        jumps::loose_jump,
    },
};

/// The form of an argument, with its field.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    /// `name = expression`
    Value(fn(&mut Args) -> &mut Option<Given<Expr>>),
    /// `name`
    Word(fn(&mut Args) -> &mut Option<Given<()>>),
    /// `name = identifier`
    Name(fn(&mut Args) -> &mut Option<Given<Ident>>),
    /// `name = identifier: Type`
    Typed(fn(&mut Args) -> &mut Option<Given<Typed>>),
    /// `name = path`
    Path(fn(&mut Args) -> &mut Option<Given<Path>>),
    /// `name(column = value, …)`
    By(fn(&mut Args) -> &mut Option<Given<Vec<By>>>),
    /// `name(column, …)`
    Columns(fn(&mut Args) -> &mut Option<Given<Vec<Ident>>>),
}

/// The name and type of what the body gets.
pub(crate) struct Typed {
    pub(crate) name: Ident,
    pub(crate) ty: Type,
    /// Whether the type is that of exactly one row, and not of a `Vec` of them.
    pub(crate) is_one: bool,
}

impl Form {
    /// Parses what follows the name, and sets the field.
    pub(crate) fn parse(self, args: &mut Args, name: Ident, input: ParseStream<'_>, example: &str) -> syn::Result<()> {
        match self {
            Self::Word(field) => {
                // Another word behind it is the next argument, whose comma is missing.
                if !ends(input) && !input.peek(Ident::peek_any) {
                    return Err(error(&name, format!("write `{name}` alone, or leave it out")));
                }
                set(field(args), name, ())
            }
            Self::Value(field) => {
                parse_equals(input, &name, example)?;
                let value = parse_value(input, &name, example)?;
                set(field(args), name, value)
            }
            Self::Name(field) => {
                parse_equals(input, &name, example)?;
                set(field(args), name, parse_name(input, example)?)
            }
            Self::Typed(field) => {
                parse_equals(input, &name, example)?;
                let is_one = name == "row";
                set(field(args), name, parse_typed(input, example, is_one)?)
            }
            Self::Path(field) => {
                parse_equals(input, &name, example)?;
                set(field(args), name, parse_crate(input)?)
            }
            Self::By(field) => set(field(args), name.clone(), parse_by(&parse_parens(input, &name, example)?)?),
            Self::Columns(field) => set(field(args), name.clone(), parse_order(&parse_parens(input, &name, example)?)?),
        }
    }

    /// The name of the argument where it was written, if it was.
    pub(crate) fn given(self, args: &mut Args) -> Option<Ident> {
        fn name<T>(given: Option<&Given<T>>) -> Option<Ident> {
            given.map(|it| it.name.clone())
        }
        match self {
            Self::Value(field) => name(field(args).as_ref()),
            Self::Word(field) => name(field(args).as_ref()),
            Self::Name(field) => name(field(args).as_ref()),
            Self::Typed(field) => name(field(args).as_ref()),
            Self::Path(field) => name(field(args).as_ref()),
            Self::By(field) => name(field(args).as_ref()),
            Self::Columns(field) => name(field(args).as_ref()),
        }
    }
}

/// Whether an argument ends here.
pub(crate) fn ends(input: ParseStream<'_>) -> bool {
    input.is_empty() || input.peek(Token![,]) || input.peek(Token![;])
}

/// The `=` of an argument that has a value.
fn parse_equals(input: ParseStream<'_>, name: &Ident, example: &str) -> syn::Result<()> {
    let is_equals = input.peek(Token![=]) && !input.peek(Token![==]) && !input.peek(Token![=>]);
    let has_value = is_equals && {
        input.parse::<Token![=]>()?;
        !ends(input)
    };
    if has_value { Ok(()) } else { Err(error(name, format!("write `{example}`"))) }
}

/// What is between the parentheses of an argument that has them.
fn parse_parens<'a>(input: ParseStream<'a>, name: &Ident, example: &str) -> syn::Result<ParseBuffer<'a>> {
    if !input.peek(token::Paren) {
        return Err(error(name, format!("write `{example}`")));
    }
    let inside;
    syn::parenthesized!(inside in input);
    Ok(inside)
}

/// A name for the body to use.
fn parse_name(input: ParseStream<'_>, example: &str) -> syn::Result<Ident> {
    let message = format!("this is a name for the body to use, without quotes, `mut` or `&`: write `{example}`");
    input.parse().map_err(|err| syn::Error::new(err.span(), message))
}

fn parse_typed(input: ParseStream<'_>, example: &str, is_one: bool) -> syn::Result<Typed> {
    let name: Ident = parse_name(input, example)?;
    if !input.peek(Token![:]) {
        return Err(error(&name, format!("this needs a type that is read from rows: write `{example}`")));
    }
    input.parse::<Token![:]>()?;
    Ok(Typed { name, ty: input.parse()?, is_one })
}

fn parse_value(input: ParseStream<'_>, name: &Ident, example: &str) -> syn::Result<Expr> {
    let value: Expr = if input.peek(Token![const]) && !input.peek2(token::Brace) {
        // `key = const "nightly"` is a constant, and no template.
        let of: Token![const] = input.parse()?;
        let constant: Expr = input.parse()?;
        parse_quote_spanned!(of.span=> const { #constant })
    } else {
        input.parse()?
    };
    // `on_lost = continue` is a word.
    if name != "on_lost"
        && let Some(jump) = loose_jump(&value)
    {
        let message =
            format!("this would jump inside the code of the attribute; `{name}` is a value: write `{example}`");
        return Err(syn::Error::new(jump, message));
    }
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
