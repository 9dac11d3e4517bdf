//! Checks of the source text itself: that imports point down the layers, that SQL stays in its place, and so on.
//!
//! Each rule is a function from text to complaints, and is tested on text that breaks it.

mod code;
mod layers;

use std::fs;
use std::path::Path;

use crate::code::{Token, code};
use crate::layers::Layers;

// ---- the rules ---------------------------------------------------------------------------------------------------

/// SQL, drivers and what only they need.
fn sql_and_drivers(file: &str, source: &str) -> Vec<String> {
    const WORDS: [&str; 14] = [
        "SELECT",
        "INSERT",
        "UPDATE",
        "DELETE",
        "CREATE",
        "DROP",
        "WHERE",
        "BEGIN",
        "COMMIT",
        "ROLLBACK",
        "SAVEPOINT",
        "PRAGMA",
        "EXPLAIN",
        "lockkit_lease",
    ];
    const NAMES: [&str; 8] =
        ["AssertSqlSafe", "SqlStr", "mysql", "postgres", "query_as", "query_scalar", "raw_sql", "sqlite"];

    let tokens = code(source);
    let is_driver = |name: &str| {
        let pg = name.strip_prefix("Pg").is_some_and(|it| it.starts_with(char::is_uppercase));
        pg || ["Postgres", "MySql", "Sqlite"].iter().any(|it| name.starts_with(it))
    };
    let is_query = |at: usize| at > 2 && tokens[at].text.starts_with("query") && tokens[at - 3].text == "sqlx";
    let out_of_place = |at: usize, token: &Token| {
        if token.is_text() {
            let mut words = token.text.split(|it: char| !it.is_alphanumeric() && it != '_');
            return words.any(|it| WORDS.contains(&it));
        }
        token.is_name() && (NAMES.contains(&token.text.as_str()) || is_driver(&token.text) || is_query(at))
    };
    let complaints = tokens.iter().enumerate().filter(|(at, token)| out_of_place(*at, token));
    complaints
        .map(|(_, it)| format!("{file}:{}: only the folder of a database may have `{}`", it.line, it.text))
        .collect()
}

fn is_of_a_database(path: &str) -> bool {
    ["sql/postgres/", "sql/mysql/", "sql/sqlite/"].iter().any(|it| path.starts_with(it))
}

/// Unsafe code, and `.unwrap()`, which says nothing of why it cannot fail.
fn unsafe_and_unwrap(file: &str, source: &str) -> Vec<String> {
    let tokens = code(source);
    let bad = tokens.iter().enumerate().filter(|(at, token)| {
        let method = *at > 0 && tokens[at - 1].text == ".";
        token.text == "unsafe" || token.text == "unwrap" && method
    });
    bad.map(|(_, it)| format!("{file}:{}: no `{}`", it.line, it.text)).collect()
}

/// What is not finished, and paths and hosts of somebody's machine.
fn leftovers(file: &str, text: &str) -> Vec<String> {
    const UNFINISHED: [&str; 5] = ["TODO", "FIXME", "todo!", "unimplemented!", "dbg!"];
    const REGISTRIES: [&str; 5] = ["registry+", "sparse+", "replace-with", "index.crates.io", "static.crates.io"];
    const MACHINE: [&str; 6] = ["/home/", "/root/", "/tmp/", "/work/", "/Users/", "\\Users\\"];

    let is_absolute = |line: &str, folder: &str| {
        line.match_indices(folder)
            .any(|(at, _)| !line[..at].ends_with(|it: char| it.is_alphanumeric() || "._-}~*".contains(it)))
    };
    let mut complaints = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words = UNFINISHED.iter().chain(&REGISTRIES).filter(|it| line.contains(**it));
        let found = words.chain(MACHINE.iter().filter(|it| is_absolute(line, it)));
        complaints.extend(found.map(|it| format!("{file}:{}: `{it}`", number + 1)));
    }
    complaints
}

