//! What the macros make of any tokens: they may refuse them, and must not panic, write what does not parse, or leave
//! out the lock without an error. Proptest makes some for the tests, and cargo-fuzz in `fuzz/` looks for more. The
//! functions panic if a property is broken.

use std::str::FromStr;

use proc_macro2::TokenStream;
use quote::quote;

use crate::{key::key, versioned, with_lock::with_lock};

/// The arguments of the attribute in the first line, and its item after that.
pub(crate) fn check_attribute_text(text: &str) {
    let (arguments, item) = text.split_once('\n').unwrap_or((text, ""));
    if let (Ok(arguments), Ok(item)) = (TokenStream::from_str(arguments), TokenStream::from_str(item)) {
        check_attribute(arguments, &item);
    }
}

/// The options of the derive in the first line, those of a field in the second, and its item after that.
pub(crate) fn check_derive_text(text: &str) {
    let mut lines = text.splitn(3, '\n').map(|it| TokenStream::from_str(it).ok());
    let mut line = || lines.next().unwrap_or_else(|| Some(TokenStream::new()));
    if let (Some(options), Some(on_field), Some(item)) = (line(), line(), line()) {
        check_derive(&options, &on_field, &item);
        check_key(text, &options);
    }
}

/// The attribute on an item.
pub(crate) fn check_attribute(arguments: TokenStream, item: &TokenStream) {
    let is_import = arguments.to_string() == "__in_use";
    let expanded = with_lock(arguments, item);
    assert!(parses(item.clone()) <= parses(expanded.clone()), "{expanded}");
    assert!(is_import || is_lock_or_error(&expanded), "{expanded}");
}

/// The derive on an item, and on a struct whose field has options.
pub(crate) fn check_derive(options: &TokenStream, on_field: &TokenStream, item: &TokenStream) {
    for item in [
        quote!(#[versioned(#options)] #item),
        quote!(
            #[versioned(#options)]
            struct Item {
                #[versioned(#on_field)]
                id: i64,
                version: i64,
            }
        ),
        item.clone(),
    ] {
        // sqlx reports an unknown case.
        let has_case = item.to_string().contains("rename_all");
        let expanded = versioned::derive(item);
        let is_left_to_sqlx = has_case && expanded.is_empty();
        assert!(parses(expanded.clone()) && (is_left_to_sqlx || is_lock_or_error(&expanded)), "{expanded}");
    }
}

/// The key of a template, and what else may be in the parentheses of `key!`.
pub(crate) fn check_key(template: &str, rest: &TokenStream) {
    for tokens in [quote!((::lockkit) #template), quote!((::lockkit) #template, #rest), quote!((::lockkit) #rest)] {
        let expanded = key(tokens);
        assert!(syn::parse2::<syn::Expr>(expanded.clone()).is_ok(), "{expanded}");
    }
}

fn parses(tokens: TokenStream) -> bool {
    syn::parse2::<syn::File>(tokens).is_ok()
}

fn is_lock_or_error(expanded: &TokenStream) -> bool {
    let expanded = expanded.to_string();
    ["__private", "compile_error"].iter().any(|it| expanded.contains(it))
}

#[cfg(test)]
mod tests {
    use proc_macro2::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span};
    use proptest::{collection::vec, prelude::*, sample::select, strategy::Union};
    use quote::ToTokens;

    use super::*;
    use crate::with_lock::{arguments::ARGUMENTS, template::Template};

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
        "fn work<'a>(x: u8) -> Pin<Box<dyn Future<Output = Result<u8, Error>> + Send + 'a>> { \
         Box::pin(async move { x }) }",
        "fn work() {}",
        "const unsafe extern \"C\" fn work(_: u8, ...) -> ! { loop {} }",
        "struct Work;",
        "mod work { async fn inner() {} }",
    ];

    /// Structs for the derive.
    const STRUCTS: &[&str] = &[
        "#[versioned(table = \"t\", key = \"id\")] struct Item { id: i64, stock: i32, version: i64 }",
        "#[versioned(table = \"a.t\", key(\"a\", \"b\"), version = \"v\")] #[sqlx(rename_all = \"camelCase\")] \
         struct Item<'a, T> where T: Clone { a: &'a str, #[sqlx(rename = \"b\")] b: T, #[versioned(skip)] c: u8, \
         v: i16 }",
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

    fn config() -> ProptestConfig {
        ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() }
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn the_attribute_takes_any_arguments(arguments in arguments(), item in select(ITEMS)) {
            check_attribute(arguments, &tokens_of(item));
        }

        #[test]
        fn the_attribute_takes_any_item(arguments in arguments(), item in tokens()) {
            check_attribute(arguments, &item);
        }

        #[test]
        fn the_derive_takes_any_options(
            options in tokens(), on_field in tokens(), item in select(STRUCTS), rest in tokens(),
        ) {
            let item = tokens_of(item);
            check_derive(&options, &on_field, &item);
            check_derive(&options, &on_field, &quote!(#item #rest));
        }

        #[test]
        fn a_key_takes_any_text(template in any::<String>(), rest in tokens()) {
            check_key(&template, &rest);
        }

        #[test]
        fn a_template_becomes_an_expression_or_an_error(
            template in r"([a-z:/%-]|\{\{|\}\}|\{[a-zé_ⓐ]{1,3}(\.[a-z0-9_ⓐ]{1,12}(\(\))?){0,3}(:[?x5>]{0,2})?\}){0,6}",
        ) {
            if Template::parse(&template).is_ok() {
                check_key(&template, &TokenStream::new());
            }
        }
    }

    #[test]
    fn the_seeds_of_the_fuzzer_are_taken() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/attribute");
        for file in std::fs::read_dir(seeds).expect("the folder of the seeds") {
            let text = std::fs::read_to_string(file.expect("a seed").path()).expect("a seed");
            check_attribute_text(&text);
            check_derive_text(&text);
        }
    }
}
