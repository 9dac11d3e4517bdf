//! The result: a Markdown table, CSV and plots.

mod header;
mod plot;
mod rows;
mod table;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

pub(crate) use self::header::Header;
use crate::lines::Line;
use crate::strace;

/// The file of the samples, in a folder of results.
const ROWS: &str = "results.csv";

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
    rows::write(&out.join(ROWS), lines)
}

/// Draws the plots of a folder again, from its samples. Their names and titles are in its text, which stays.
pub(crate) fn draw(out: &Path) -> Result<()> {
    plot::all(out, &rows::read(&out.join(ROWS))?).map(drop)
}
