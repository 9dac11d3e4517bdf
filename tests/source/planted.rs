//! `sim/planted`: each bug can be planted in the code as it is, and the README of the simulation has them all.

use std::collections::BTreeSet;
use std::process::Command;

use crate::tree;

const FOLDER: &str = "sim/planted";

/// The bugs of the tables in the section on them.
fn tables(readme: &str) -> BTreeSet<&str> {
    let section = readme.split("\n## ").find(|it| it.starts_with("Planted bugs\n")).expect("a section on planted bugs");
    let rows = section.lines().filter(|it| it.starts_with('|') && !it.starts_with("|---"));
    rows.filter_map(|it| it.split('|').nth(1)).map(str::trim).filter(|it| *it != "bug").collect()
}

#[test]
fn the_simulation_tells_of_each_planted_bug() {
    let (patches, readme) = (tree::files(FOLDER, ".patch"), tree::text("sim/README.md"));
    let planted: BTreeSet<_> = patches.iter().filter_map(|(_, text)| text.lines().next()).collect();
    assert_eq!(planted, tables(&readme));
}

#[test]
fn each_planted_bug_fits_the_code() {
    for (file, _) in tree::files(FOLDER, ".patch") {
        let patch = format!("{FOLDER}/{file}");
        let checked = Command::new("git").args(["apply", "--check", &patch]).current_dir(tree::path("")).output();
        let checked = checked.expect("git runs");
        assert!(checked.status.success(), "plant it again: {}", String::from_utf8_lossy(&checked.stderr));
    }
}
