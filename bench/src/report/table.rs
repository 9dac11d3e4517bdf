//! The lines as Markdown.

use crate::lines::{Line, Spread};
use crate::scenarios::Scenario;
use crate::servers::Kind;

/// How to read the tables.
pub(crate) const READING: &str = "\
Each line is the median of its rounds, in which the contenders took turns. *Ratio*: its rate by that of the first line
in the same round, as median and (least to greatest). *Wait*: from the request to the grant; for transactions, counters
and versions the whole operation. *Statements*: counted by the server, all sessions together; on PostgreSQL
transactions. *CPU*: of the client processes. *Share*: of the process that did least, and of the one that did most.
";

/// A section for each scenario and database.
pub(crate) fn sections(lines: &[Line]) -> String {
    let mut text = String::new();
    for lines in lines.chunk_by(|one, other| group(one) == group(other)) {
        let (scenario, database) = group(&lines[0]);
        text.extend(["\n## ", &scenario.name(), " on ", database.name(), "\n\n", &of(lines)]);
    }
    text
}

fn group(line: &Line) -> (Scenario, Kind) {
    (line.setting.scenario, line.setting.database)
}

/// One table.
pub(crate) fn of(lines: &[Line]) -> String {
    let mut rows = vec![
        [
            "tasks",
            "contender",
            "per second",
            "ratio",
            "p50 ms",
            "p99 ms",
            "max ms",
            "statements",
            "CPU µs",
            "attempts",
            "share",
        ]
        .map(ToOwned::to_owned)
        .to_vec(),
    ];
    rows.extend(lines.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            // Numbers to the right.
            let cell = if column < 2 { format!("| {cell:width$} ") } else { format!("| {cell:>width$} ") };
            text.push_str(&cell);
        }
        text.push_str("|\n");
        if number == 0 {
            for (column, width) in widths.iter().enumerate() {
                let end = if column < 2 { "-" } else { ":" };
                text.extend(["|", &"-".repeat(width + 1), end]);
            }
            text.push_str("|\n");
        }
    }
    text
}

fn row(line: &Line) -> Vec<String> {
    let setting = line.setting;
    let mut tasks = if setting.processes == 1 {
        setting.tasks.to_string()
    } else {
        format!("{} × {}", setting.processes, setting.tasks / setting.processes)
    };
    if setting.scenario.keys().is_none() && setting.keys > 0 {
        tasks.extend([", ", &setting.keys.to_string(), " keys"]);
    }
    if setting.hold_ms > 0 {
        tasks.extend([", ", &setting.hold_ms.to_string(), " ms"]);
    }
    if setting.rows > 0 {
        tasks.extend([", ", &digits(f64::from(setting.rows)), " rows"]);
    }
    if let Some(reason) = &line.skipped {
        let mut row = vec![tasks, line.contender.clone(), reason.clone()];
        row.resize(11, String::new());
        return row;
    }
    let optional = |number: Option<f64>| number.map_or_else(|| "–".to_owned(), digits);
    let ratio = |Spread { least, median, greatest }: Spread| {
        format!("{} ({} to {})", digits(median), digits(least), digits(greatest))
    };
    let share = if setting.processes > 1 {
        let percent = |number: Option<f64>| format!("{:.0}", number.unwrap_or_default() * 100.0);
        let least = percent(line.median_of(|it| Some(it.least_share)));
        format!("{least} to {} %", percent(line.median_of(|it| Some(it.greatest_share))))
    } else {
        "–".to_owned()
    };
    vec![
        tasks,
        line.contender.clone(),
        optional(line.spread(|it| it.rate).map(|it| it.median)),
        line.ratio().map_or_else(|| if line.is_baseline { "1".to_owned() } else { "–".to_owned() }, ratio),
        optional(line.median_of(|it| Some(it.p50_ms))),
        optional(line.median_of(|it| Some(it.p99_ms))),
        optional(line.median_of(|it| Some(it.max_ms))),
        optional(line.median_of(|it| it.statements)),
        optional(line.median_of(|it| Some(it.cpu_us))),
        optional(line.median_of(|it| it.attempts)),
        share,
    ]
}

/// Three digits that count, and thousands apart.
fn digits(number: f64) -> String {
    match number {
        it if it >= 100.0 => {
            let digits = format!("{it:.0}");
            let mut text = String::new();
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at) % 3 == 0 {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        }
        it if it >= 10.0 => format!("{it:.1}"),
        it => format!("{it:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_that_count() {
        assert_eq!(digits(1_234_567.8), "1,234,568");
        assert_eq!(digits(123.4), "123");
        assert_eq!(digits(12.34), "12.3");
        assert_eq!(digits(1.234), "1.23");
        assert_eq!(digits(0.0), "0.00");
    }
}