/// The headings of a dialect and the operations under them, in their order.
fn operations(source: &str) -> Vec<String> {
    let headings =
        source.lines().filter(|it| it.starts_with("// ----")).map(|it| it.trim_matches(['/', '-', ' ']).to_owned());
    let tokens = code(source);
    let texts: Vec<_> = tokens.iter().map(|it| it.text.as_str()).collect();
    let mut operations: Vec<_> = headings.collect();
    let (mut operation_of, mut depth) = (None, 0);
    for (at, text) in texts.iter().enumerate() {
        match *text {
            "impl" if depth == 0 => {
                let header: Vec<_> = texts[at..].iter().copied().take_while(|it| *it != "{").collect();
                operation_of = header.iter().position(|it| *it == "for").map(|it| header[it - 1]);
            }
            "{" => depth += 1,
            "}" => depth -= 1,
            "fn" if depth == 1 => {
                operations.push(format!("{}::{}", operation_of.unwrap_or("Self"), texts[at + 1]));
            }
            _ => {}
        }
    }
    operations
}

/// The async functions that users can call: `Type::name`, or `name` of a free one. `lib` says what is public.
fn public_async_functions(lib: &str, source: &str) -> Vec<String> {
    let exported: Vec<_> = code(lib).into_iter().map(|it| it.text).collect();
    let tokens = code(source);
    let texts: Vec<_> = tokens.iter().map(|it| it.text.as_str()).collect();
    let (mut functions, mut of, mut depth) = (Vec::new(), "", 0);
    for (at, text) in texts.iter().enumerate() {
        match *text {
            "impl" if depth == 0 => of = type_of_impl(&texts[at + 1..]),
            "{" => depth += 1,
            "}" => depth -= 1,
            "pub" if texts[at..].starts_with(&["pub", "async", "fn"]) => {
                let name = texts[at + 3];
                let (outer, function) =
                    if depth == 0 { (name, name.to_owned()) } else { (of, format!("{of}::{name}")) };
                if exported.iter().any(|it| it == outer) {
                    functions.push(function);
                }
            }
            _ => {}
        }
    }
    functions
}

/// The name of the type that an `impl` without its first word is for.
fn type_of_impl<'a>(header: &[&'a str]) -> &'a str {
    let mut angles = 0;
    let mut name = "";
    for (at, text) in header.iter().enumerate() {
        match *text {
            "<" => angles += 1,
            ">" if at > 0 && header[at - 1] != "-" => angles -= 1,
            "{" | "where" => break,
            _ if angles == 0 && text.starts_with(char::is_alphabetic) => name = text,
            _ => {}
        }
    }
    name
}

/// Whether one of the texts in the source begins with this name of a function.
fn is_in_table(source: &str, function: &str) -> bool {
    let names = |text: &str| {
        let rest = text.trim_start_matches('"').strip_prefix(function);
        rest.is_some_and(|it| !it.starts_with(|it: char| it.is_alphanumeric() || "_:".contains(it)))
    };
    code(source).iter().any(|it| it.is_text() && names(&it.text))
}

// ---- what the rules stand on -------------------------------------------------------------------------------------

