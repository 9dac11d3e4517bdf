//! The `#[with_lock]` attribute of lockkit.

/// Placeholder while the attribute is written.
#[proc_macro_attribute]
pub fn with_lock(_args: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    item
}
