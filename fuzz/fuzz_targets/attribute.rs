//! The attribute: its arguments in the first line, and its item after that. And the derive, likewise.
#![no_main]
#![allow(dead_code)]

#[path = "../../lockkit-macros/src/diagnostics.rs"]
mod diagnostics;
#[path = "../../lockkit-macros/src/fuzz.rs"]
mod fuzz;
#[path = "../../lockkit-macros/src/key.rs"]
mod key;
#[path = "../../lockkit-macros/src/krate.rs"]
mod krate;
#[path = "../../lockkit-macros/src/names.rs"]
mod names;
#[path = "../../lockkit-macros/src/versioned/mod.rs"]
mod versioned;
#[path = "../../lockkit-macros/src/with_lock/mod.rs"]
mod with_lock;

libfuzzer_sys::fuzz_target!(|text: &str| {
    fuzz::check_attribute_text(text);
    fuzz::check_derive_text(text);
});
