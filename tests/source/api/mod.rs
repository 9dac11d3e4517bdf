//! The public API of `lockkit`, as its source has it: every public item by the path that users write, with its
//! signature.
//!
//! `api.txt` is the API as it was last accepted. The test here says what changed since.
//!
//! Left out: items that are `#[doc(hidden)]`, items that macros expand to, and automatic traits.

mod signature;
mod source;

use std::collections::BTreeSet;
use std::fs;

use syn::{ImplItem, Item, ItemImpl, ReturnType, Signature, TraitItem, Visibility};

use self::signature::{cfgs, is_hidden, kept_attributes, tidy};
use self::source::{Definition, Source};
use crate::tree::{files, path, text};

/// The most names that the root may have.
const ROOT: usize = 46;

/// The file of the accepted API, within the repository.
const ACCEPTED: &str = "tests/source/api/api.txt";

/// Set it to rewrite [`ACCEPTED`].
const ACCEPT: &str = "LOCKKIT_ACCEPT_API";

/// One public item.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    /// As users write it: `lockkit::Lease::commit`.
    pub(crate) path: String,
    /// What follows the path in `api.txt`.
    pub(crate) signature: String,
    pub(crate) kind: Kind,
}

/// What the rules on functions distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Neither a function nor a method that returns a future.
    Other,
    /// An `async fn`, or a function that returns `impl Future`.
    Future,
    /// A method of a trait that returns a future, with whether its declaration says that the future is `Send`.
    TraitFuture { is_send: bool },
}

/// All public items of a crate with these files, in the order of their paths.
pub(crate) fn entries(files: &[(String, String)]) -> Vec<Entry> {
    let source = Source::of(files);
    let mut api = Api { source: &source, entries: Vec::new(), public: Vec::new() };
    api.module(&[], "lockkit", &[]);
    api.macros();
    api.impls();
    api.entries.sort();
    api.entries.dedup();
    api.entries
}

/// The distinct names directly within a public module: `lockkit::store::Claim` is one of `lockkit::store`.
fn names<'a>(entries: &'a [Entry], module: &str) -> BTreeSet<&'a str> {
    let within = entries.iter().filter_map(|it| it.path.strip_prefix(module)?.strip_prefix("::"));
    within.filter(|it| !it.contains("::")).map(|it| it.trim_end_matches('!')).collect()
}

/// The text of `api.txt`: a line for each entry.
fn lines(entries: &[Entry]) -> String {
    let lines = entries.iter().map(|Entry { path, signature, .. }| format!("{path}: {signature}\n"));
    lines.collect::<Vec<_>>().concat()
}

/// The lines that only one of the texts has, with `-` before those of the first and `+` before those of the second.
fn difference(before: &str, now: &str) -> Vec<String> {
    let (old, new): (BTreeSet<_>, BTreeSet<_>) = (before.lines().collect(), now.lines().collect());
    let removed = old.difference(&new).map(|it| (*it, '-'));
    let added = new.difference(&old).map(|it| (*it, '+'));
    let changed: BTreeSet<_> = removed.chain(added).collect();
    changed.into_iter().map(|(line, sign)| format!("{sign} {line}")).collect()
}

/// Collects the entries of a crate.
struct Api<'a> {
    source: &'a Source,
    entries: Vec<Entry>,
    /// The definitions that users can name, each with its first public path and the `cfg`s on the way there.
    public: Vec<(Definition<'a>, String, Vec<String>)>,
}

impl<'a> Api<'a> {
    fn add(&mut self, path: String, cfgs: &[String], signature: &str, kind: Kind) {
        let unique: BTreeSet<_> = cfgs.iter().map(String::as_str).collect();
        let cfgs: String = unique.into_iter().flat_map(|it| [it, " "]).collect();
        self.entries.push(Entry { path, signature: format!("{cfgs}{signature}"), kind });
    }

