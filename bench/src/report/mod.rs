//! The result: a Markdown table, CSV and plots.

mod header;
mod plot;
mod table;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

pub(crate) use self::header::Header;
use crate::lines::Line;
use crate::strace;

/// Prints the lines of one setting.
pub(crate) fn print(lines: &[Line]) {
    println!("{}", table::of(lines));
    let calls: Vec<_> = lines.iter().filter_map(|it| Some((it.contender.as_str(), it.calls.as_ref()?))).collect();
    if !calls.is_empty() {
        println!("{}", strace::table(&calls));
    }
}

/// Writes all forms into a folder.
pub(crate) fn write(out: &Path, header: &Header, lines: &[Line]) -> Result<()> {
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let plots = plot::all(out, lines)?;
    let mut text = format!("# Results\n\n{}\n{}\n", header.markdown(), table::READING);
    text.push_str(&table::sections(lines));
    if !plots.is_empty() {
        text.push_str("\n## Plots\n");
    }
    for (title, file) in &plots {
        text.extend(["\n![", title, "](", file, ")\n"]);
    }
    fs::write(out.join("results.md"), text)?;
    write_csv(&out.join("results.csv"), lines)
}

/// One row for each sample.
fn write_csv(path: &Path, lines: &[Line]) -> Result<()> {
    let mut csv = csv::Writer::from_path(path)?;
    csv.write_record([
        "scenario",
        "database",
        "tasks",
        "processes",
        "keys",
        "hold_ms",
        "rows",
        "contender",
        "round",
        "rate",
        "ratio",
        "p50_ms",
        "p99_ms",
        "max_ms",
        "statements",
        "cpu_us",
        "attempts",
        "least_share",
        "greatest_share",
        "refused",
        "violations",
    ])?;
    let optional = |number: Option<f64>| number.map(|it| it.to_string()).unwrap_or_default();
    for line in lines {
        let setting = line.setting;
        for (round, sample) in line.samples.iter().enumerate() {
            csv.write_record([
                setting.scenario.name(),
                setting.database.name().to_owned(),
                setting.tasks.to_string(),
                setting.processes.to_string(),
                setting.keys.to_string(),
                setting.hold_ms.to_string(),
                setting.rows.to_string(),
                line.contender.clone(),
                round.to_string(),
                sample.rate.to_string(),
                optional(line.ratios.get(round).copied()),
                sample.p50_ms.to_string(),
                sample.p99_ms.to_string(),
                sample.max_ms.to_string(),
                optional(sample.statements),
                sample.cpu_us.to_string(),
                optional(sample.attempts),
                sample.least_share.to_string(),
                sample.greatest_share.to_string(),
                sample.refused.to_string(),
                sample.violations.join("; "),
            ])?;
        }
    }
    Ok(csv.flush()?)
}
