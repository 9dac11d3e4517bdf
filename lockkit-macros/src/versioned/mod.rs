//! `#[derive(Versioned)]`: from the struct as written, over what was checked, to the impls.

mod args;
mod case;
mod expand;
mod validate;

use proc_macro2::TokenStream;
use syn::DeriveInput;

use crate::diagnostics::Errors;
use validate::Plan;

/// The whole derive.
pub(crate) fn derive(input: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let plan = errors.note(syn::parse2::<DeriveInput>(input)).and_then(|input| Plan::new(input, &mut errors));
    match plan {
        Some(plan) if errors.is_empty() => expand::expand(&plan),
        _ => errors.into_tokens(),
    }
}
