//! Rust source as a flat list of tokens, without its comments, attributes and tests.

use std::iter::Peekable;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree, token_stream::IntoIter};

/// A name, a literal, or one character of punctuation, brackets included.
#[derive(Debug)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: usize,
}

impl Token {
    pub(crate) fn is_name(&self) -> bool {
        self.text.starts_with(|it: char| it.is_alphabetic() || it == '_') && !self.is_text()
    }

    /// A string literal of any kind.
    pub(crate) fn is_text(&self) -> bool {
        self.text.ends_with(['"', '#']) && self.text.len() > 1
    }
}

/// The tokens of the source.
///
/// # Panics
/// If the source is not Rust.
pub(crate) fn code(source: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    flatten(source.parse().expect("Rust source"), &mut tokens);
    tokens
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                if attribute(&mut trees).is_some_and(|it| is_for_tests(&it)) {
                    skip_item(&mut trees);
                }
            }
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Parenthesis | Delimiter::None => ("(", ")"),
                };
                tokens.push(Token { text: open.to_owned(), line });
                flatten(group.stream(), tokens);
                tokens.push(Token { text: close.to_owned(), line: group.span_close().start().line });
            }
            other => tokens.push(Token { text: other.to_string(), line }),
        }
    }
}

/// What follows the `#` of an attribute.
fn attribute(trees: &mut Peekable<IntoIter>) -> Option<Group> {
    trees.next_if(|it| matches!(it, TokenTree::Punct(it) if it.as_char() == '!'));
    match trees.next_if(|it| matches!(it, TokenTree::Group(it) if it.delimiter() == Delimiter::Bracket)) {
        Some(TokenTree::Group(group)) => Some(group),
        _ => None,
    }
}

fn is_for_tests(attribute: &Group) -> bool {
    let text = attribute.stream().to_string();
    text.starts_with("cfg") && text.split(|it: char| !it.is_alphanumeric()).any(|it| it == "test")
}

fn skip_item(trees: &mut Peekable<IntoIter>) {
    trees.find(|it| match it {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    });
}
