//! The columns in `by(…)`, `by_any(…)` and `order_by(…)`. Recognizes the forms that users try instead.

use proc_macro2::TokenTree;
use syn::{BinOp, Expr, ExprAssign, Ident, Lit, LitStr, Token, ext::IdentExt, parse::ParseStream, spanned::Spanned};

use crate::{diagnostics::error, with_lock::jumps::loose_jump};

/// One `column = value` of `by(…)`, or `column = values` of `by_any(…)`.
pub(crate) struct By {
    pub(crate) column: Ident,
    pub(crate) value: Expr,
}

/// Parses the inside of `by(column = value, …)`. Reports the first mistake only.
pub(crate) fn parse_by(input: ParseStream<'_>) -> syn::Result<Vec<By>> {
    each(input, |input| {
        let column = parse_column(input, " = …")?;
        let written = format!("`{column} = {column}`");
        let at = input.span();
        if input.is_empty() || input.peek(Token![,]) {
            return Err(error(&column, format!("write the column and its value: {written}")));
        }
        if input.peek(Token![==]) {
            input.parse::<Token![==]>()?;
            let value = input.parse::<TokenTree>().ok().filter(|_| input.is_empty() || input.peek(Token![,]));
            let value = value.map_or_else(|| "…".to_owned(), |it| it.to_string());
            return Err(syn::Error::new(at, format!("the value follows one `=`: write `{column} = {value}`")));
        }
        if input.peek(Token![in]) || input.peek(Ident) && input.fork().parse::<Ident>().is_ok_and(|it| it == "IN") {
            let message = format!("for one of several values write `by_any({column} = values)`");
            return Err(syn::Error::new(at, message));
        }
        if input.peek(Token![.]) {
            return Err(error(&column, "give the bare name of the column, without its table: `item_id = item_id`"));
        }
        if !input.peek(Token![=]) || input.peek(Token![=>]) {
            return Err(syn::Error::new(
                at,
                format!("rows are chosen by the values of their columns: write {written}"),
            ));
        }
        input.parse::<Token![=]>()?;
        if input.is_empty() || input.peek(Token![,]) {
            return Err(error(&column, format!("write the column and its value: {written}")));
        }
        let value = input.parse()?;
        if let Some(jump) = loose_jump(&value) {
            return Err(syn::Error::new(
                jump,
                format!("this would jump inside the code of the attribute; write {written}"),
            ));
        }
        if let Expr::Assign(ExprAssign { left, eq_token, .. }) = &value {
            let at = match &**left {
                Expr::Binary(and) if matches!(and.op, BinOp::And(_)) => and.op.span(),
                _ => eq_token.span(),
            };
            let message = "several columns are separated by commas: `by(tenant_id = tenant_id, item_id = item_id)`";
            return Err(syn::Error::new(at, message));
        }
        Ok(By { column, value })
    })
}

/// Parses the inside of `order_by(column, …)`. Reports the first mistake only.
pub(crate) fn parse_order(input: ParseStream<'_>) -> syn::Result<Vec<Ident>> {
    each(input, |input| {
        let column = parse_column(input, "")?;
        if input.is_empty() || input.peek(Token![,]) {
            return Ok(column);
        }
        let next = input.fork().call(Ident::parse_any);
        if next.as_ref().is_ok_and(|it| ["asc", "desc"].contains(&it.to_string().to_lowercase().as_str())) {
            return Err(syn::Error::new(input.span(), "rows are locked in ascending order; write the column alone"));
        }
        // The caller reports the missing comma.
        if next.is_ok() {
            Ok(column)
        } else {
            Err(input.error("write the columns alone: `order_by(priority, item_id)`"))
        }
    })
}

fn parse_column(input: ParseStream<'_>, follows: &str) -> syn::Result<Ident> {
    if input.peek(LitStr) {
        let quoted: LitStr = input.parse()?;
        let message = format!("write the column without quotes: `{}{follows}`", quoted.value());
        return Err(syn::Error::new(quoted.span(), message));
    }
    if input.peek(Lit) || !input.peek(Ident::peek_any) {
        return Err(input.error("the name of a column goes here, such as `item_id`"));
    }
    Ident::parse_any(input)
}

/// Parses all columns. Skips the rest after a mistake, so that it is one error.
fn each<T>(input: ParseStream<'_>, one: impl Fn(ParseStream<'_>) -> syn::Result<T>) -> syn::Result<Vec<T>> {
    let mut columns = Vec::new();
    let result = loop {
        if input.is_empty() {
            break Ok(columns);
        }
        match one(input) {
            Ok(column) => columns.push(column),
            Err(err) => break Err(err),
        }
        if !input.is_empty()
            && let Err(err) = input.parse::<Token![,]>()
        {
            break Err(syn::Error::new(err.span(), "a comma is missing before this"));
        }
    };
    while !input.is_empty() {
        input.parse::<TokenTree>()?;
    }
    result
}
