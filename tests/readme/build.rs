//! Takes the Rust snippets out of README.md and the pages in `docs/` and `docs/guide/`, so that they are compiled as
//! they stand there.
//!
//! A comment before each says where a reader pastes it: `items` into one file for all pages, `statements` into an
//! `async fn` of that file, `module` into a file of its own.
//!
//! Used by two packages: `stores/tests` compiles the modules, and the tests of the README the rest.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the package is"));
    let repository = package.ancestors().find(|it| it.join("docs").is_dir()).expect("the package is in the repository");
    let (mut code, mut modules) = (String::new(), String::new());
    for page in pages(repository) {
        println!("cargo::rerun-if-changed={}", page.display());
        let text = fs::read_to_string(&page).unwrap_or_else(|err| panic!("read {}: {err}", page.display()));
        snippets(&page, &text, &mut code, &mut modules);
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    fs::write(out.join("readme.rs"), code).expect("write the snippets");
    // Apart, because they need the crates of the stores, of ORMs and of Actix Web, which only `stores/tests` has.
    fs::write(out.join("modules.rs"), modules).expect("write the snippets");
}

/// README.md and the pages of `docs/` and `docs/guide/`, in the order of their names.
fn pages(repository: &Path) -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for folder in ["docs", "docs/guide"].map(|it| repository.join(it)) {
        println!("cargo::rerun-if-changed={}", folder.display());
        let entries = fs::read_dir(folder).expect("read the pages").map(|it| it.expect("read the pages").path());
        pages.extend(entries.filter(|it| it.extension().is_some_and(|it| it == "md")));
    }
    pages.sort();
    pages.insert(0, repository.join("README.md"));
    pages
}

/// Adds the snippets of a page: those with files of their own to `modules`, the others to `code`.
fn snippets(page: &Path, text: &str, code: &mut String, modules: &mut String) {
    let page = page.file_stem().expect("a page has a name").to_string_lossy();
    let prefix = page.to_lowercase().replace(|it: char| !it.is_ascii_alphanumeric(), "_");
    let mut lines = text.lines().enumerate();
    let mut before = "";
    while let Some((number, line)) = lines.next() {
        if line != "```rust" {
            before = line;
            continue;
        }
        let snippet: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let snippet = snippet.join("\n");
        let line = number + 1;
        match before {
            "<!-- items -->" => writeln!(code, "{snippet}"),
            "<!-- module -->" => writeln!(modules, "mod {prefix}_{line} {{\n{snippet}\n}}"),
            "<!-- statements -->" => {
                writeln!(
                    code,
                    "async fn {prefix}_{line}(pool: PgPool) -> Result<(), ShopError> {{\n{snippet}\nOk(())\n}}"
                )
            }
            _ => panic!(
                "{page}.md:{line}: say `<!-- items -->`, `<!-- statements -->` or `<!-- module -->` in the line before \
                 the snippet"
            ),
        }
        .expect("write to a string");
    }
}
