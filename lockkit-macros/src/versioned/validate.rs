//! Maps fields to columns, and checks the struct.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{
    Data, DataEnum, DataStruct, DataUnion, DeriveInput, Fields, FieldsNamed, Generics, LitStr, Type, Visibility,
    ext::IdentExt,
};

use super::{
    args::{FieldArgs, Json, StructArgs},
    case::Case,
};
use crate::{
    diagnostics::{Errors, list, nearest},
    names::{fault_of_column, fault_of_table},
};

/// The checked struct.
pub(crate) struct Plan {
    /// The path of lockkit.
    pub(crate) krate: TokenStream,
    pub(crate) vis: Visibility,
    pub(crate) ident: Ident,
    pub(crate) generics: Generics,
    /// The type parameter of the database: a name that the struct does not use.
    pub(crate) database: Ident,
    /// The type parameter of the place where a save runs, likewise.
    pub(crate) place: Ident,
    pub(crate) table: LitStr,
    pub(crate) key: Vec<Column>,
    pub(crate) values: Vec<Column>,
    pub(crate) version: Column,
}

/// A field that is a column.
pub(crate) struct Column {
    pub(crate) field: Ident,
    pub(crate) name: LitStr,
    pub(crate) ty: Type,
    pub(crate) json: Option<Json>,
}

impl Plan {
    /// `None` after an error, which is in `errors`.
    pub(crate) fn new(input: DeriveInput, errors: &mut Errors) -> Option<Self> {
        let unused = |name: &str| {
            let is_used = contains(input.to_token_stream(), name);
            Ident::new(&if is_used { format!("__{name}") } else { name.to_owned() }, Span::mixed_site())
        };
        let (database, place) = (unused("DB"), unused("O"));
        let DeriveInput { attrs, vis, ident, generics, data } = input;
        let args = StructArgs::parse(&attrs, errors);
        let fields = errors.note(named_fields(data, &ident))?;
        let case = match args.rename_all {
            Some(name) => Some(case(&name, errors)?),
            None => None,
        };
        let (mut columns, mut skipped) = (Vec::<Column>::new(), Vec::new());
        for field in fields.named {
            let args = FieldArgs::parse(&field.attrs, errors);
            let Some(ident) = field.ident else { continue };
            if let (Some(converts), None) = (&args.sqlx_converts, args.skip) {
                errors.push(syn::Error::new(converts.span(), conversion(converts)));
            }
            let is_skipped = args.skip.is_some() || args.sqlx_skip;
            let name = args.rename.map(|it| it.value).or(args.sqlx_rename).unwrap_or_else(|| {
                let name = ident.unraw().to_string();
                LitStr::new(&case.map_or_else(|| name.clone(), |it| it.column(&name)), ident.span())
            });
            check_name(&name, "a column", fault_of_column, errors);
            if let Some(other) = columns.iter().find(|it| !is_skipped && it.name.value() == name.value()) {
                let message = format!(
                    "the field `{}` has the column `{}` already; name another one, or add `#[versioned(skip)]`",
                    other.field.unraw(),
                    name.value().escape_debug(),
                );
                errors.push(syn::Error::new(name.span(), message));
            }
            let column = Column { field: ident, name, ty: field.ty, json: args.sqlx_json };
            if is_skipped { skipped.push(column) } else { columns.push(column) }
        }

        if args.at.is_none() {
            let message = "`Versioned` needs `#[versioned(table = \"t_items\", key = \"item_id\")]`: the table of the \
                           row, and the column that says which row it is";
            errors.push(syn::Error::new(Span::call_site(), message));
            return None;
        }
        let mut finder = Finder { at: args.at, broken: args.broken, columns, taken: Vec::new(), skipped, errors };
        let table = finder.required(args.table.map(|it| it.value), r#"table = "t_items""#, "the table of the row");
        if let Some(table) = &table {
            check_name(table, "a table", fault_of_table, finder.errors);
        }
        let key =
            finder.required(args.key.map(|it| it.value), r#"key = "item_id""#, "the column that says which row it is");
        let key = key.map(|it| finder.key(&it));
        let version = finder.version(args.version.map(|it| it.value));
        for Json { at, .. } in key.iter().flatten().chain(&version).filter_map(|it| it.json.as_ref()) {
            let message = "a row is found by values that the database compares, and it does not compare JSON; take \
                           another column for the key or version";
            finder.errors.push(syn::Error::new(at.span(), message));
        }
        let values = finder.columns;
        let krate = args.krate.map_or_else(|| quote!(::lockkit), |it| it.value.into_token_stream());
        Some(Self { krate, vis, ident, generics, database, place, table: table?, key: key?, values, version: version? })
    }
}

/// Takes the key and the version out of the columns.
struct Finder<'a> {
    /// The attribute.
    at: Option<Span>,
    broken: Vec<&'static str>,
    columns: Vec<Column>,
    /// The columns of the key, and where it names them.
    taken: Vec<(String, Span)>,
    skipped: Vec<Column>,
    errors: &'a mut Errors,
}

impl Finder<'_> {
    fn required<T>(&mut self, given: Option<T>, example: &str, what: &str) -> Option<T> {
        if given.is_none() && !self.broken.iter().any(|it| example.starts_with(it)) {
            let at = self.at.unwrap_or_else(Span::call_site);
            self.errors.push(syn::Error::new(at, format!("`Versioned` needs `{example}`: {what}")));
        }
        given
    }

