//! What came of a run: one table for people, JSON for machines, a timeline for each database, and the verdict.

mod timeline;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::clock::SECOND;
use crate::lane::Lane;
use crate::oracle::{Violation, longest_take_over, longest_without_a_grant, seconds_to_recover, shares};
use crate::probes::Found;

use self::timeline::Panel;

#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
    /// The databases whose controls showed no violation: their rows prove nothing.
    void: Vec<String>,
}

/// A lane or a probe on one database.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    database: String,
    fault: String,
    seconds: f64,
    acquisitions: usize,
    committed: usize,
    violations: Vec<Violation>,
    /// In seconds, from a holder's death to the next grant of its key.
    longest_take_over: Option<f64>,
    /// In seconds, from the heal to the last process's next commit.
    recovered_after: Option<f64>,
    /// In seconds, in which no worker was granted any lease.
    longest_without_a_grant: Option<f64>,
    /// The smallest and largest share of a worker that lived as long as the lane.
    shares: Option<(f64, f64)>,
    /// Violations of the controls: no lock, and a commit beside the lease. `None` for a probe.
    controls: Option<(usize, usize)>,
    /// How the operations were answered.
    answers: BTreeMap<String, usize>,
    left_out: Option<String>,
    /// Why it could not be run to its end.
    broken: Option<String>,
    #[serde(skip)]
    panel: Option<Panel>,
}

impl Row {
    pub(crate) fn of(lane: &Lane) -> Self {
        // Those that lived as long as the lane.
        let from_the_begin = |it: &crate::crew::Life| it.killed.is_none() && it.began < lane.began + 2 * SECOND;
        let lasting: Vec<_> = lane.history.lives.iter().filter(|(_, it)| from_the_begin(it)).collect();
        let shares = shares(&lane.history);
        let shares = lasting.iter().filter_map(|(id, _)| shares.get(id).copied());
        let (smallest, largest) = shares.fold((1.0, 0.0), |(low, high), it| (f64::min(low, it), f64::max(high, it)));
        Self {
            database: lane.database.into(),
            fault: lane.fault.name(),
            seconds: lane.seconds(),
            acquisitions: lane.acquisitions(),
            committed: lane.committed(),
            violations: lane.violations.clone(),
            longest_take_over: longest_take_over(&lane.history),
            recovered_after: seconds_to_recover(&lane.history),
            longest_without_a_grant: longest_without_a_grant(&lane.history),
            shares: (lasting.len() > 1).then_some((smallest, largest)),
            controls: Some(lane.controls),
            answers: lane.answers(),
            panel: Some(Panel::of(lane)),
            ..Self::default()
        }
    }

    pub(crate) fn left_out(database: &str, fault: &str, reason: &str) -> Self {
        let (database, fault) = (database.into(), fault.into());
        Self { database, fault, left_out: Some(reason.into()), ..Self::default() }
    }

    pub(crate) fn probe(database: &str, found: Found) -> Self {
        let Found { probe, seconds, broken } = found;
        let violation = |text| Violation { oracle: "probe", kind: probe, text, at: 0, excused: None };
        Self {
            database: database.into(),
            fault: format!("probe: {probe}"),
            seconds,
            violations: broken.map(violation).into_iter().collect(),
            ..Self::default()
        }
    }

    pub(crate) fn broken(database: &str, fault: &str, reason: &str) -> Self {
        let (database, fault) = (database.into(), fault.into());
        Self { database, fault, broken: Some(reason.into()), ..Self::default() }
    }

    /// How often each oracle was violated, and how often that is excused.
    fn verdict(&self) -> String {
        if let Some(reason) = &self.broken {
            return format!("**could not run**: {}", reason.lines().next().unwrap_or_default());
        }
        let count = |counts: bool| {
            let mut found: BTreeMap<(&str, &str), usize> = BTreeMap::new();
            for violation in self.violations.iter().filter(|it| it.counts() == counts) {
                *found.entry((violation.oracle, violation.kind)).or_default() += 1;
            }
            let text = |((oracle, kind), times)| format!("{times} × {oracle} ({kind})");
            found.into_iter().map(text).collect::<Vec<_>>().join(", ")
        };
        if let ([violation], None) = (&*self.violations, self.controls) {
            return format!("**{}**", violation.text);
        }
        let (counted, excused) = (count(true), count(false));
        let mut text = if counted.is_empty() { "0".to_owned() } else { format!("**{counted}**") };
        if !excused.is_empty() {
            write!(text, "; excused: {excused}").unwrap_or_default();
        }
        text
    }

    fn is_violated(&self) -> bool {
        self.broken.is_some() || self.violations.iter().any(Violation::counts)
    }
}

