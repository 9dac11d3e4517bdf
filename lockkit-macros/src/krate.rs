//! The path of lockkit, for a dependency with another name.

use syn::{LitStr, Path, parse::ParseStream};

/// Parses the value of `crate`: a path, also in quotes, as serde has it.
pub(crate) fn parse_crate(input: ParseStream<'_>) -> syn::Result<Path> {
    let message = "this is the path of lockkit: write `crate = path::to::lockkit`";
    let path = if input.peek(LitStr) {
        input.parse::<LitStr>()?.parse_with(Path::parse_mod_style)
    } else {
        input.call(Path::parse_mod_style)
    };
    path.map_err(|err| syn::Error::new(err.span(), message))
}
