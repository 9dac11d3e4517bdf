//! The operations of a database: the same ones, in the same order, on every database.

use crate::code::code;
use crate::tree::files;

/// The operations of a dialect, in their order.
fn operations(source: &str) -> Vec<String> {
    let tokens = code(source);
    let texts: Vec<_> = tokens.iter().map(|it| it.text.as_str()).collect();
    let mut operations = Vec::new();
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

#[test]
fn every_dialect_has_the_same_operations_in_the_same_order() {
    let of = |name: &str| {
        let files = files(&format!("lockkit/src/sql/{name}"), ".rs");
        files.iter().map(|(file, source)| (file.clone(), operations(source))).collect::<Vec<_>>()
    };
    let postgres = of("postgres");
    let has_acquire = |it: &(String, Vec<String>)| it.1.contains(&"LeaseStatements::lease_acquire".to_owned());
    assert!(postgres.iter().any(has_acquire), "{postgres:?}");
    let without = |files: &[&str]| {
        postgres.iter().filter(|(file, _)| !files.contains(&file.as_str())).cloned().collect::<Vec<_>>()
    };
    // Only PostgreSQL notifies, has poolers that lose statements, and has imitators that pretend to lock names. Only
    // MariaDB and MySQL may be nodes of a cluster and have grammars of their own, and SQLite has no sessions that could
    // hold a lock.
    let mysql: Vec<_> =
        of("mysql").into_iter().filter(|(file, _)| !["server.rs", "text.rs"].contains(&file.as_str())).collect();
    assert_eq!(mysql, without(&["feigned.rs", "listen.rs", "pooler.rs"]));
    assert_eq!(of("sqlite"), without(&["feigned.rs", "listen.rs", "pooler.rs", "session.rs"]));
}

/// Comments that only one of MySQL and MariaDB skips.
fn version_comments(source: &str) -> usize {
    code(source).iter().filter(|it| it.is_text() && (it.text.contains("/*!") || it.text.contains("/*M!"))).count()
}

#[test]
fn one_file_has_the_version_comments() {
    for (file, source) in files("lockkit/src/sql", ".rs") {
        assert_eq!(version_comments(&source) > 0, file == "mysql/text.rs", "{file}");
    }
}

#[test]
fn the_check_sees_planted_version_comments() {
    assert_eq!(
        version_comments("fn f() { g(\"/*M! a */ b\"); h(\"/*!80000 a */\", \"/*+ hint */\") } // /*M! c */"),
        2
    );
}

#[test]
fn the_check_sees_a_planted_operation_out_of_order() {
    let both = "impl LeaseOps for A { async fn get() { if x {} } fn set() {} } fn free() {}";
    assert_eq!(operations(both), ["LeaseOps::get", "LeaseOps::set"]);
    assert_ne!(operations("impl LeaseOps for B { fn set() {} fn get() {} }"), operations(both));
}