impl Report {
    /// Prints the table, writes the files, and says whether all is well.
    pub(crate) fn finish(mut self, folder: &Path) -> Result<ExitCode> {
        self.void = self.without_controls();
        let table = self.table();
        println!("{table}");
        fs::write(folder.join("table.md"), &table)?;
        serde_json::to_writer_pretty(File::create(folder.join("report.json"))?, &self)?;
        for (database, panels) in self.panels() {
            let file = folder.join(format!("timeline-{}.svg", database.to_lowercase().replace(' ', "-")));
            fs::write(file, timeline::svg(&database, &panels))?;
        }
        println!("Timelines and report.json are in {}.", folder.display());
        if !self.void.is_empty() {
            println!("VOID on {}: a control showed no violation, so the run proves nothing.", self.void.join(", "));
            return Ok(ExitCode::from(2));
        }
        let violated: Vec<_> = self.rows.iter().filter(|it| it.is_violated()).collect();
        if violated.is_empty() {
            println!("No violation.");
            return Ok(ExitCode::SUCCESS);
        }
        println!("VIOLATED in {} rows:", violated.len());
        for row in violated {
            println!("- {} on {}: {}", row.fault, row.database, row.verdict());
            for violation in row.violations.iter().filter(|it| it.counts()).take(3) {
                println!("  {}: {}", violation.oracle, violation.text);
            }
        }
        Ok(ExitCode::FAILURE)
    }

    /// The databases on which the lanes' controls never failed.
    fn without_controls(&self) -> Vec<String> {
        let mut databases: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
        for row in self.rows.iter().filter(|it| it.controls.is_some()) {
            databases.entry(&row.database).or_default().push(row);
        }
        let void = databases.into_iter().filter(|(_, rows)| lacks_controls(rows.iter().copied()));
        void.map(|(database, _)| database.to_owned()).collect()
    }

    fn table(&self) -> String {
        let mut table = String::from(
            "| fault | database | seconds | acquisitions | committed | violations | longest take-over | recovered \
             after | longest without a grant \
             | shares of the lease | controls: no lock, plain commit |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in self.rows.iter().filter(|it| it.left_out.is_none()) {
            let seconds = |it: Option<f64>| it.map(|it| format!("{it:.2} s")).unwrap_or_default();
            let shares = row.shares.map(|(low, high)| format!("{:.0}–{:.0} %", low * 100.0, high * 100.0));
            let controls = row.controls.map(|(no_lock, plain)| format!("{no_lock}, {plain}"));
            writeln!(
                table,
                "| {} | {} | {:.1} | {} | {} | {} | {} | {} | {} | {} | {} |",
                row.fault,
                row.database,
                row.seconds,
                row.acquisitions,
                row.committed,
                row.verdict(),
                seconds(row.longest_take_over),
                seconds(row.recovered_after),
                seconds(row.longest_without_a_grant),
                shares.unwrap_or_default(),
                controls.unwrap_or_default()
            )
            .unwrap_or_default();
        }
        let mut left_out: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
        for row in &self.rows {
            if let Some(reason) = &row.left_out {
                left_out.entry((&row.database, reason)).or_default().push(&row.fault);
            }
        }
        for ((database, reason), faults) in left_out {
            writeln!(table, "\nLeft out on {database} ({reason}): {}.", faults.join(", ")).unwrap_or_default();
        }
        table
    }

    fn panels(&self) -> BTreeMap<String, Vec<&Panel>> {
        let mut panels: BTreeMap<String, Vec<&Panel>> = BTreeMap::new();
        for row in &self.rows {
            if let Some(panel) = &row.panel {
                panels.entry(row.database.clone()).or_default().push(panel);
            }
        }
        panels
    }
}

/// Whether one of the two controls was never violated in the lanes of a database.
pub(crate) fn lacks_controls<'a>(rows: impl IntoIterator<Item = &'a Row>) -> bool {
    let controls = rows.into_iter().filter_map(|it| it.controls);
    let (no_lock, plain) = controls.fold((0, 0), |all, it| (all.0 + it.0, all.1 + it.1));
    no_lock == 0 || plain == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(controls: (usize, usize)) -> Row {
        Row { database: "PostgreSQL".into(), controls: Some(controls), ..Row::default() }
    }

    #[test]
    fn a_run_whose_control_is_never_violated_is_void() {
        let void = |rows| Report { rows, ..Report::default() }.without_controls();
        assert_eq!(void(vec![row((3, 0)), row((0, 1))]), [""; 0]);
        assert_eq!(void(vec![row((3, 0)), row((3, 0))]), ["PostgreSQL"]);
        assert_eq!(void(vec![row((0, 3))]), ["PostgreSQL"]);
    }

    #[test]
    fn an_excused_violation_does_not_count() {
        let violation = Violation { oracle: "x", kind: "lease", text: String::new(), at: 0, excused: Some("because") };
        let mut row = Row { violations: vec![violation], ..row((1, 1)) };
        assert!(!row.is_violated());
        row.violations[0].excused = None;
        assert!(row.is_violated());
        assert_eq!(row.verdict(), "**1 × x (lease)**");
    }
}
