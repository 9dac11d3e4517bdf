//! The `#[with_lock]` attribute of lockkit. Use it through `lockkit::with_lock`.

mod args;
mod duration;
mod expand;
mod function;
mod rewritten;
mod template;
mod validate;

use proc_macro::TokenStream;

/// PLACEHOLDER
#[proc_macro_attribute]
pub fn with_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::with_lock(args.into(), item.into()).into()
}
