//! The global state of the crates, as DESIGN.md has it.

use std::collections::BTreeSet;

use crate::{code::code, tree::files};

/// Whether the source has a `static` with a value. One without is a task-local's.
fn has_static(source: &str) -> bool {
    let tokens = code(source);
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|it| it.text == text);
    (0..tokens.len()).any(|at| {
        // `'static` is a lifetime.
        let is_item = is(at, "static") && (at == 0 || !is(at - 1, "'"));
        is_item && (at..tokens.len()).find(|at| is(*at, "=") || is(*at, ";")).is_some_and(|at| is(at, "="))
    })
}

/// The files that the answer to the question names, in backticks.
fn named(design: &str) -> BTreeSet<String> {
    let answer = design.split("### What state is global?").nth(1).expect("the question is in DESIGN.md");
    let answer = answer.split("\n#").next().unwrap_or_default();
    answer.split('`').skip(1).step_by(2).filter(|it| it.contains('/') || *it == "fifo").map(str::to_owned).collect()
}

#[test]
fn the_design_names_every_file_with_global_state() {
    let stores = ["redis", "zookeeper", "etcd"].map(|it| format!("stores/{it}/src"));
    let found: BTreeSet<_> = stores
        .iter()
        .map(|folder| (folder.as_str(), true))
        .chain([("lockkit/src", false)])
        .flat_map(|(folder, is_named)| files(folder, ".rs").into_iter().map(move |it| (folder, is_named, it)))
        .filter(|(.., (_, text))| has_static(text))
        .map(|(folder, is_named, (file, _))| {
            let module = file.trim_end_matches(".rs").trim_end_matches("/mod");
            if is_named { format!("{folder}/{module}") } else { module.to_owned() }
        })
        .collect();
    assert_eq!(found, named(&files("", "DESIGN.md")[0].1));
}

#[test]
fn the_check_tells_statics_from_lifetimes_and_task_locals() {
    assert!(has_static("static ONE: u8 = 1;"));
    assert!(has_static("fn f() { static ONE: LazyLock<Mutex<u8>> = LazyLock::new(Mutex::default); }"));
    assert!(!has_static("const ONE: &'static str = \"static\";"));
    assert!(!has_static("tokio::task_local! { static ONE: u8; } fn f() { let one = 1; }"));
    assert!(!has_static("#[cfg(test)] mod tests { static ONE: u8 = 1; }"));
}
