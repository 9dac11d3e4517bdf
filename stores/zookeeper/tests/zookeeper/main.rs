//! The store on real servers.

mod one;
mod support;
