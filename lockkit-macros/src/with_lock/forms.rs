//! The forms that an argument can have, and how each is parsed into its field of [`Args`].

use syn::{
    Expr, ExprLit, Ident, Lit, Path, Token, Type,
    ext::IdentExt,
    parse::{ParseBuffer, ParseStream},
    token,
};

use crate::{
    diagnostics::{Given, error, set},
    with_lock::{
        args::Args,
        columns::{By, parse_by, parse_order},
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
                set(field(args), name, parse_typed(input, example)?)
            }
            Self::Path(field) => {
                parse_equals(input, &name, example)?;
                set(field(args), name, input.call(Path::parse_mod_style)?)
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
