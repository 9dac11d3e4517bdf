//! The rack says what it can do.

use std::process::Command;

#[test]
fn both_forms_are_offered_and_the_workers_are_not() {
    let help = Command::new(env!("CARGO_BIN_EXE_lockkit-torture")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(["quick", "long"].iter().all(|it| help.contains(it)) && !help.contains("worker  "), "{help}");
}
