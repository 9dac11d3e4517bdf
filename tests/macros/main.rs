//! The tests of `#[with_lock]` and `#[derive(Versioned)]`: what it does at run time, on SQLite, and what it says at
//! compile time.

#![deny(warnings, clippy::pedantic)]

mod agreement;
mod arguments;
mod derived;
mod ended;
mod fixture;
mod forms;
mod generic;
mod keys;
mod lease;
mod mapped;
mod qualified;
mod rows;
mod section;
mod several;
mod stacked;
mod strict;
mod version;
mod versioned;

#[test]
fn mistakes_are_errors_at_the_right_token() {
    trybuild::TestCases::new().compile_fail("../tests/macros/ui/*.rs");
}
