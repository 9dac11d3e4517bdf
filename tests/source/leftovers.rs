//! Leftovers in any file: unfinished work, and paths and hosts of one machine.

use crate::tree::{check, files};

/// Marks of unfinished work, absolute paths and addresses of registries.
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

#[test]
fn nothing_is_unfinished_and_no_file_knows_somebodys_machine() {
    let mut files = files("", "");
    files.retain(|(path, _)| !path.ends_with("Cargo.lock") && path != "tests/source/leftovers.rs");
    check(&files, leftovers);
}

#[test]
fn the_check_sees_planted_leftovers() {
    let complaints = |text: &str| leftovers("README.md", text).len();

    assert_eq!(complaints("// TODO: later\nlet x = todo!();\ndbg!(x);"), 3);
    assert_eq!(complaints("cd /home/ann/lockkit\nsource = \"/tmp/x\"\nC:\\Users\\ann"), 3);
    assert_eq!(complaints("source = \"sparse+https://example.com\""), 1);
    assert_eq!(complaints("target/tmp/x, ~/work/x, https://crates.io/crates/lockkit"), 0);
}
