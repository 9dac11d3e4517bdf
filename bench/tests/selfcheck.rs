//! The oracles see the bugs that the program plants for them.

use std::process::Command;

#[test]
fn each_oracle_sees_its_planted_bug() {
    let checked = Command::new(env!("CARGO_BIN_EXE_bench")).arg("selfcheck").output().unwrap();
    let seen = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.status.success(), "{seen}{}", String::from_utf8_lossy(&checked.stderr));
    assert!(seen.contains("SameFence") && seen.contains("Oversold"), "{seen}");
}
