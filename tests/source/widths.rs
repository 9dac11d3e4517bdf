//! How long a line may be, in code and in documents.

use crate::tree::files;

/// The most characters of a line.
const LINE: usize = 120;

/// The most characters of a row of a table, which cannot be broken.
const ROW: usize = 160;

/// The number of each line that is too long.
fn too_long(text: &str) -> Vec<usize> {
    let is_row = |line: &str| line.trim_start().trim_start_matches(['/', '!']).trim_start().starts_with("| ");
    let most = |line: &str| if is_row(line) { ROW } else { LINE };
    let lines = text.lines().enumerate();
    lines.filter(|(_, line)| line.chars().count() > most(line)).map(|(number, _)| number + 1).collect()
}

#[test]
fn no_line_is_too_long() {
    // The compiler's message in the `.stderr` beside this file quotes its line.
    let code = files("", ".rs").into_iter().filter(|(file, _)| file != "tests/macros/ui/hidden_operations.rs");
    // The results of benchmarks are written by a program.
    let documents = files("", ".md").into_iter().filter(|(file, _)| !file.starts_with("docs/benchmarks/"));
    let complaints: Vec<_> = code
        .chain(documents)
        .flat_map(|(file, text)| too_long(&text).into_iter().map(move |line| format!("{file}:{line}")))
        .collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn the_check_sees_planted_lines() {
    let (line, row) = ("x".repeat(121), format!("/// | {} |", "x".repeat(140)));
    assert_eq!(too_long(&format!("short\n{line}\n{row}\n")), [2]);
    assert_eq!(too_long(&format!("{row}{row}")), [1]);
}
