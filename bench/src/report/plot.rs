//! The lines as plots: rate and p99 against what was varied, and ratios as bars.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as StdError;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::combinators::IntoLogRange;
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::prelude::{IntoDrawingArea, SVGBackend};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, IntoFont, RGBColor, WHITE};

use crate::lines::{Line, Setting};
use crate::sample::Sample;
use crate::scenarios::Scenario;
use crate::servers::Kind;

const COLORS: [RGBColor; 6] = [
    RGBColor(120, 130, 145),
    RGBColor(235, 150, 40),
    RGBColor(60, 105, 180),
    RGBColor(46, 125, 90),
    RGBColor(200, 55, 45),
    RGBColor(130, 80, 160),
];

/// A number of a sample.
type Number = fn(&Sample) -> f64;

/// The points of one contender.
type Points = Vec<(f64, f64)>;

/// Draws what there is, and returns the title and the name of each file.
pub(crate) fn all(out: &Path, lines: &[Line]) -> Result<Vec<(String, String)>> {
    let mut plots = Vec::new();
    for lines in lines.chunk_by(|one, other| group(one) == group(other)) {
        let (scenario, database) = group(&lines[0]);
        let of = format!("{} on {}", scenario.name(), database.name());
        for axis in [Axis::Tasks, Axis::Processes, Axis::Keys, Axis::Rows] {
            let lines = axis.lines(lines);
            if axis.values(&lines) < 3 {
                continue;
            }
            let kinds: [(_, _, _, Number); 2] = [
                ("rate", "operations per second", "per second", |it| it.rate),
                ("p99", "p99 of the wait", "milliseconds", |it| it.p99_ms),
            ];
            for (kind, what, unit, number) in kinds {
                let title = format!("{of}: {what}");
                let name = format!("{kind}-{}-{}{}.svg", scenario.name(), database.name().to_lowercase(), axis.file());
                let median = |line: &Line| line.spread(number).map(|it| it.median);
                let path = out.join(&name);
                checked(&path, curves(&path, &title, axis, unit, &points(&lines, axis, median)))?;
                plots.push((title, name));
            }
        }
    }
    for scenario in [Scenario::Uncontended, Scenario::HotRow] {
        let lines: Vec<_> = lines.iter().filter(|it| it.setting.scenario == scenario).collect();
        let bars: Vec<_> =
            lines.iter().filter_map(|it| Some((it.contender.clone(), it.spread(|it| it.rate)?.median))).collect();
        if !bars.is_empty() {
            let (title, name) =
                (format!("{}: operations per second", scenario.name()), format!("{}.svg", scenario.name()));
            checked(&out.join(&name), rates(&out.join(&name), &title, &bars))?;
            plots.push((title, name));
        }
    }
    let ratios: Vec<_> = lines.iter().filter_map(bar).collect();
    if !ratios.is_empty() {
        let (title, name) = ("lockkit by the floor".to_owned(), "ratios.svg".to_owned());
        checked(&out.join(&name), rates(&out.join(&name), &title, &ratios))?;
        plots.push((title, name));
    }
    Ok(plots)
}

fn checked(path: &Path, drawn: Result<(), Box<dyn StdError>>) -> Result<()> {
    drawn.map_err(|err| anyhow!("cannot draw {}: {err}", path.display()))
}

fn group(line: &Line) -> (Scenario, Kind) {
    (line.setting.scenario, line.setting.database)
}

/// What a curve is drawn against.
#[derive(Debug, Clone, Copy)]
enum Axis {
    Tasks,
    Processes,
    Keys,
    Rows,
}

impl Axis {
    fn of(self, setting: &mut Setting) -> &mut u32 {
        match self {
            Self::Tasks => &mut setting.tasks,
            Self::Processes => &mut setting.processes,
            Self::Keys => &mut setting.keys,
            Self::Rows => &mut setting.rows,
        }
    }

    fn value(self, mut setting: Setting) -> u32 {
        *self.of(&mut setting)
    }

    /// The setting without this number.
    fn rest(self, mut setting: Setting) -> Setting {
        *self.of(&mut setting) = 0;
        setting
    }

    /// The most lines that differ in this number and in contender alone.
    fn lines(self, lines: &[Line]) -> Vec<&Line> {
        let with_value = || lines.iter().filter(|it| self.value(it.setting) > 0);
        let alike = |first: &Line| -> Vec<_> {
            with_value().filter(|it| self.rest(it.setting) == self.rest(first.setting)).collect()
        };
        with_value().map(alike).max_by_key(|it| self.values(it)).unwrap_or_default()
    }