/// The files below a folder of the repository whose names end so, with their paths from that folder.
fn files(folder: &str, ending: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository");
    let root = root.join(folder);
    let (mut found, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("read a folder") {
            let entry = entry.expect("read a folder");
            let (path, kind) = (entry.path(), entry.file_type().expect("the type of a file"));
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            let is_hidden = name.starts_with('.') && ![".ci", ".github", ".gitignore"].contains(&name.as_str());
            if kind.is_dir() && !is_hidden && name != "target" {
                folders.push(path);
            } else if kind.is_file() && !is_hidden && name.ends_with(ending) {
                // What is no text has nothing to complain about.
                let Ok(text) = fs::read_to_string(&path) else { continue };
                let path = path.strip_prefix(&root).expect("a file in the folder").display().to_string();
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "no *{ending} in {folder}");
    found.sort();
    found
}

/// Applies a rule to files.
fn check(files: &[(String, String)], rule: fn(&str, &str) -> Vec<String>) {
    let complaints: Vec<_> = files.iter().flat_map(|(path, text)| rule(path, text)).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

// ---- the source ---------------------------------------------------------------------------------------------------

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

#[test]
fn sql_and_driver_names_stay_in_the_folders_of_databases() {
    let mut files = files("lockkit/src", ".rs");
    let are_shared = ["sql/mod.rs", "sql/fault.rs", "sql/query.rs", "sql/pool.rs", "sql/history.rs", "sql/lease.rs"];
    files.retain(|(path, _)| !is_of_a_database(path) && !are_shared.contains(&path.as_str()));
    check(&files, sql_and_drivers);
}

#[test]
fn nothing_is_unsafe_or_unwrapped() {
    check(&files("lockkit/src", ".rs"), unsafe_and_unwrap);
    check(&files("lockkit-macros/src", ".rs"), unsafe_and_unwrap);
}

#[test]
fn every_dialect_has_the_same_operations_in_the_same_order() {
    let of = |name: &str| {
        let files = files(&format!("lockkit/src/sql/{name}"), ".rs");
        files.iter().map(|(file, source)| (file.clone(), operations(source))).collect::<Vec<_>>()
    };
    let postgres = of("postgres");
    let has_acquire = |it: &(String, Vec<String>)| it.1.contains(&"LeaseOps::lease_acquire".to_owned());
    assert!(postgres.iter().any(has_acquire), "{postgres:?}");
    let without = |files: &[&str]| {
        postgres.iter().filter(|(file, _)| !files.contains(&file.as_str())).cloned().collect::<Vec<_>>()
    };
    // Only PostgreSQL notifies and has poolers that lose statements, and SQLite has no sessions that could hold a lock.
    assert_eq!(of("mysql"), without(&["listen.rs", "pooler.rs"]));
    assert_eq!(of("sqlite"), without(&["listen.rs", "pooler.rs", "session.rs"]));
}

#[test]
fn nothing_is_unfinished_and_no_file_knows_somebodys_machine() {
    let mut files = files("", "");
    files.retain(|(path, _)| path != "Cargo.lock" && path != "tests/source/main.rs");
    check(&files, leftovers);
}

#[test]
fn every_public_async_function_is_dropped_at_every_await() {
    let mut sources = files("lockkit/src", ".rs");
    let lib = sources.iter().find(|it| it.0 == "lib.rs").expect("lib.rs").1.clone();
    sources.retain(|(path, _)| !path.starts_with("testing/") && path != "macro_support.rs");
    let table = files("tests/integration", "cancellation.rs").remove(0).1;
    let functions: Vec<_> = sources.iter().flat_map(|(_, source)| public_async_functions(&lib, source)).collect();
    assert!(functions.len() > 30, "{functions:?}");
    let missing: Vec<_> = functions.iter().filter(|it| !is_in_table(&table, it)).collect();
    assert!(missing.is_empty(), "cancellation.rs drops none of these: {missing:?}");
    println!("{} public async functions are dropped at every await", functions.len());
}

// ---- the rules, broken ---------------------------------------------------------------------------------------------

/// The tests that the text names, as `module::function`, which no file of that module has.
fn missing_tests(text: &str, files: &[(String, String)]) -> Vec<String> {
    let named = text.split('`').skip(1).step_by(2).filter_map(|it| it.split_once("::").map(|parts| (it, parts)));
    let missing = named.filter(|(_, (module, function))| {
        let has = |(path, source): &&(String, String)| {
            path.split('/').any(|it| it.trim_end_matches(".rs") == *module)
                && source.contains(&format!("fn {function}"))
        };
        files.iter().find(has).is_none()
    });
    missing.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn every_trap_has_the_test_that_the_table_names() {
    let mut sources = files("tests/integration", ".rs");
    sources.extend(files("tests/macros", ".rs"));
    sources.extend(files("tests/pooled", ".rs"));
    sources.extend(files("tests/macros", ".rs"));
    sources.extend(files("lockkit/src", ".rs"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository");
    let text = fs::read_to_string(root.join("TRAPS.md")).expect("read the table");
    assert!(text.matches("::").count() > 50, "the table is not empty");
    assert_eq!(missing_tests(&text, &sources), [""; 0]);

    let source = [("tests/many.rs".to_owned(), "async fn two_meet() {}".to_owned())];
    assert_eq!(
        missing_tests("`many::two_meet`, `many::gone`, `few::two_meet`", &source),
        ["many::gone", "few::two_meet"]
    );
}

#[test]
fn the_check_sees_planted_sql_and_drivers() {
    let complaints = |source: &str| sql_and_drivers("retry.rs", source).len();

    assert_eq!(complaints(r#"fn f() { g("SELECT 1"); g(r"DELETE FROM t"); g(b"x") }"#), 2);
    assert_eq!(complaints(r#"const SQL: &str = concat!("UPDATE ", "t");"#), 1);
    assert_eq!(complaints("use sqlx::{PgConnection, Sqlite, postgres::PgRow};"), 4);
    assert_eq!(complaints("fn f() { sqlx::query(text) }"), 1);
    assert_eq!(
        complaints("// SELECT 1\n/// COMMIT\n#[cfg(feature = \"mysql\")] fn f(query: Query) { g(\"begin\") }"),
        0
    );
}

#[test]
fn the_check_sees_planted_unwraps_and_unsafe_code() {
    let complaints = |source: &str| unsafe_and_unwrap("key.rs", source).len();

    assert_eq!(complaints("fn f() { g().unwrap() }"), 1);
    assert_eq!(complaints("unsafe fn f() {}"), 1);
    assert_eq!(
        complaints("/// `unsafe`\n#[cfg(test)] mod tests { fn f() { g().unwrap() } } fn unwrap() { h(unwrap) }"),
        0
    );
}

#[test]
fn the_check_sees_a_planted_operation_out_of_order() {
    let both = "// ---- leases ---\nimpl LeaseOps for A { async fn get() { if x {} } fn set() {} } fn free() {}";
    assert_eq!(operations(both), ["leases", "LeaseOps::get", "LeaseOps::set"]);
    assert_ne!(operations("// ---- leases ---\nimpl LeaseOps for B { fn set() {} fn get() {} }"), operations(both));
    assert_ne!(operations("impl LeaseOps for B { fn get() {} fn set() {} }"), operations(both));
}

#[test]
fn the_check_sees_planted_leftovers() {
    let complaints = |text: &str| leftovers("README.md", text).len();

    assert_eq!(complaints("// TODO: later\nlet x = todo!();\ndbg!(x);"), 3);
    assert_eq!(complaints("cd /home/ann/lockkit\nsource = \"/tmp/x\"\nC:\\Users\\ann"), 3);
    assert_eq!(complaints("source = \"sparse+https://example.com\""), 1);
    assert_eq!(complaints("target/tmp/x, ~/work/x, https://crates.io/crates/lockkit"), 0);
}

#[test]
fn the_check_sees_a_public_async_function_that_is_not_in_the_table() {
    let lib = "pub use lease::{Lease, Request}; pub use section::begin;";
    let source = "
        pub async fn begin() {}
        pub async fn inner() {}
        impl<S: Store, F: Fn() -> S> Lease<S> where S: Sync { pub async fn lost(&self) { if x {} } async fn private() {} }
        impl<S> Request<S> { pub(crate) async fn ask() {} #[must_use] pub async fn acquire() {} pub fn now() {} }
        impl Unexported { pub async fn step() {} }
    ";
    let functions = public_async_functions(lib, source);
    assert_eq!(functions, ["begin", "Lease::lost", "Request::acquire"]);

    let table =
        r#"f("begin"); f("Request::acquire, fair"); f("Lease::lost_too"); f("Lease::lost::x"); // "Lease::lost" "#;
    let missing: Vec<_> = functions.iter().filter(|it| !is_in_table(table, it)).collect();
    assert_eq!(missing, ["Lease::lost"]);
}