    /// Adds the public items of a module, whose public path is `name`.
    fn module(&mut self, module: &[String], name: &str, outer: &[String]) {
        for item in self.source.items(module) {
            if is_hidden(source::attributes(item)) {
                continue;
            }
            let cfgs: Vec<_> = outer.iter().cloned().chain(cfgs(source::attributes(item))).collect();
            match item {
                Item::Use(it) if is_public(&it.vis) => {
                    for (target, alias) in source::leaves(&it.tree) {
                        self.export(module, &target, &format!("{name}::{alias}"), &cfgs);
                    }
                }
                Item::Mod(it) if is_public(&it.vis) => {
                    let path = format!("{name}::{}", it.ident);
                    self.add(path.clone(), &cfgs, "pub mod", Kind::Other);
                    let inner: Vec<_> = module.iter().cloned().chain([it.ident.to_string()]).collect();
                    // The line of the module says what switches it on.
                    self.module(&inner, &path, &[]);
                }
                _ => {
                    if let Some((ident, vis)) = source::named(item)
                        && is_public(vis)
                    {
                        let path = format!("{name}::{ident}");
                        self.definition(Definition(item), &path, &cfgs);
                    }
                }
            }
        }
    }

    /// Adds what a `pub use` of the path in the module exports under this name.
    fn export(&mut self, module: &[String], target: &[String], name: &str, cfgs: &[String]) {
        let definitions = self.source.resolve(module, target);
        if definitions.is_empty() {
            self.add(name.to_owned(), cfgs, &format!("pub use {}", target.join("::")), Kind::Other);
        }
        for definition in definitions {
            self.definition(definition, name, cfgs);
        }
    }

    fn definition(&mut self, definition: Definition<'a>, path: &str, outer: &[String]) {
        let attributes = source::attributes(definition.0);
        let cfgs: Vec<_> = outer.iter().cloned().chain(cfgs(attributes)).collect();
        let kept = kept_attributes(attributes);
        self.add(path.to_owned(), &cfgs, &format!("{kept}{}", signature::of_item(definition.0)), kind(definition.0));
        match definition.0 {
            Item::Struct(it) => {
                for (number, field) in it.fields.iter().enumerate().filter(|(_, it)| is_public(&it.vis)) {
                    let name = field.ident.as_ref().map_or(number.to_string(), ToString::to_string);
                    self.add(format!("{path}::{name}"), &cfgs, &format!("pub {}", tidy(&field.ty)), Kind::Other);
                }
            }
            Item::Enum(it) => {
                for variant in it.variants.iter().filter(|it| !is_hidden(&it.attrs)) {
                    let text = format!("{}{}", kept_attributes(&variant.attrs), signature::of_variant(variant));
                    self.add(format!("{path}::{}", variant.ident), &cfgs, &text, Kind::Other);
                }
            }
            Item::Trait(it) => {
                for item in &it.items {
                    let (name, attributes, kind) = match item {
                        TraitItem::Fn(it) => (&it.sig.ident, &it.attrs, trait_kind(&it.sig)),
                        TraitItem::Type(it) => (&it.ident, &it.attrs, Kind::Other),
                        TraitItem::Const(it) => (&it.ident, &it.attrs, Kind::Other),
                        _ => continue,
                    };
                    if !is_hidden(attributes) {
                        self.add(format!("{path}::{name}"), &cfgs, &signature::of_trait_item(item), kind);
                    }
                }
            }
            _ => {}
        }
        if !self.public.iter().any(|(it, ..)| *it == definition) {
            self.public.push((definition, path.to_owned(), outer.to_vec()));
        }
    }

    /// Macros are exported from the root, wherever they are defined.
    fn macros(&mut self) {
        for (_, item) in self.source.all_items() {
            if let Item::Macro(it) = item
                && it.attrs.iter().any(|it| it.path().is_ident("macro_export"))
                && let Some(name) = &it.ident
                && !is_hidden(&it.attrs)
            {
                self.add(format!("lockkit::{name}!"), &cfgs(&it.attrs), "macro_rules!", Kind::Other);
            }
        }
    }

