//! The system calls of workers, counted by strace. A worker's start is among them, so a sample needs many operations.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::crew::Program;
use crate::sample::float;

/// A system call that is rarer is left out: it belongs to the start of a worker.
const SELDOM: f64 = 0.05;

/// How often each system call was made for one operation.
pub(crate) type Calls = BTreeMap<String, f64>;

/// The same program, whose system calls strace adds to the file when it ends.
pub(crate) fn traced(program: &Program, summary: &Path) -> Result<Program> {
    let summary = summary.to_str().context("a path in UTF-8")?;
    let strace = ["strace", "-f", "-c", "-U", "calls,name", "-A", "-o", summary].map(ToOwned::to_owned);
    Ok(Program { command: [&strace[..], &program.command].concat() })
}

/// Reads what strace wrote about so many operations.
pub(crate) fn calls(summary: &Path, operations: u64) -> Result<Calls> {
    let text = fs::read_to_string(summary).context("the summary of strace")?;
    let mut calls = Calls::new();
    for (count, name) in text.lines().filter_map(|it| it.trim().split_once(' ')) {
        if let Ok(count) = count.parse() {
            *calls.entry(name.trim().to_owned()).or_default() += float(count) / float(operations);
        }
    }
    Ok(calls)
}

/// A row for each system call, the most frequent first, with a column for each contender.
pub(crate) fn table(contenders: &[(&str, &Calls)]) -> String {
    let of = |calls: &Calls, name: &str| calls.get(name).copied().unwrap_or_default();
    let most = |name: &str| contenders.iter().map(|it| of(it.1, name)).fold(0.0, f64::max);
    let mut names: Vec<_> = contenders.iter().flat_map(|it| it.1.keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    names.retain(|it| most(it) >= SELDOM);
    names.sort_by(|one, other| most(other).total_cmp(&most(one)));
    let mut text = "| system calls |".to_owned();
    text.extend(contenders.iter().map(|it| format!(" {} |", it.0)));
    text.extend(["\n|---|", &"---:|".repeat(contenders.len()), "\n"]);
    for name in names {
        text.extend(["| ", name, " |"]);
        text.extend(contenders.iter().map(|it| format!(" {:.2} |", of(it.1, name))));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_processes_are_counted_by_operation_and_rare_ones_are_left_out() {
        let summary = tempfile::NamedTempFile::new().unwrap();
        let of_one = "    calls syscall\n--------- ----------------\n      200 sendto\n        3 mmap\n\
                      --------- ----------------\n      203 total\n";
        fs::write(summary.path(), of_one.repeat(2)).unwrap();
        let calls = calls(summary.path(), 200).unwrap();
        let text = table(&[("floor", &Calls::new()), ("lockkit", &calls)]);
        assert_eq!(
            text,
            "| system calls | floor | lockkit |\n|---|---:|---:|\n| total | 0.00 | 2.03 |\n| sendto | 0.00 | 2.00 |\n"
        );
    }
}
