//! Takes the Rust snippets out of README.md, so that they are compiled as they stand there.
//!
//! A comment before each says where a reader pastes it: `items` into one file, `statements` into an `async fn` of that file.

use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let tests = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the package is"));
    let readme = tests.parent().expect("the tests are in a folder of the repository").join("README.md");
    println!("cargo::rerun-if-changed={}", readme.display());
    let text = fs::read_to_string(&readme).expect("read README.md");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    fs::write(out.join("readme.rs"), file(&text)).expect("write the snippets");
}

/// The snippets as one file.
fn file(readme: &str) -> String {
    let mut file = String::new();
    let mut lines = readme.lines().enumerate();
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
            "<!-- items -->" => writeln!(file, "{snippet}"),
            "<!-- statements -->" => {
                writeln!(file, "async fn line_{line}(pool: PgPool) -> Result<(), ShopError> {{\n{snippet}\nOk(())\n}}")
            }
            _ => {
                panic!("README.md:{line}: say `<!-- items -->` or `<!-- statements -->` in the line before the snippet")
            }
        }
        .expect("write to a string");
    }
    file
}