    /// Adds the public functions of public types, and the traits that public types have.
    fn impls(&mut self) {
        let public = std::mem::take(&mut self.public);
        for (module, item) in self.source.all_items() {
            let Item::Impl(it) = item else { continue };
            let find = |path: &syn::Path| {
                let segments: Vec<_> = path.segments.iter().map(|it| it.ident.to_string()).collect();
                let found = self.source.resolve(module, &segments);
                let entry = public.iter().find(|(definition, ..)| found.contains(definition));
                (entry, !found.is_empty())
            };
            let (of_type, is_local) = match &*it.self_ty {
                syn::Type::Path(it) => find(&it.path),
                _ => (None, false),
            };
            let Some((trait_path, _)) = &it.trait_ else {
                if let Some((_, path, outer)) = of_type {
                    self.functions(it, path, outer);
                }
                continue;
            };
            match (of_type, find(trait_path)) {
                // A trait of this crate that users cannot name.
                (_, (None, true)) => {}
                (Some((_, path, outer)), _) => self.implementation(it, path, outer),
                (None, (Some((_, path, outer)), _)) if !is_local => self.implementation(it, path, outer),
                _ => {}
            }
        }
    }

    fn functions(&mut self, block: &ItemImpl, path: &str, outer: &[String]) {
        let outer: Vec<_> = outer.iter().cloned().chain(cfgs(&block.attrs)).collect();
        let header = signature::of_impl(block);
        for item in &block.items {
            let (name, vis, attributes, kind) = match item {
                ImplItem::Fn(it) => (&it.sig.ident, &it.vis, &it.attrs, function_kind(&it.sig)),
                ImplItem::Const(it) => (&it.ident, &it.vis, &it.attrs, Kind::Other),
                _ => continue,
            };
            if is_public(vis) && !is_hidden(attributes) {
                let cfgs: Vec<_> = outer.iter().cloned().chain(cfgs(attributes)).collect();
                let text = format!("{header} {{ {} }}", signature::of_impl_item(item));
                self.add(format!("{path}::{name}"), &cfgs, &text, kind);
            }
        }
    }

    fn implementation(&mut self, block: &ItemImpl, path: &str, outer: &[String]) {
        if !is_hidden(&block.attrs) {
            let cfgs: Vec<_> = outer.iter().cloned().chain(cfgs(&block.attrs)).collect();
            self.add(path.to_owned(), &cfgs, &signature::of_impl(block), Kind::Other);
        }
    }
}

