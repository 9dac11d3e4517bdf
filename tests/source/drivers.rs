//! SQL and the names of drivers: only the folder of a database has them.

use crate::code::{Token, code};
use crate::tree::{check, files};

/// Whether this is a text with SQL in it.
fn is_sql(token: &Token) -> bool {
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

    let mut words = token.text.split(|it: char| !it.is_alphanumeric() && it != '_');
    token.is_text() && words.any(|it| WORDS.contains(&it))
}

/// SQL, drivers and what only they need.
fn sql_and_drivers(file: &str, source: &str) -> Vec<String> {
    const NAMES: [&str; 8] =
        ["AssertSqlSafe", "SqlStr", "mysql", "postgres", "query_as", "query_scalar", "raw_sql", "sqlite"];

    let tokens = code(source);
    let is_driver = |name: &str| {
        let pg = name.strip_prefix("Pg").is_some_and(|it| it.starts_with(char::is_uppercase));
        pg || ["Postgres", "MySql", "Sqlite"].iter().any(|it| name.starts_with(it))
    };
    let is_query = |at: usize| at > 2 && tokens[at].text.starts_with("query") && tokens[at - 3].text == "sqlx";
    // `mod mysql`, `self::mysql` and `super::mysql` are lockkit's own folder.
    let is_folder = |at: usize| {
        let before = |back: usize| at.checked_sub(back).map_or("", |it| tokens[it].text.as_str());
        before(1) == "mod" || before(1) == ":" && ["self", "super"].contains(&before(3))
    };
    let out_of_place = |at: usize, token: &Token| {
        is_sql(token)
            || token.is_name()
                && (NAMES.contains(&token.text.as_str()) && !is_folder(at) || is_driver(&token.text) || is_query(at))
    };
    let complaints = tokens.iter().enumerate().filter(|(at, token)| out_of_place(*at, token));
    complaints
        .map(|(_, it)| format!("{file}:{}: only the folder of a database may have `{}`", it.line, it.text))
        .collect()
}

fn is_of_a_database(path: &str) -> bool {
    ["sql/postgres/", "sql/mysql/", "sql/sqlite/"].iter().any(|it| path.starts_with(it))
}

#[test]
fn sql_and_driver_names_stay_in_the_folders_of_databases() {
    let mut files = files("lockkit/src", ".rs");
    // It has the clauses that are the same in every database.
    files.retain(|(path, _)| !is_of_a_database(path) && path != "sql/query.rs");
    check(&files, sql_and_drivers);
}

/// SQL alone: the command names the drivers, to open a pool of the database that the user wants.
fn sql(file: &str, source: &str) -> Vec<String> {
    let found = code(source).into_iter().filter(is_sql);
    found.map(|it| format!("{file}:{}: only the folder of a database may have `{}`", it.line, it.text)).collect()
}

#[test]
fn the_sql_for_operators_stays_in_the_folders_of_databases() {
    for (folder, expected) in [("cli/src", "explain/mod.rs"), ("inspect/src", "waits.rs"), ("web/src", "looks.rs")] {
        let mut files = files(folder, ".rs");
        files.retain(|(path, _)| !is_of_a_database(path));
        assert!(files.iter().any(|(path, _)| path == expected), "{folder} is there");
        check(&files, sql);
    }
}

#[test]
fn the_check_sees_planted_sql_and_drivers() {
    let complaints = |source: &str| sql_and_drivers("retry.rs", source).len();

    assert_eq!(complaints(r#"fn f() { g("SELECT 1"); g(r"DELETE FROM t"); g(b"x") }"#), 2);
    assert_eq!(sql("run.rs", r#"use sqlx::Sqlite; fn f() { g("SELECT 1"); g("select") }"#).len(), 1);
    assert_eq!(complaints(r#"const SQL: &str = concat!("UPDATE ", "t");"#), 1);
    assert_eq!(complaints("use sqlx::{PgConnection, Sqlite, postgres::PgRow};"), 4);
    assert_eq!(complaints("mod mysql; use super::postgres; fn f() { self::sqlite::g() }"), 0);
    assert_eq!(complaints("use sqlx::mysql; use crate::mysql; fn f() { mysql::g() }"), 3);
    assert_eq!(complaints("fn f() { sqlx::query(text) }"), 1);
    assert_eq!(
        complaints("// SELECT 1\n/// COMMIT\n#[cfg(feature = \"mysql\")] fn f(query: Query) { g(\"begin\") }"),
        0
    );
}

/// Names of sqlx where no database is known: in the wing of leases, and in what both wings stand on.
fn sqlx_in_the_wing_of_leases(file: &str, source: &str) -> Vec<String> {
    let names = code(source).into_iter().filter(|it| it.text.starts_with("sqlx") && it.is_name());
    names.map(|it| format!("{file}:{}: leases know no `{}`", it.line, it.text)).collect()
}

#[test]
fn leases_know_no_sql() {
    let mut files = files("lockkit/src", ".rs");
    files.retain(|(path, _)| {
        ["sql/", "macro_support/sql/", "testing/nothing_left.rs"].iter().all(|it| !path.starts_with(it))
    });
    assert!(files.iter().any(|(path, _)| path == "lease/held.rs"), "the wing of leases is there");
    check(&files, sqlx_in_the_wing_of_leases);
}

#[test]
fn the_check_sees_a_planted_use_of_sqlx_in_the_wing_of_leases() {
    let complaints = |source: &str| sqlx_in_the_wing_of_leases("lease/held.rs", source).len();

    assert_eq!(complaints("use sqlx::Pool; fn f(err: sqlx::Error) {}"), 2);
    assert_eq!(complaints("use sqlx_core::transaction::TransactionManager;"), 1);
    assert_eq!(
        complaints("/// A [`sqlx::Pool`].\nfn f() { g(\"sqlx\") } #[cfg(test)] mod tests { use sqlx::Pool; }"),
        0
    );
}
