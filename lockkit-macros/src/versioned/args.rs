//! Parses `#[versioned(…)]`, and the options of `#[sqlx(…)]` that concern the same fields.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::{
    Attribute, ExprArray, Ident, LitStr, Path, Token, ext::IdentExt, meta::ParseNestedMeta, parse::ParseStream, token,
};

use crate::{
    diagnostics::{Errors, Given, Known, error, list, meant, set},
    krate::parse_crate,
};

/// One option.
struct Choice {
    name: &'static str,
    /// How to write it, for errors that say so.
    example: &'static str,
    /// What other libraries call it.
    other_names: &'static [&'static str],
}

/// The options of the struct.
static OF_STRUCT: [Choice; 4] = [
    Choice { name: "table", example: r#"table = "t_items""#, other_names: &["name"] },
    Choice { name: "key", example: r#"key = "item_id""#, other_names: &["id", "pk", "primary_key"] },
    Choice { name: "version", example: r#"version = "version""#, other_names: &["lock"] },
    Choice { name: "crate", example: "crate = path::to::lockkit", other_names: &[] },
];

/// The options of a field.
static OF_FIELD: [Choice; 2] = [
    Choice { name: "skip", example: "skip", other_names: &[] },
    Choice { name: "rename", example: r#"rename = "column""#, other_names: &["column"] },
];

/// The options of the struct.
#[derive(Default)]
pub(crate) struct StructArgs {
    /// The first attribute.
    pub(crate) at: Option<Span>,
    pub(crate) table: Option<Given<LitStr>>,
    pub(crate) key: Option<Given<Vec<LitStr>>>,
    pub(crate) version: Option<Given<LitStr>>,
    pub(crate) krate: Option<Given<Path>>,
    /// The case that sqlx gives to all columns.
    pub(crate) rename_all: Option<LitStr>,
    /// The options whose value is an error already: they do not count as missing.
    pub(crate) broken: Vec<&'static str>,
}

/// The options of a field.
#[derive(Default)]
pub(crate) struct FieldArgs {
    pub(crate) skip: Option<Span>,
    pub(crate) rename: Option<Given<LitStr>>,
    /// The column's name in sqlx.
    pub(crate) sqlx_rename: Option<LitStr>,
    /// Whether sqlx skips the field.
    pub(crate) sqlx_skip: bool,
    /// The option that converts the value on reading, which a save could not undo.
    pub(crate) sqlx_converts: Option<Ident>,
    /// Set if sqlx reads the value as JSON.
    pub(crate) sqlx_json: Option<Json>,
}

/// A column of JSON.
pub(crate) struct Json {
    pub(crate) at: Ident,
    /// Whether `None` is NULL instead of the JSON `null`.
    pub(crate) is_nullable: bool,
}

impl StructArgs {
    /// Parses as much as can be understood; everything else is an error in `errors`.
    pub(crate) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut args = Self::default();
        for attr in attrs.iter().filter(|it| it.path().is_ident("versioned")) {
            args.at.get_or_insert(attr.path().segments[0].ident.span());
            each_option(attr, errors, |input| {
                let name = input.fork().call(Ident::parse_any).ok();
                args.parse_one(input)
                    .inspect_err(|_| args.broken.extend(name.and_then(|it| meant_option(&it, &OF_STRUCT))))
            });
        }
        each_of_sqlx(attrs, |meta| {
            if meta.path.is_ident("rename_all") {
                args.rename_all = Some(meta.value()?.parse()?);
                return Ok(());
            }
            skip_value(meta)
        });
        args
    }

    fn parse_one(&mut self, input: ParseStream<'_>) -> syn::Result<()> {
        if input.peek(LitStr) {
            self.broken.push("table");
            let table: LitStr = input.parse()?;
            let message = format!("an option has a name: write `table = {:?}`", table.value());
            return Err(syn::Error::new(table.span(), message));
        }
        let name = Ident::parse_any(input)?;
        let example = example(&name, &OF_STRUCT)?;
        if name == "key" && input.peek(token::Paren) {
            let columns;
            syn::parenthesized!(columns in input);
            let parsed = columns.parse_terminated(|input| parse_text(input, r#"key("a", "b")"#), Token![,]);
            // It is one error, also with more behind it.
            columns.parse::<TokenStream>()?;
            return set(&mut self.key, name, parsed?.into_iter().collect());
        }
        if !input.peek(Token![=]) {
            return Err(error(&name, format!("write `{example}`")));
        }
        input.parse::<Token![=]>()?;
        match name.to_string().as_str() {
            "table" => set(&mut self.table, name, parse_text(input, example)?),
            "key" if input.peek(token::Bracket) => {
                let columns = input.parse::<ExprArray>()?;
                let written = columns.elems.to_token_stream();
                Err(syn::Error::new_spanned(columns, format!("a key of several columns is written `key({written})`")))
            }
            "key" => {
                let column = parse_text(input, example)?;
                if column.value().contains(',') {
                    let columns: Vec<_> = column.value().split(',').map(|it| format!("{:?}", it.trim())).collect();
                    let message = format!("a key of several columns is written `key({})`", columns.join(", "));
                    return Err(syn::Error::new(column.span(), message));
                }
                set(&mut self.key, name, vec![column])
            }
            "version" => set(&mut self.version, name, parse_text(input, example)?),
            _ => set(&mut self.krate, name, parse_crate(input)?),
        }
    }
}

impl FieldArgs {
    /// Parses as much as can be understood; everything else is an error in `errors`.
    pub(crate) fn parse(attrs: &[Attribute], errors: &mut Errors) -> Self {
        let mut args = Self::default();
        for attr in attrs.iter().filter(|it| it.path().is_ident("versioned")) {
            each_option(attr, errors, |input| args.parse_one(input));
        }
        each_of_sqlx(attrs, |meta| {
            let Some(name) = meta.path.get_ident() else { return skip_value(meta) };
            match name.to_string().as_str() {
                "rename" => {
                    args.sqlx_rename = Some(meta.value()?.parse()?);
                    return Ok(());
                }
                "skip" => args.sqlx_skip = true,
                "json" => {
                    let is_nullable = meta.input.peek(token::Paren);
                    args.sqlx_json = Some(Json { at: name.clone(), is_nullable });
                }
                "flatten" | "try_from" => args.sqlx_converts = Some(name.clone()),
                _ => {}
            }
            skip_value(meta)
        });
        args
    }

    fn parse_one(&mut self, input: ParseStream<'_>) -> syn::Result<()> {
        let name = Ident::parse_any(input)?;
        if let Some(Choice { example, .. }) = OF_STRUCT.iter().find(|it| name == it.name) {
            return Err(error(&name, format!("`{name}` goes on the struct: `#[versioned({example}, …)]`")));
        }
        let example = example(&name, &OF_FIELD)?;
        let has_value = input.peek(Token![=]);
        if name == "skip" && !has_value {
            self.skip = Some(name.span());
            return Ok(());
        }
        if name == "skip" {
            return Err(error(&name, "`skip` has no value; write `#[versioned(skip)]`"));
        }
        if !has_value {
            return Err(error(&name, format!("write `{example}`")));
        }
        input.parse::<Token![=]>()?;
        set(&mut self.rename, name, parse_text(input, example)?)
    }
}

/// Calls `parse_one` for each option of the attribute, and goes on after an error.
fn each_option(attr: &Attribute, errors: &mut Errors, mut parse_one: impl FnMut(ParseStream<'_>) -> syn::Result<()>) {
    let mut found = Vec::new();
    let parsed = attr.parse_args_with(|input: ParseStream<'_>| {
        while !input.is_empty() {
            if let Err(err) = parse_one(input) {
                found.push(err);
                while !input.is_empty() && !input.peek(Token![,]) {
                    input.parse::<proc_macro2::TokenTree>()?;
                }
            }
            if !input.is_empty() && !input.peek(Token![,]) {
                found.push(input.error("a comma is missing before this"));
            } else if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(())
    });
    for err in found {
        errors.push(err);
    }
    errors.note(parsed);
}

/// Calls `look` for each option of `#[sqlx(…)]`. sqlx itself reports errors there.
fn each_of_sqlx(attrs: &[Attribute], mut look: impl FnMut(&ParseNestedMeta<'_>) -> syn::Result<()>) {
    for attr in attrs.iter().filter(|it| it.path().is_ident("sqlx")) {
        let _ = attr.parse_nested_meta(|meta| look(&meta));
    }
}

fn skip_value(meta: &ParseNestedMeta<'_>) -> syn::Result<()> {
    while !meta.input.is_empty() && !meta.input.peek(Token![,]) {
        meta.input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

fn parse_text(input: ParseStream<'_>, example: &str) -> syn::Result<LitStr> {
    input.parse().map_err(|err| syn::Error::new(err.span(), format!("this is a string literal: `{example}`")))
}

/// The example of the option, or the error that there is none of that name.
fn example(name: &Ident, options: &'static [Choice]) -> syn::Result<&'static str> {
    if let Some(option) = options.iter().find(|it| name == it.name) {
        return Ok(option.example);
    }
    let names: Vec<_> = options.iter().map(|it| it.name).collect();
    let there_are = || format!("there are {}", list(&names, "and"));
    let hint = meant_option(name, options).map_or_else(there_are, |meant| format!("did you mean `{meant}`?"));
    Err(error(name, format!("there is no option `{name}` here; {hint}")))
}

fn meant_option(name: &Ident, options: &'static [Choice]) -> Option<&'static str> {
    let known: Vec<Known> = options.iter().map(|it| (it.name, it.other_names)).collect();
    meant(&name.to_string(), &known)
}
