//! The demo as a program: its exit code, and what it says of a database that it was built without.

use std::process::{Command, Output};

fn flash_sale(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flash_sale")).args(arguments).output().unwrap()
}

#[test]
fn every_lock_sells_exactly_what_there_is() {
    let run = flash_sale(&["--processes", "2", "--tasks", "2", "--draws", "60", "--stock", "2", "--items", "3"]);
    let table = String::from_utf8(run.stdout).unwrap();
    assert!(run.status.success(), "{table}");
    assert!(["row", "named", "lease", "version", "stock"].iter().all(|it| table.contains(it)), "{table}");
}

#[cfg(not(feature = "postgres"))]
#[test]
fn a_database_without_its_feature_names_the_feature() {
    let run = flash_sale(&["--database", "postgres://localhost/shop"]);
    let errors = String::from_utf8(run.stderr).unwrap();
    assert!(!run.status.success() && errors.contains("--features postgres"), "{errors}");
}
