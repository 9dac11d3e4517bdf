//! The modules of a crate, and which definition a path in one of them means.

use std::collections::BTreeMap;

use syn::{Attribute, Ident, Item, UseTree, Visibility};

use super::signature::has_name;

/// The items of each module, tests left out.
pub(super) struct Source(BTreeMap<Vec<String>, Vec<Item>>);

/// An item of the source, equal to itself alone.
#[derive(Clone, Copy)]
pub(super) struct Definition<'a>(pub(super) &'a Item);

impl PartialEq for Definition<'_> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Source {
    /// Reads the files, whose paths are those from `src`.
    ///
    /// # Panics
    /// If a file is not Rust.
    pub(super) fn of(files: &[(String, String)]) -> Self {
        let mut source = Self(BTreeMap::new());
        for (path, text) in files {
            let items = syn::parse_file(text).unwrap_or_else(|err| panic!("{path}: {err}")).items;
            let module = path.trim_end_matches(".rs").trim_end_matches("/mod");
            let module = if module == "lib" { Vec::new() } else { module.split('/').map(str::to_owned).collect() };
            source.add(module, items);
        }
        source
    }

    fn add(&mut self, module: Vec<String>, mut items: Vec<Item>) {
        items.retain(|it| !attributes(it).iter().any(|it| it.path().is_ident("cfg") && has_name(it, "test")));
        for item in &mut items {
            if let Item::Mod(it) = item
                && let Some((_, inner)) = it.content.take()
            {
                let path = module.iter().cloned().chain([it.ident.to_string()]).collect();
                self.add(path, inner);
            }
        }
        self.0.insert(module, items);
    }

    pub(super) fn items(&self, module: &[String]) -> &[Item] {
        self.0.get(module).map_or(&[], Vec::as_slice)
    }

    /// Every item, with the module that it is in.
    pub(super) fn all_items(&self) -> impl Iterator<Item = (&[String], &Item)> {
        self.0.iter().flat_map(|(module, items)| items.iter().map(|it| (module.as_slice(), it)))
    }

    /// What a path in a module means: nothing if it is of another crate, several items if `#[cfg]` chooses one of them.
    pub(super) fn resolve(&self, module: &[String], path: &[String]) -> Vec<Definition<'_>> {
        let Some((name, modules)) = path.split_last() else { return Vec::new() };
        let mut place = module.to_vec();
        for (at, segment) in modules.iter().enumerate() {
            match segment.as_str() {
                "crate" => place.clear(),
                "self" => {}
                "super" => drop(place.pop()),
                inner => {
                    place.push(inner.to_owned());
                    if !self.0.contains_key(&place) {
                        place.pop();
                        // The name of a module that is imported, or of another crate.
                        return match (at, self.imported(&place, inner)) {
                            (0, Some(mut target)) => {
                                target.extend(path[1..].iter().cloned());
                                self.resolve(&place, &target)
                            }
                            _ => Vec::new(),
                        };
                    }
                }
            }
        }
        let is_named = |it: &&Item| named(it).is_some_and(|(ident, _)| ident == name);
        let defined = self.items(&place).iter().filter(is_named);
        let defined: Vec<_> = defined.map(Definition).collect();
        match self.imported(&place, name) {
            Some(target) if defined.is_empty() && target.as_slice() != path => self.resolve(&place, &target),
            _ => defined,
        }
    }

    /// The path that a `use` in the module gives this name to.
    fn imported(&self, module: &[String], name: &str) -> Option<Vec<String>> {
        let uses =
            self.items(module).iter().filter_map(|it| if let Item::Use(it) = it { Some(&it.tree) } else { None });
        uses.flat_map(leaves).find(|(_, alias)| alias == name).map(|(target, _)| target)
    }
}

/// The paths of a `use`, each with the name that it gets: `a::{b, c as d}` is `a::b` as `b` and `a::c` as `d`.
pub(super) fn leaves(tree: &UseTree) -> Vec<(Vec<String>, String)> {
    fn walk(tree: &UseTree, mut path: Vec<String>, found: &mut Vec<(Vec<String>, String)>) {
        match tree {
            UseTree::Path(it) => {
                path.push(it.ident.to_string());
                walk(&it.tree, path, found);
            }
            UseTree::Group(it) => it.items.iter().for_each(|it| walk(it, path.clone(), found)),
            UseTree::Name(it) if it.ident == "self" => {
                let name = path.last().cloned().unwrap_or_default();
                found.push((path, name));
            }
            UseTree::Name(it) => {
                path.push(it.ident.to_string());
                found.push((path, it.ident.to_string()));
            }
            UseTree::Rename(it) => {
                path.push(it.ident.to_string());
                found.push((path, it.rename.to_string()));
            }
            UseTree::Glob(_) => {
                path.push("*".to_owned());
                found.push((path, "*".to_owned()));
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, Vec::new(), &mut found);
    found
}

/// The name and the visibility of an item that has both.
pub(super) fn named(item: &Item) -> Option<(&Ident, &Visibility)> {
    match item {
        Item::Struct(it) => Some((&it.ident, &it.vis)),
        Item::Enum(it) => Some((&it.ident, &it.vis)),
        Item::Trait(it) => Some((&it.ident, &it.vis)),
        Item::Fn(it) => Some((&it.sig.ident, &it.vis)),
        Item::Type(it) => Some((&it.ident, &it.vis)),
        Item::Const(it) => Some((&it.ident, &it.vis)),
        Item::Static(it) => Some((&it.ident, &it.vis)),
        _ => None,
    }
}

pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Struct(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Const(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}
