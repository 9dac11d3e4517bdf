//! The program, as a reader runs it.

use std::process::{Command, Output};

fn museum(argument: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_museum")).arg(argument).output().expect("the program runs")
}

#[test]
fn all_exhibits_show_what_they_should() {
    let output = museum("all");
    let (shown, failures) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{failures}");
    assert!(shown.contains("19 of 19 show what they should"), "{shown}");
    assert!(!shown.contains('\x1b'), "colours are for terminals");
}

#[test]
fn one_exhibit_is_shown_by_its_number_and_others_are_refused() {
    let shown = museum("5").stdout;
    assert!(String::from_utf8_lossy(&shown).contains("A and C are inside"));
    for wrong in ["0", "20", "five"] {
        assert!(!museum(wrong).status.success(), "there is no exhibit {wrong}");
    }
}