    /// How many values the lines have.
    fn values(self, lines: &[&Line]) -> usize {
        lines.iter().map(|it| self.value(it.setting)).collect::<BTreeSet<_>>().len()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tasks => "tasks",
            Self::Processes => "processes",
            Self::Keys => "keys",
            Self::Rows => "rows",
        }
    }

    /// How the names of files end.
    fn file(self) -> String {
        match self {
            Self::Tasks => String::new(),
            axis => format!("-by-{}", axis.name()),
        }
    }
}

/// The ratio to the floor, where there is one: of lockkit, in one process, with the tasks that the scenario begins and
/// ends with.
fn bar(line: &Line) -> Option<(String, f64)> {
    let setting = line.setting;
    let has_floor = matches!(
        setting.scenario,
        Scenario::Lease | Scenario::Transaction | Scenario::RowLock | Scenario::Named | Scenario::Optimistic
    );
    if !has_floor || line.contender != "lockkit" || setting.processes > 1 {
        return None;
    }
    let name = format!("{}, {} tasks, {}", setting.scenario.name(), setting.tasks, setting.database.name());
    Some((name, line.ratio()?.median))
}

fn points(lines: &[&Line], axis: Axis, number: impl Fn(&Line) -> Option<f64>) -> Vec<(String, Points)> {
    let mut points: BTreeMap<&str, Points> = BTreeMap::new();
    for line in lines {
        if let Some(number) = number(line) {
            points.entry(&line.contender).or_default().push((f64::from(axis.value(line.setting)), number.max(0.001)));
        }
    }
    points.into_iter().map(|(name, points)| (format!("{name}, exponent {:.2}", exponent(&points)), points)).collect()
}

/// The slope of the line with the least squares through the logarithms: 0 for a number that stays, 1 for one that grows
/// in proportion.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let count = points.iter().map(|_| 1.0).sum::<f64>();
    let logs = || points.iter().map(|(x, y)| (x.ln(), y.ln()));
    let (x, y) = logs().fold((0.0, 0.0), |(x, y), it| (x + it.0 / count, y + it.1 / count));
    let (product, square) = logs()
        .fold((0.0, 0.0), |(product, square), it| (product + (it.0 - x) * (it.1 - y), square + (it.0 - x).powi(2)));
    if square > 0.0 { product / square } else { 0.0 }
}

/// One curve for each contender; both axes are logarithmic.
fn curves(path: &Path, title: &str, axis: Axis, unit: &str, all: &[(String, Points)]) -> Result<(), Box<dyn StdError>> {
    let root = SVGBackend::new(path, (860, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let numbers = || all.iter().flat_map(|(_, points)| points);
    let (right, top) = numbers().fold((2.0_f64, 0.01_f64), |(x, y), point| (x.max(point.0), y.max(point.1)));
    let (left, bottom) = numbers().fold((right, top), |(x, y), point| (x.min(point.0), y.min(point.1)));
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(84)
        .build_cartesian_2d((left..right * 1.1).log_scale(), (bottom / 2.0..top * 4.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(axis.name())
        .y_desc(unit)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| if *y >= 1.0 { format!("{y:.0}") } else { format!("{y}") })
        .light_line_style(WHITE)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    for (number, (name, points)) in all.iter().enumerate() {
        let color = COLORS[number % COLORS.len()];
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(3)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(3)));
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    Ok(())
}

/// One horizontal bar for each name.
fn rates(path: &Path, title: &str, bars: &[(String, f64)]) -> Result<(), Box<dyn StdError>> {
    let height = 70 + 26 * u32::try_from(bars.len())?;
    let root = SVGBackend::new(path, (860, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let right = bars.iter().map(|it| it.1).fold(0.01, f64::max) * 1.15;
    let count = f64::from(u32::try_from(bars.len())?);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 22))
        .margin(14)
        .build_cartesian_2d(-right * 0.45..right, 0.0..count)?;
    let left = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
    let after = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let mut middle = count - 0.5;
    for (name, value) in bars {
        let color = if name.contains("lockkit") { COLORS[3] } else { COLORS[2] };
        chart.draw_series([Rectangle::new([(0.0, middle - 0.38), (*value, middle + 0.38)], color.filled())])?;
        chart.draw_series([Text::new(name.clone(), (-right * 0.01, middle), left.clone())])?;
        let label = if *value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
        chart.draw_series([Text::new(label, (*value + right * 0.01, middle), after.clone())])?;
        middle -= 1.0;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponent_is_that_of_the_power() {
        let square: Points = [1.0, 10.0, 100.0].map(|x: f64| (x, 3.0 * x.powi(2))).to_vec();
        assert!((exponent(&square) - 2.0).abs() < 1e-9);
        assert!(exponent(&[(1.0, 5.0), (8.0, 5.0)]).abs() < 1e-9);
    }
}
