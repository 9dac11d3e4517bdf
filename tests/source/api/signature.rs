//! Signatures as text: one line, as rustfmt would set it, without documentation and bodies.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Attribute, Fields, FnArg, ImplItem, Item, ItemImpl, Pat, Signature, TraitItem, Variant};

/// The tokens as a line of source.
pub(super) fn tidy(tokens: impl ToTokens) -> String {
    const TIGHT: [(&str, &str); 28] = [
        (" :: ", "::"),
        (":: ", "::"),
        (" ::", "::"),
        (" < ", "<"),
        ("< ", "<"),
        (" <", "<"),
        (" >", ">"),
        (" ,", ","),
        (" ;", ";"),
        (" : ", ": "),
        (" :", ":"),
        ("& ", "&"),
        ("? ", "?"),
        ("# [", "#["),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" [", "["),
        (" !", "!"),
        (",)", ")"),
        (",>", ">"),
        ("->(", "-> ("),
        (",(", ", ("),
        (":(", ": ("),
        ("=(", "= ("),
        ("=&", "= &"),
        ("->&", "-> &"),
        (":[", ": ["),
    ];
    let mut text = tokens.to_token_stream().to_string();
    for (loose, tight) in TIGHT {
        text = text.replace(loose, tight);
    }
    text.trim_end_matches(',').to_owned()
}

/// Whether a name is anywhere in the tokens.
pub(super) fn has_name(tokens: impl ToTokens, name: &str) -> bool {
    fn search(stream: TokenStream, name: &str) -> bool {
        stream.into_iter().any(|it| match it {
            TokenTree::Ident(it) => it == name,
            TokenTree::Group(it) => search(it.stream(), name),
            _ => false,
        })
    }
    search(tokens.to_token_stream(), name)
}

pub(super) fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|it| it.path().is_ident("doc") && has_name(it, "hidden"))
}

/// The `#[cfg(..)]`s among the attributes.
pub(super) fn cfgs(attributes: &[Attribute]) -> Vec<String> {
    attributes.iter().filter(|it| it.path().is_ident("cfg")).map(tidy).collect()
}

/// The attributes that are part of the API, each with a blank behind it.
pub(super) fn kept_attributes(attributes: &[Attribute]) -> String {
    let kept = attributes.iter().filter(|it| ["derive", "non_exhaustive"].iter().any(|name| it.path().is_ident(name)));
    kept.map(|it| tidy(it) + " ").collect()
}

pub(super) fn of_item(item: &Item) -> String {
    match item {
        Item::Struct(it) => {
            let (ident, generics, bounds) = (&it.ident, &it.generics, &it.generics.where_clause);
            tidy(quote!(pub struct #ident #generics #bounds))
        }
        Item::Enum(it) => {
            let (ident, generics, bounds) = (&it.ident, &it.generics, &it.generics.where_clause);
            tidy(quote!(pub enum #ident #generics #bounds))
        }
        Item::Trait(it) => {
            let (ident, generics, bounds) = (&it.ident, &it.generics, &it.generics.where_clause);
            let colon = (!it.supertraits.is_empty()).then(|| quote!(:));
            let supertraits = &it.supertraits;
            tidy(quote!(pub trait #ident #generics #colon #supertraits #bounds))
        }
        Item::Fn(it) => format!("pub {}", of_function(&it.sig)),
        Item::Type(it) => {
            let (ident, generics, ty) = (&it.ident, &it.generics, &it.ty);
            tidy(quote!(pub type #ident #generics = #ty))
        }
        Item::Const(it) => {
            let (ident, ty) = (&it.ident, &it.ty);
            tidy(quote!(pub const #ident: #ty))
        }
        Item::Static(it) => {
            let (ident, ty) = (&it.ident, &it.ty);
            tidy(quote!(pub static #ident: #ty))
        }
        other => panic!("the API has an item that is not read yet: {}", tidy(other)),
    }
}

/// Without the `mut` of an argument, which is no matter of the caller.
fn of_function(function: &Signature) -> String {
    let mut function = function.clone();
    for argument in &mut function.inputs {
        if let FnArg::Typed(it) = argument
            && let Pat::Ident(it) = &mut *it.pat
        {
            it.mutability = None;
        }
    }
    tidy(function).replace("(mut self", "(self")
}

pub(super) fn of_variant(variant: &Variant) -> String {
    let mut fields = variant.fields.clone();
    fields.iter_mut().for_each(|it| it.attrs.clear());
    let name = &variant.ident;
    match &fields {
        Fields::Named(it) => {
            let fields: Vec<_> = it.named.iter().map(tidy).collect();
            format!("{name} {{ {} }}", fields.join(", "))
        }
        other => tidy(quote!(#name #other)),
    }
}

/// The method, type or constant. A method with a body ends with `{ .. }`: an implementation need not have it.
pub(super) fn of_trait_item(item: &TraitItem) -> String {
    match item {
        TraitItem::Fn(it) => {
            let body = it.default.as_ref().map_or("", |_| " { .. }");
            format!("{}{body}", of_function(&it.sig))
        }
        TraitItem::Type(it) => {
            let (ident, generics, bounds) = (&it.ident, &it.generics, &it.bounds);
            let colon = (!bounds.is_empty()).then(|| quote!(:));
            tidy(quote!(type #ident #generics #colon #bounds))
        }
        TraitItem::Const(it) => {
            let (ident, ty) = (&it.ident, &it.ty);
            tidy(quote!(const #ident: #ty))
        }
        other => tidy(other),
    }
}

/// Everything before the braces.
pub(super) fn of_impl(block: &ItemImpl) -> String {
    let (generics, ty, bounds) = (&block.generics, &block.self_ty, &block.generics.where_clause);
    let for_trait = block.trait_.as_ref().map(|(path, _)| quote!(#path for));
    tidy(quote!(impl #generics #for_trait #ty #bounds))
}

pub(super) fn of_impl_item(item: &ImplItem) -> String {
    match item {
        ImplItem::Fn(it) => format!("pub {}", of_function(&it.sig)),
        ImplItem::Const(it) => {
            let (ident, ty) = (&it.ident, &it.ty);
            tidy(quote!(pub const #ident: #ty))
        }
        other => tidy(other),
    }
}
