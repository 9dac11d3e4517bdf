//! The samples as rows of a CSV file, and back.

use std::path::Path;

use anyhow::{Context, Error, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::lines::{Line, Setting};
use crate::sample::Sample;
use crate::scenarios::Scenario;
use crate::servers::Kind;

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    scenario: String,
    database: String,
    tasks: u32,
    processes: u32,
    keys: u32,
    hold_ms: u64,
    rows: u32,
    contender: String,
    round: usize,
    rate: f64,
    ratio: Option<f64>,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    statements: Option<f64>,
    cpu_us: f64,
    attempts: Option<f64>,
    least_share: f64,
    greatest_share: f64,
    refused: u64,
    violations: String,
}

impl Row {
    fn of(line: &Line, round: usize, sample: &Sample) -> Self {
        let setting = line.setting;
        Self {
            scenario: setting.scenario.name(),
            database: setting.database.name().to_owned(),
            tasks: setting.tasks,
            processes: setting.processes,
            keys: setting.keys,
            hold_ms: setting.hold_ms,
            rows: setting.rows,
            contender: line.contender.clone(),
            round,
            rate: sample.rate,
            ratio: line.ratios.get(round).copied(),
            p50_ms: sample.p50_ms,
            p99_ms: sample.p99_ms,
            max_ms: sample.max_ms,
            statements: sample.statements,
            cpu_us: sample.cpu_us,
            attempts: sample.attempts,
            least_share: sample.least_share,
            greatest_share: sample.greatest_share,
            refused: sample.refused,
            violations: sample.violations.join("; "),
        }
    }

    fn setting(&self) -> Result<Setting> {
        let database = Kind::value_variants().iter().find(|it| it.name() == self.database);
        Ok(Setting {
            scenario: Scenario::from_str(&self.scenario, false).map_err(Error::msg)?,
            database: *database.with_context(|| format!("{} is no database", self.database))?,
            tasks: self.tasks,
            processes: self.processes,
            keys: self.keys,
            hold_ms: self.hold_ms,
            rows: self.rows,
        })
    }

    fn sample(self) -> Sample {
        Sample {
            // Not in the file, and not drawn.
            operations: 0,
            rate: self.rate,
            p50_ms: self.p50_ms,
            p99_ms: self.p99_ms,
            max_ms: self.max_ms,
            statements: self.statements,
            cpu_us: self.cpu_us,
            attempts: self.attempts,
            least_share: self.least_share,
            greatest_share: self.greatest_share,
            refused: self.refused,
            violations: self.violations.split("; ").filter(|it| !it.is_empty()).map(str::to_owned).collect(),
        }
    }
}

/// One row for each sample.
pub(super) fn write(path: &Path, lines: &[Line]) -> Result<()> {
    let mut csv = csv::Writer::from_path(path)?;
    for line in lines {
        for (round, sample) in line.samples.iter().enumerate() {
            csv.serialize(Row::of(line, round, sample))?;
        }
    }
    Ok(csv.flush()?)
}

/// The lines of a file, without what it does not have: contenders that were skipped, and system calls.
pub(super) fn read(path: &Path) -> Result<Vec<Line>> {
    let mut lines: Vec<Line> = Vec::new();
    let rows = csv::Reader::from_path(path).with_context(|| path.display().to_string())?;
    for row in rows.into_deserialize::<Row>() {
        let row = row.with_context(|| path.display().to_string())?;
        let setting = row.setting()?;
        let is_first = lines.last().is_none_or(|it| it.setting != setting);
        if is_first || lines.last().is_some_and(|it| it.contender != row.contender) {
            lines.push(Line::new(setting, &row.contender, is_first));
        }
        if let Some(line) = lines.last_mut() {
            line.ratios.extend(row.ratio);
            line.samples.push(row.sample());
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let setting = Setting {
            scenario: Scenario::HotLease,
            database: Kind::Sqlite,
            tasks: 16,
            processes: 4,
            keys: 1,
            hold_ms: 0,
            rows: 0,
        };
        let sample = Sample {
            operations: 7,
            rate: 2.5,
            p50_ms: 0.1,
            p99_ms: 0.2,
            max_ms: 0.3,
            statements: None,
            cpu_us: 4.0,
            attempts: Some(1.0),
            least_share: 0.25,
            greatest_share: 0.5,
            refused: 1,
            violations: vec!["one".to_owned(), "two".to_owned()],
        };
        let mut lines = [Line::new(setting, "polling", true), Line::new(setting, "lockkit", false)];
        for line in &mut lines {
            line.samples.extend([sample.clone(), sample.clone()]);
        }
        lines[1].ratios = vec![2.0, 3.0];
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("results.csv");
        write(&path, &lines).expect("written");
        let read = read(&path).expect("read");
        for line in lines.iter_mut().flat_map(|it| &mut it.samples) {
            line.operations = 0;
        }
        assert_eq!(format!("{read:?}"), format!("{:?}", lines.to_vec()));
    }
}
