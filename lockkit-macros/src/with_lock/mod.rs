//! `#[with_lock(…)]`: from the arguments as written, over what was checked, to the calls around the body.

pub(crate) mod args;
mod body;
mod columns;
mod duration;
mod expand;
mod function;
mod plan;
mod rewritten;
mod stack;
mod template;
mod uses;
pub(crate) mod validate;
mod words;

pub(crate) use expand::with_lock;
