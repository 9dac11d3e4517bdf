//! The Rust snippets of README.md and of `docs/`, compiled as they stand there and, where they are tests, run.

#![allow(dead_code, unused_imports, unused_variables, missing_debug_implementations, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/readme.rs"));
