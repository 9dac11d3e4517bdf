//! Checks of the source text itself: that imports point down the layers, that SQL stays in its place, and so on.
//!
//! Each rule is a function from text to complaints, and is tested on text that breaks it.

mod api;
mod code;
mod dialects;
mod documents;
mod drivers;
mod futures;
mod layers;
mod leftovers;
mod planted;
mod safety;
mod statics;
mod tree;
mod unwraps;
mod widths;

use crate::layers::Layers;
use crate::tree::files;

#[test]
fn imports_point_down_the_layers() {
    let layers = layers();
    let files = files("lockkit/src", ".rs");
    let complaints: Vec<_> = files.iter().flat_map(|(path, text)| layers.upward_imports(path, text)).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn every_layer_is_of_modules_that_exist() {
    let files = files("lockkit/src", ".rs");
    for module in layers().modules() {
        let path = module.replace("::", "/");
        let exists = |ending: &str| files.iter().any(|(file, _)| *file == format!("{path}{ending}"));
        assert!(exists(".rs") || exists("/mod.rs"), "{module}");
    }
}

fn layers() -> Layers {
    Layers::of(&files("", "ARCHITECTURE.md")[0].1)
}
