//! Unsafe code and `.unwrap()`: neither is in the library or in its macros.

use crate::code::code;
use crate::tree::{check, files};

/// Unsafe code, and `.unwrap()`, which says nothing of why it cannot fail.
fn unsafe_and_unwrap(file: &str, source: &str) -> Vec<String> {
    let tokens = code(source);
    let bad = tokens.iter().enumerate().filter(|(at, token)| {
        let method = *at > 0 && tokens[at - 1].text == ".";
        token.text == "unsafe" || token.text == "unwrap" && method
    });
    bad.map(|(_, it)| format!("{file}:{}: no `{}`", it.line, it.text)).collect()
}

#[test]
fn nothing_is_unsafe_or_unwrapped() {
    for folder in ["axum/src", "inspect/src", "lockkit/src", "lockkit-macros/src", "web/src"] {
        check(&files(folder, ".rs"), unsafe_and_unwrap);
    }
}

#[test]
fn the_check_sees_planted_unwraps_and_unsafe_code() {
    let complaints = |source: &str| unsafe_and_unwrap("key.rs", source).len();

    assert_eq!(complaints("fn f() { g().unwrap() }"), 1);
    assert_eq!(complaints("unsafe fn f() {}"), 1);
    assert_eq!(
        complaints("/// `unsafe`\n#[cfg(test)] mod tests { fn f() { g().unwrap() } } fn unwrap() { h(unwrap) }"),
        0
    );
}