    fn key(&mut self, names: &[LitStr]) -> Vec<Column> {
        if names.is_empty() {
            let message = r#"`key` names no column; write `key("tenant_id", "item_id")`"#;
            self.errors.push(syn::Error::new(self.at.unwrap_or_else(Span::call_site), message));
        }
        names.iter().filter_map(|it| self.take(it)).collect()
    }

    fn version(&mut self, given: Option<LitStr>) -> Option<Column> {
        match given {
            Some(name) => self.take(&name),
            None if self.broken.contains(&"version") => None,
            None if self.columns.iter().any(|it| it.name.value() == "version") => {
                self.take(&LitStr::new("version", Span::call_site()))
            }
            None if let Some((_, at)) = self.taken.iter().find(|(name, _)| name == "version") => {
                let message = "`version` counts the versions, unless another column does: name the column that says \
                               which row it is, or give `version = \"revision\"`, too";
                self.errors.push(syn::Error::new(*at, message));
                None
            }
            None => {
                let message = "no field has the column `version`; say which one counts the versions: \
                               `version = \"revision\"`";
                self.errors.push(syn::Error::new(self.at.unwrap_or_else(Span::call_site), message));
                None
            }
        }
    }

    /// Takes the column of that name, so that no later option can name it again.
    fn take(&mut self, name: &LitStr) -> Option<Column> {
        let text = name.value();
        if let Some(at) = self.columns.iter().position(|it| it.name.value() == text) {
            self.taken.push((text, name.span()));
            return Some(self.columns.remove(at));
        }
        if self.taken.iter().any(|(it, _)| *it == text) {
            let message = format!("`{text}` is a column of the key already; name another one, or remove it");
            self.errors.push(syn::Error::new(name.span(), message));
            return None;
        }
        let names: Vec<_> = self.columns.iter().map(|it| it.name.value()).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let hint = if let Some(field) = self.columns.iter().find(|it| it.field.unraw() == text) {
            format!("the column of the field `{text}` is `{}`", field.name.value())
        } else if self.skipped.iter().any(|it| it.name.value() == text || it.field.unraw() == text) {
            "its field is skipped, and a key or version cannot be".to_owned()
        } else if let Some(meant) = nearest(&text, &names) {
            format!("did you mean `{meant}`?")
        } else if names.is_empty() {
            "add a field".to_owned()
        } else {
            format!("the others are {}", list(&names, "and"))
        };
        let message = format!("no field has the column `{}`; {hint}", text.escape_debug());
        self.errors.push(syn::Error::new(name.span(), message));
        None
    }
}

fn named_fields(data: Data, ident: &Ident) -> syn::Result<FieldsNamed> {
    let message = "`Versioned` goes on a struct with named fields, which are the columns of its row";
    match data {
        Data::Struct(DataStruct { fields: Fields::Named(fields), .. }) => Ok(fields),
        Data::Struct(DataStruct { .. }) => Err(syn::Error::new(ident.span(), message)),
        Data::Enum(DataEnum { enum_token, .. }) => Err(syn::Error::new(enum_token.span, message)),
        Data::Union(DataUnion { union_token, .. }) => Err(syn::Error::new(union_token.span, message)),
    }
}

fn check_name(name: &LitStr, of: &str, fault_of: fn(&str) -> Option<&'static str>, errors: &mut Errors) {
    if let Some(fault) = fault_of(&name.value()) {
        let message = format!("`{}` cannot be the name of {of}: {fault}", name.value().escape_debug());
        errors.push(syn::Error::new(name.span(), message));
    }
}

/// The case that `#[sqlx(rename_all = "…")]` names.
fn case(name: &LitStr, errors: &mut Errors) -> Option<Case> {
    let text = name.value();
    if text == "kebab-case" {
        let message =
            "`kebab-case` makes names with `-`, which `Versioned` does not put into SQL; name the columns with `_`";
        errors.push(syn::Error::new(name.span(), message));
    }
    // sqlx itself reports an unknown case.
    Case::ALL.iter().find(|(known, _)| text == *known).map(|(_, case)| *case)
}

fn conversion(option: &Ident) -> String {
    let instead = match option.to_string().as_str() {
        "flatten" => "write its fields here",
        _ => "give the field the type that the column has",
    };
    format!(
        "`{option}` converts what is read, and a save could not convert it back; {instead}, or add `#[versioned(skip)]`"
    )
}

fn contains(tokens: TokenStream, word: &str) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Group(group) => contains(group.stream(), word),
        TokenTree::Ident(ident) => ident == word,
        _ => false,
    })
}
