//! The Rust snippets of the documents that need the clients of the stores, compiled as they stand there.

#![allow(dead_code, unused_imports, unused_variables, missing_debug_implementations, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/modules.rs"));
