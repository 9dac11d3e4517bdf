//! Tests that documents name: each of them exists.

use crate::tree::{files, text};

/// The tests that the text names, as `module::function`, which no file of that module has.
///
/// A file is of the modules that its folders are, too: `leases::x` may be in `leases/waiting.rs`.
fn missing_tests(text: &str, files: &[(String, String)]) -> Vec<String> {
    let named = text.split('`').skip(1).step_by(2).filter_map(|it| it.split_once("::").map(|parts| (it, parts)));
    let missing = named.filter(|(_, (module, function))| {
        let is_of_module = |path: &str| path.split('/').any(|it| it.trim_end_matches(".rs") == *module);
        !files.iter().any(|(path, source)| is_of_module(path) && has_function(source, function))
    });
    missing.map(|(name, _)| name.to_owned()).collect()
}

/// Whether the text has a function of exactly this name. Comments do not count, tests do.
pub(crate) fn has_function(source: &str, name: &str) -> bool {
    let is_function = |line: &str| {
        let rest = line.trim_start().trim_start_matches("pub ").trim_start_matches("async ").strip_prefix("fn ");
        rest.and_then(|it| it.strip_prefix(name)).is_some_and(|it| it.starts_with(['(', '<']))
    };
    source.lines().any(is_function)
}

#[test]
fn every_test_that_a_table_names_is_there() {
    let mut sources = files("tests/integration", ".rs");
    sources.extend(files("tests/axum", ".rs"));
    sources.extend(files("tests/jobs", ".rs"));
    sources.extend(files("tests/macros", ".rs"));
    sources.extend(files("tests/pooled", ".rs"));
    sources.extend(files("tests/sqlx_cli", ".rs"));
    sources.extend(files("stores", ".rs"));
    sources.extend(files("lockkit/src", ".rs"));
    sources.extend(files("museum/src", ".rs"));
    let pages = ["TRAPS.md", "docs/museum/recipes.md", "docs/museum/comparison.md"].map(text);
    assert!(pages[0].matches("::").count() > 50 && pages.iter().all(|it| it.contains("::")), "they name tests");
    assert_eq!(missing_tests(&pages.concat(), &sources), [""; 0]);
}

#[test]
fn the_check_sees_a_planted_name_of_a_test_that_is_not_there() {
    let source =
        "async fn two_meet() {}\n// fn gone()\n    async fn all_meet<S>(db: TestDb<S>) {}\nfn f(fn_gone: u8) {}";
    let files = [("tests/many.rs".to_owned(), source.to_owned()), ("leases/wait.rs".to_owned(), source.to_owned())];
    let missing = |text: &str| missing_tests(text, &files);

    assert_eq!(missing("`many::two_meet`, `many::all_meet`, `leases::two_meet`, `wait::two_meet`"), [""; 0]);
    assert_eq!(missing("`many::gone`, `few::two_meet`"), ["many::gone", "few::two_meet"]);
    // The beginning of a name is not the name.
    assert_eq!(missing("`many::two`, `many::two_mee`"), ["many::two", "many::two_mee"]);
}
