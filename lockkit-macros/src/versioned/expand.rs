//! The code of the derive: the impl of `VersionedStruct`, and the methods that call it.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{GenericParam, parse_quote};

use super::{
    args::Json,
    validate::{Column, Plan},
};

pub(crate) fn expand(plan: &Plan) -> TokenStream {
    let described = described(plan);
    let methods = methods(plan);
    quote!(#described #methods)
}

/// `impl VersionedStruct<DB>` for every database that can store the fields.
fn described(plan: &Plan) -> TokenStream {
    let Plan { krate, ident, generics, database, table, key, values, version, .. } = plan;
    let (_, type_generics, _) = generics.split_for_impl();
    let mut generics = generics.clone();
    generics.params.push(GenericParam::Type(parse_quote!(#database)));
    let clause = generics.make_where_clause();
    clause.predicates.push(parse_quote!(#database: #krate::dialect::VersionOps));
    for column in key.iter().chain(values) {
        let bound = storable(plan, column);
        clause.predicates.push(parse_quote!(#bound));
    }
    let (impl_generics, _, clause) = generics.split_for_impl();
    let Column { field: version_field, name: version_name, ty: version_type, json: _ } = version;
    let add = |columns: &[Column]| -> TokenStream {
        let add = |Column { field, name, json, .. }: &Column| {
            let value = match json {
                None => quote!(&self.#field),
                Some(Json { is_nullable: false, .. }) => quote!(::sqlx::types::Json(&self.#field)),
                Some(Json { is_nullable: true, .. }) => {
                    quote!(self.#field.as_ref().map(|_| ::sqlx::types::Json(&self.#field)))
                }
            };
            quote!(columns.add(#name, #value);)
        };
        columns.iter().map(add).collect()
    };
    let (add_key, add_values) = (add(key), add(values));
    quote! {
        #[automatically_derived]
        impl #impl_generics #krate::VersionedStruct<#database> for #ident #type_generics #clause {
            const TABLE: &'static str = #table;
            const VERSION: &'static str = #version_name;
            type Version = #version_type;

            fn version(&self) -> &Self::Version {
                &self.#version_field
            }

            fn version_mut(&mut self) -> &mut Self::Version {
                &mut self.#version_field
            }

            fn key(&self, columns: &mut #krate::version::Columns<#database>) {
                #add_key
            }

            #[allow(unused_variables)]
            fn values(&self, columns: &mut #krate::version::Columns<#database>) {
                #add_values
            }
        }
    }
}

/// `load`, `save` and `delete`, so that no trait must be imported to call them.
fn methods(plan: &Plan) -> TokenStream {
    let Plan { krate, vis, ident, generics, database, place, table, key, .. } = plan;
    let (impl_generics, type_generics, clause) = generics.split_for_impl();
    let mixed = Span::mixed_site();
    let (on, row) = (quote_spanned!(mixed=> on), quote_spanned!(mixed=> row));
    let described = quote!(#krate::VersionedStruct<#database>);
    let arguments = key.iter().map(|Column { field, ty, .. }| quote!(#field: impl ::core::convert::Into<#ty>));
    let storable = key.iter().map(|it| storable(plan, it));
    let by = key
        .iter()
        .map(|Column { field, name, ty, .. }| quote!(.by(#name, <_ as ::core::convert::Into<#ty>>::into(#field))));
    let load_doc = format!(
        "Loads the row of `{}` with this key.\n\n# Errors\n`NoSuchRow`; `Database`, also when the row does not fit \
         the struct or its version is NULL.",
        table.value()
    );
    let save_doc = format!(
        "Writes the row of `{}` if nobody else did since it was read, and moves its version on.\n\nInside a \
         transaction the struct gets its new version from `Saved::commit`, outside at once.\n\n# Errors\n`Conflict` \
         when somebody else was faster or the row is gone; `Database`.",
        table.value()
    );
    let delete_doc = format!(
        "Deletes the row of `{}` if nobody else wrote it since it was read.\n\nThe struct stays as it is; when the \
         transaction around this is rolled back, it can be saved as before.\n\n# Errors\n`Conflict` when somebody \
         else was faster or the row is gone; `Database`.",
        table.value()
    );
    quote! {
        #[automatically_derived]
        impl #impl_generics #ident #type_generics #clause {
            #[doc = #load_doc]
            #[allow(dead_code)]
            #vis async fn load<#database>(
                #on: impl #krate::dialect::On<#database>,
                #(#arguments),*
            ) -> #krate::Result<Self>
            where
                #database: #krate::dialect::VersionOps,
                Self: #described + for<'__r> #krate::__private::FromRow<'__r, #database::Row>,
                #(#storable,)*
            {
                let #row = #krate::VersionedRow::<#database>::table(<Self as #described>::TABLE)
                    .version(<Self as #described>::VERSION)
                    #(#by)*;
                #krate::__private::load(#on, #row).await
            }

            #[doc = #save_doc]
            #[allow(dead_code)]
            #vis async fn save<#database, #place>(
                &mut self,
                #on: #place,
            ) -> #krate::Result<#place::Written<#krate::version::Saved<'_, #database, Self>>>
            where
                #database: #krate::dialect::VersionOps,
                #place: #krate::dialect::On<#database>,
                Self: #described + ::core::marker::Send,
            {
                <Self as #described>::save(self, #on).await
            }

            #[doc = #delete_doc]
            #[allow(dead_code)]
            #vis async fn delete<#database>(&self, #on: impl #krate::dialect::On<#database>) -> #krate::Result<()>
            where
                #database: #krate::dialect::VersionOps,
                Self: #described,
            {
                <Self as #described>::delete(self, #on).await
            }
        }
    }
}

/// That the database can store the field.
fn storable(plan: &Plan, Column { ty, json, .. }: &Column) -> TokenStream {
    let Plan { krate, database, .. } = plan;
    let (encode, known) =
        (quote!(#krate::__private::Encode<'__v, #database>), quote!(#krate::__private::Type<#database>));
    // sqlx's own derive names `::sqlx`, too, for a field that it reads as JSON.
    match json {
        None => quote!(#ty: for<'__v> #encode + #known),
        Some(Json { is_nullable: false, .. }) => quote!(for<'__v> ::sqlx::types::Json<&'__v #ty>: #encode + #known),
        Some(Json { is_nullable: true, .. }) => {
            quote!(for<'__v> ::core::option::Option<::sqlx::types::Json<&'__v #ty>>: #encode + #known)
        }
    }
}
