//! `lockkit::key!("order:{id}")`, and the key of a template wherever it is written.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{
    Index, Lit, LitStr, Member, Token,
    ext::IdentExt,
    parse::{ParseStream, Parser},
};

use crate::with_lock::template::{Captured, Piece, Step, Template};

/// Expands the macro. The tokens are the path of lockkit in parentheses, and what the user wrote.
pub(crate) fn key(tokens: TokenStream) -> TokenStream {
    let parsed = (|input: ParseStream<'_>| {
        let krate;
        syn::parenthesized!(krate in input);
        let krate: TokenStream = krate.parse()?;
        Ok((krate, parse(input)?))
    })
    .parse2(tokens);
    match parsed {
        Ok((krate, (template, span))) => {
            let key = of_template(&quote!(#krate::__private), &template, span);
            // Ends the temporaries here: `Arguments` are not `Send`, and the statement around the macro may await.
            quote_spanned!(Span::mixed_site()=> { let key = #key; key })
        }
        Err(err) => err.into_compile_error(),
    }
}

fn parse(input: ParseStream<'_>) -> syn::Result<(Template, Span)> {
    let example = r#"`key!` takes a template: write `key!("order:{id}")`"#;
    let Ok(Lit::Str(literal)) = input.parse() else {
        return Err(syn::Error::new(input.span(), example));
    };
    let text = literal.value();
    input.parse::<Option<Token![,]>>()?;
    if !input.is_empty() {
        let name = input.fork().call(Ident::parse_any).map_or_else(|_| "name".to_owned(), |it| it.to_string());
        let text = text.replace("{}", &format!("{{{name}}}"));
        let message = format!("a key captures variables, and has no arguments: write `key!({text:?})`");
        let rest: TokenStream = input.parse()?;
        return Err(syn::Error::new_spanned(rest, message));
    }
    let template = Template::parse(&text).map_err(|message| syn::Error::new(literal.span(), message))?;
    Ok((template, literal.span()))
}

/// The expression that makes the key; `span` is that of the template.
pub(crate) fn of_template(private: &TokenStream, template: &Template, span: Span) -> TokenStream {
    let mixed = Span::mixed_site();
    if let Some(constant) = template.constant() {
        return quote_spanned!(mixed=> #private::key(#constant));
    }
    let separators = template.separators();
    let pieces = template.pieces.iter().map(|piece| match piece {
        Piece::Text(text) => quote_spanned!(mixed=> #private::Piece::Text(#text)),
        Piece::Capture { value, format } => {
            // At the template, so that the names mean what they mean to `format!` there.
            let colon = if format.is_empty() { "" } else { ":" };
            let (name, value) = match value.steps.as_slice() {
                [] => (value.name.as_str(), None),
                _ => ("0", Some(expression(value, span))),
            };
            let capture = LitStr::new(&format!("{{{name}{colon}{format}}}"), span);
            let value = value.iter();
            let capture = quote_spanned!(span.resolved_at(mixed)=> ::core::format_args!(#capture #(, #value)*));
            quote_spanned!(mixed=> #private::Piece::Capture(#capture))
        }
    });
    quote_spanned!(mixed=> #private::key_of(#separators, &[#(#pieces),*]))
}

fn expression(Captured { name, steps }: &Captured, span: Span) -> TokenStream {
    let name = ident(name, span);
    let steps = steps.iter().map(|step| match step {
        Step::Field(field) => {
            let number = field.parse().map(|index| Member::Unnamed(Index { index, span }));
            let field = number.unwrap_or_else(|_| Member::Named(ident(field, span)));
            quote_spanned!(span=> .#field)
        }
        Step::Call(method) => {
            let method = ident(method, span);
            quote_spanned!(span=> .#method())
        }
    });
    quote_spanned!(span=> #name #(#steps)*)
}

/// `type` is `r#type`, as in `format!`.
fn ident(name: &str, span: Span) -> Ident {
    match name {
        "self" | "Self" | "super" | "crate" => Ident::new(name, span),
        _ if syn::parse_str::<Ident>(name).is_err() => Ident::new_raw(name, span),
        _ => Ident::new(name, span),
    }
}
