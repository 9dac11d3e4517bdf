//! `#[derive(Versioned)]`: parses the struct, checks it, and writes the impls.
//!
//! The derive contains no algorithm. It implements `VersionedStruct` (table, key, columns, version), and `load`, `save`
//! and `delete` as methods of the struct, so that users import no trait. Both can be written by hand.

mod args;
mod case;
mod expand;
mod validate;

use proc_macro2::TokenStream;
use syn::DeriveInput;

use crate::diagnostics::Errors;
use validate::Plan;

/// Expands the derive.
pub(crate) fn derive(input: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let plan = errors.note(syn::parse2::<DeriveInput>(input)).and_then(|input| Plan::new(input, &mut errors));
    match plan {
        Some(plan) if errors.is_empty() => expand::expand(&plan),
        _ => errors.into_tokens(),
    }
}