fn is_public(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

fn kind(item: &Item) -> Kind {
    if let Item::Fn(it) = item { function_kind(&it.sig) } else { Kind::Other }
}

fn function_kind(function: &Signature) -> Kind {
    if returns_future(function) { Kind::Future } else { Kind::Other }
}

fn trait_kind(function: &Signature) -> Kind {
    let is_send = function.asyncness.is_none() && signature::has_name(&function.output, "Send");
    if returns_future(function) { Kind::TraitFuture { is_send } } else { Kind::Other }
}

fn returns_future(function: &Signature) -> bool {
    let of_output = |it: &ReturnType| ["Future", "IntoFuture"].iter().any(|name| signature::has_name(it, name));
    function.asyncness.is_some() || of_output(&function.output)
}

// ---- the API of today ----------------------------------------------------------------------------

#[test]
fn the_public_api_is_the_accepted_one() {
    let now = lines(&entries(&files("lockkit/src", ".rs")));
    if std::env::var_os(ACCEPT).is_some() {
        fs::write(path(ACCEPTED), &now).expect("write the accepted API");
    }
    let changed = difference(&text(ACCEPTED), &now);
    assert!(
        changed.is_empty(),
        "the public API is not the one of {ACCEPTED}:\n{}\nIf this is meant, run `{ACCEPT}=1 cargo test --workspace \
         --test source api` and commit the file.",
        changed.join("\n")
    );
}

#[test]
fn the_root_has_few_names() {
    let entries = entries(&files("lockkit/src", ".rs"));
    for module in ["lockkit", "lockkit::store", "lockkit::dialect", "lockkit::testing"] {
        println!("{module}: {} names", names(&entries, module).len());
    }
    let root = names(&entries, "lockkit");
    assert!(root.len() <= ROOT, "{} names at the root, of which {ROOT} are allowed: {root:?}", root.len());
}

// ---- the reading of a planted API ----------------------------------------------------------------

#[cfg(test)]
const LIB: &str = r#"
mod lease; mod sql;
pub mod testing;
#[doc(hidden)] pub mod __private;
pub use lease::{Lease, Kind as Sort};
#[cfg(feature = "postgres")] pub use sql::begin;
pub use lockkit_macros::with_lock;
#[macro_export] macro_rules! locked { () => {} }
"#;

#[cfg(test)]
fn planted(lease: &str) -> String {
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let files = [
        file("lib.rs", LIB),
        file("lease/mod.rs", lease),
        file("sql/mod.rs", "mod tx; pub use tx::begin; pub struct Unexported; impl Unexported { pub fn f() {} }"),
        file(
            "sql/tx.rs",
            "use crate::lease::Lease as L; pub async fn begin(wait: u8,) -> Tx<u8> {} impl<T> L<T> { pub fn \
             pin(&self) {} }",
        ),
        file("testing.rs", "pub fn conform<F: Fn()>(run: F) -> impl Future<Output = ()> { async {} } fn private() {}"),
    ];
    lines(&entries(&files))
}

#[test]
fn a_planted_api_is_read_by_the_paths_that_users_write() {
    let lease = "
        /// Documented.
        #[derive(Clone)] #[non_exhaustive]
        pub struct Lease<S: Store> where S: Sync { pub key: Key, token: u8 }
        pub(crate) struct Inner;
        pub enum Kind { One, Two { a: &'static str }, #[doc(hidden)] Three(u8) }
        impl<S: Store> Lease<S> {
            pub async fn commit<T>(mut self, mut tx: T) -> Result<(), Error> { f() }
            pub(crate) fn inner(&self) {}
            #[doc(hidden)] pub fn hidden(&self) {}
        }
        impl<S> Drop for Lease<S> { fn drop(&mut self) {} }
        impl Drop for Inner { fn drop(&mut self) {} }
        trait Private {} impl<S> Private for Lease<S> {}
        #[cfg(test)] mod tests { pub fn a_test() {} }
    ";
    let expected = "\
lockkit::Lease: #[derive(Clone)] #[non_exhaustive] pub struct Lease<S: Store> where S: Sync
lockkit::Lease: impl<S> Drop for Lease<S>
lockkit::Lease::commit: impl<S: Store> Lease<S> { pub async fn commit<T>(self, tx: T) -> Result<(), Error> }
lockkit::Lease::key: pub Key
lockkit::Lease::pin: impl<T> L<T> { pub fn pin(&self) }
lockkit::Sort: pub enum Kind
lockkit::Sort::One: One
lockkit::Sort::Two: Two { a: &'static str }
lockkit::begin: #[cfg(feature = \"postgres\")] pub async fn begin(wait: u8) -> Tx<u8>
lockkit::locked!: macro_rules!
lockkit::testing: pub mod
lockkit::testing::conform: pub fn conform<F: Fn()>(run: F) -> impl Future<Output = ()>
lockkit::with_lock: pub use lockkit_macros::with_lock
";
    assert_eq!(planted(lease), expected);
}

#[test]
fn planted_changes_of_the_api_are_seen() {
    let changes = |one: &str, other: &str| difference(&planted(one), &planted(other));
    let base = "pub struct Lease; pub enum Kind {} impl Lease { pub fn key(&self) -> &Key { &self.0 } }";

    // Neither the layout nor a body is the API.
    assert_eq!(changes(base, &base.replace("&self.0", "self . key").replace("(&self)", "(\n &self,\n)")), [""; 0]);
    assert_eq!(
        changes(base, &base.replace("&Key", "Key")),
        [
            "+ lockkit::Lease::key: impl Lease { pub fn key(&self) -> Key }",
            "- lockkit::Lease::key: impl Lease { pub fn key(&self) -> &Key }"
        ]
        .map(str::to_owned)
        .into_iter()
        .rev()
        .collect::<Vec<_>>()
    );
    assert_eq!(changes(base, &base.replace("pub fn", "fn")).len(), 1);
    assert_eq!(changes(base, &base.replace("pub enum", "#[non_exhaustive] pub enum")).len(), 2);
}

#[test]
fn names_are_counted_once_and_where_they_are() {
    let source = "pub mod store { pub struct Claim; } pub struct Lease; impl Lease { pub fn f() {} } \
                  #[macro_export] macro_rules! Lease { () => {} }";
    let files = [("lib.rs".to_owned(), source.to_owned())];
    let entries = entries(&files);
    assert_eq!(names(&entries, "lockkit"), BTreeSet::from(["Lease", "store"]));
    assert_eq!(names(&entries, "lockkit::store"), BTreeSet::from(["Claim"]));
}
