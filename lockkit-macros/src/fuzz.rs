//! Random tokens for the macros: they may be refused, and must not make a macro panic or write what does not parse.

use std::str::FromStr;

use proc_macro2::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream};
use proptest::{collection::vec, prelude::*, sample::select, strategy::Union};
use quote::{ToTokens, quote};

use crate::{
    key::key,
    versioned,
    with_lock::{arguments::ARGUMENTS, template::Template, with_lock},
};

/// What stands on its own in arguments, attributes and items.
const WORDS: &[&str] = &[
    "lease",
    "row",
    "named",
    "session",
    "version",
    "idempotent",
    "async",
    "await",
    "crate",
    "fn",
    "for",
    "impl",
    "let",
    "move",
    "mut",
    "pub",
    "r#type",
    "return",
    "self",
    "Self",
    "struct",
    "super",
    "type",
    "versioned",
    "where",
    "_",
    "id",
    "user",
    "'a",
    "'c'",
    "0",
    "1.5",
    "-1",
    "0x10u8",
    "1e400",
    "true",
    "b\"x\"",
    "c\"x\"",
    "r\"30s\"",
    "\"\"",
    "\"30s\"",
    "\"1.5ms\"",
    "\"-1s\"",
    "\"order:{id}\"",
    "\"{a}{b}\"",
    "\"{self.id.0.f()}\"",
    "\"{_}\"",
    "\"app.t\"",
];

/// Items that the attribute is for, or not.
const ITEMS: &[&str] = &[
    "async fn work(id: i64, user: &User) -> Result<(), Error> { tx.run(id).await?; Ok(()) }",
    "pub async fn work<'a, T: Into<Key>>(&'a mut self, (a, b): (T, u8)) -> Result<T, Error> { return Ok(a) }",
    "async fn work() { loop { break } }",
    "async fn work(self) -> Result<(), Error>;",
    "#[with_lock(row, on = db, tx = tx)] #[inline] async fn work(id: u8) -> Result<u8, Error> { Ok(id) }",
    "fn work<'a>(x: u8) -> Pin<Box<dyn Future<Output = Result<u8, Error>> + Send + 'a>> { Box::pin(async move { x }) }",
    "fn work() {}",
    "const unsafe extern \"C\" fn work(_: u8, ...) -> ! { loop {} }",
    "struct Work;",
    "mod work { async fn inner() {} }",
];

/// Structs for the derive.
const STRUCTS: &[&str] = &[
    "#[versioned(table = \"t\", key = \"id\")] struct Item { id: i64, stock: i32, version: i64 }",
    "#[versioned(table = \"a.t\", key(\"a\", \"b\"), version = \"v\")] #[sqlx(rename_all = \"camelCase\")] \
     struct Item<'a, T> where T: Clone { a: &'a str, #[sqlx(rename = \"b\")] b: T, #[versioned(skip)] c: u8, v: i16 }",
    "struct Item(i64, i64);",
    "enum Item { A }",
    "union Item { a: u8 }",
];

/// Text that is one token or some.
fn tokens_of(text: &str) -> TokenStream {
    TokenStream::from_str(text).expect("the texts are tokens")
}

fn token() -> impl Strategy<Value = TokenStream> {
    let names = ARGUMENTS.iter().flat_map(|it| it.other_names.iter().copied().chain([it.name]));
    let word = select(names.chain(WORDS.iter().copied()).collect::<Vec<_>>()).prop_map(tokens_of);
    let example = select(ARGUMENTS.iter().map(|it| it.example).collect::<Vec<_>>()).prop_map(tokens_of);
    let text = any::<String>().prop_map(|it| Literal::string(&it).to_token_stream());
    let name = "[a-zµé_][a-z0-9_ⓐ]{0,6}".prop_filter_map("a name", |it| {
        syn::parse_str::<Ident>(&it).ok().map(|it| Ident::new(&it.to_string(), Span::call_site()).to_token_stream())
    });
    let punct = select("=,.:&*?<>#!;|-+@".chars().collect::<Vec<_>>());
    let punct = (punct, any::<bool>()).prop_map(|(char, is_joint)| {
        let spacing = if is_joint { Spacing::Joint } else { Spacing::Alone };
        Punct::new(char, spacing).into_token_stream()
    });
    prop_oneof![4 => word, 2 => example, 1 => text, 1 => name, 4 => punct]
}

/// Tokens, some of them in groups.
fn tokens() -> impl Strategy<Value = TokenStream> {
    let delimiter = select(vec![Delimiter::Parenthesis, Delimiter::Brace, Delimiter::Bracket, Delimiter::None]);
    let tree = token().prop_recursive(3, 32, 6, move |inner| {
        (delimiter.clone(), vec(inner, 0..6))
            .prop_map(|(delimiter, inner)| Group::new(delimiter, inner.into_iter().collect()).into_token_stream())
    });
    vec(tree, 0..12).prop_map(|it| it.into_iter().collect())
}

/// A list of arguments, most of them as the attribute takes them.
fn arguments() -> impl Strategy<Value = TokenStream> {
    let name = || select(ARGUMENTS.iter().map(|it| it.name).collect::<Vec<_>>()).prop_map(tokens_of);
    let argument = Union::new_weighted(vec![
        (2, select(WORDS[..6].to_vec()).prop_map(tokens_of).boxed()),
        (6, select(ARGUMENTS.iter().map(|it| it.example).collect::<Vec<_>>()).prop_map(tokens_of).boxed()),
        (2, (name(), tokens()).prop_map(|(name, value)| quote!(#name = #value)).boxed()),
        (1, (name(), tokens()).prop_map(|(name, value)| quote!(#name(#value))).boxed()),
        (1, tokens().boxed()),
    ]);
    vec(argument, 0..8).prop_map(|it| quote!(#(#it),*))
}

fn parses(tokens: TokenStream) -> bool {
    syn::parse2::<syn::File>(tokens).is_ok()
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_attribute_takes_any_arguments(arguments in arguments(), item in select(ITEMS)) {
        let item = tokens_of(item);
        let expanded = with_lock(arguments, &item);
        prop_assert!(parses(item) <= parses(expanded.clone()), "{expanded}");
    }

    #[test]
    fn the_attribute_takes_any_item(arguments in arguments(), item in tokens()) {
        with_lock(arguments, &item);
    }

    #[test]
    fn the_derive_takes_any_options(
        options in tokens(), on_field in tokens(), item in select(STRUCTS), rest in tokens(),
    ) {
        let item = tokens_of(item);
        let expanded = versioned::derive(quote!(#[versioned(#options)] #item));
        prop_assert!(parses(expanded.clone()), "{expanded}");
        versioned::derive(quote!(#[versioned(#options)] struct Item { #[versioned(#on_field)] id: i64, version: i64 }));
        versioned::derive(quote!(#item #rest));
    }

    #[test]
    fn a_key_takes_any_text(template in any::<String>(), rest in tokens()) {
        key(quote!((::lockkit) #template));
        key(quote!((::lockkit) #template, #rest));
        key(rest);
    }

    #[test]
    fn a_template_becomes_an_expression_or_an_error(
        template in r"([a-z:/%-]|\{\{|\}\}|\{[a-zé_ⓐ]{1,3}(\.[a-z0-9_ⓐ]{1,12}(\(\))?){0,3}(:[?x5>]{0,2})?\}){0,6}",
    ) {
        if Template::parse(&template).is_ok() {
            let expanded = key(quote!((::lockkit) #template));
            prop_assert!(syn::parse2::<syn::Expr>(expanded.clone()).is_ok(), "{expanded}");
        }
    }
}
