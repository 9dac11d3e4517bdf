//! The lines as plots: rate and p99 against what was varied, and ratios as bars.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as StdError;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::chart::ChartBuilder;
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::prelude::{IntoDrawingArea, SVGBackend};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, FontStyle, IntoFont, RGBColor, WHITE};

use crate::lines::{Line, Setting, Spread};
use crate::sample::Sample;
use crate::scenarios::{REUSE, Scenario};
use crate::servers::Kind;

/// Of `lockkit`, or of the table with many rows.
const STRONG: RGBColor = RGBColor(0, 125, 85);

/// Of lockkit in another form.
const RELATED: RGBColor = RGBColor(110, 180, 150);

/// Of what it is compared with.
const OTHERS: [RGBColor; 3] = [RGBColor(70, 75, 85), RGBColor(150, 155, 165), RGBColor(120, 95, 75)];

/// A plot is shown at half of this width in places.
const WIDTH: u32 = 720;

const TITLE: u32 = 25;
const LABEL: u32 = 20;

/// The width of a letter of a label, at most on average.
const LETTER: f64 = 10.2;

const MARGIN: u32 = 12;

/// A number of a sample.
type Number = fn(&Sample) -> f64;

/// The points of one contender.
type Points = Vec<(f64, f64)>;

/// A name, and the least, median and greatest number.
type Bar = (String, Spread);

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
            let kinds: [(_, _, Number); 2] =
                [("rate", "per second", |it| it.rate), ("p99", "p99 of the wait, milliseconds", |it| it.p99_ms)];
            for (kind, unit, number) in kinds {
                let name = format!("{kind}-{}-{}{}.svg", scenario.name(), database.name().to_lowercase(), axis.file());
                let median = |line: &Line| line.spread(number).map(|it| it.median);
                let points = points(&lines, axis, median);
                let title = format!("{}: {}", subject(scenario), headline(&points, kind == "rate"));
                let path = out.join(&name);
                checked(&path, curves(&path, [&title, database.name()], axis, unit, &points))?;
                plots.push((format!("{of}: {title}"), name));
            }
        }
    }
    for (scenario, title) in [
        (Scenario::Uncontended, "Pairs of acquire and release a second, nobody else wants the lock"),
        (Scenario::HotRow, "Changes a second of one row that all tasks want, under a lock"),
    ] {
        let lines = lines.iter().filter(|it| it.setting.scenario == scenario);
        let bars: Vec<_> = lines.filter_map(|it| Some((it.contender.clone(), it.spread(|it| it.rate)?))).collect();
        if !bars.is_empty() {
            let name = format!("{}.svg", scenario.name());
            checked(&out.join(&name), rates(&out.join(&name), title, bars, None))?;
            plots.push((title.to_owned(), name));
        }
    }
    let ratios: Vec<_> = lines.iter().filter_map(bar).collect();
    if !ratios.is_empty() {
        let (title, name) = ("Rate of lockkit, where the work by hand is 1".to_owned(), "ratios.svg".to_owned());
        checked(&out.join(&name), rates(&out.join(&name), &title, ratios, Some(1.0)))?;
        plots.push((title, name));
    }
    Ok(plots)
}

/// What the tasks of a scenario do.
fn subject(scenario: Scenario) -> &'static str {
    match scenario {
        Scenario::Lease => "A lease for each",
        Scenario::HotLease => "One lease, many waiters",
        Scenario::Transaction => "Empty transactions",
        Scenario::RowLock => "A row lock for each",
        Scenario::Named => "A named lock for each",
        Scenario::Idempotent => "A request with a new key for each",
        Scenario::AnsweredBefore => "An answered request for each",
        Scenario::Optimistic => "One row, many writers",
        Scenario::Stock => "One stock, many buyers",
        Scenario::Held => "One more lease, many held",
        Scenario::Sweep => "A sweep, many fresh rows",
        Scenario::TableSize => "One more lease, many rows",
        Scenario::Uncontended => "Nobody else wants the lock",
        Scenario::HotRow => "One row that all want",
    }
}

/// What is seen: lockkit beside the first of the others, at the end of its curve.
fn headline(all: &[(String, Points)], is_rate: bool) -> String {
    let last = |points: &Points| points.last().map_or(0.0, |it| it.1);
    let Some((_, points)) = all.iter().find(|it| color_of(&it.0, 0) == STRONG) else { return String::new() };
    let other = all.iter().find(|it| ["polling", "floor", "few", "none"].iter().any(|name| it.0.starts_with(name)));
    let Some((name, base)) = other else { return format!("{} at the end", short(last(points))) };
    let name = if name.starts_with("floor") { "the work by hand" } else { name };
    if !is_rate {
        return format!("{} ms, {name} {} ms", short(last(points)), short(last(base)));
    }
    match last(points) / last(base) {
        ratio if ratio >= 10.0 => format!("{ratio:.0} times {name}"),
        ratio if ratio < 0.1 => format!("{name} is {:.0} times faster", 1.0 / ratio),
        ratio => format!("{ratio:.2} times {name}"),
    }
}

/// A number in few digits.
fn short(number: f64) -> String {
    match number {
        it if it >= 1e6 => format!("{}M", it / 1e6),
        it if it >= 1e4 => format!("{:.0}k", it / 1e3),
        it if it >= 1e3 => format!("{}k", (it / 100.0).round() / 10.0),
        it if it >= 10.0 => format!("{it:.0}"),
        it => format!("{}", (it * 100.0).round() / 100.0),
    }
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
fn bar(line: &Line) -> Option<Bar> {
    let setting = line.setting;
    let has_floor = matches!(
        setting.scenario,
        Scenario::Lease | Scenario::Transaction | Scenario::RowLock | Scenario::Named | Scenario::Optimistic
    );
    let form = match &*line.contender {
        "lockkit" => "",
        REUSE => ", reuse",
        _ => return None,
    };
    if !has_floor || setting.processes > 1 {
        return None;
    }
    let keys = match setting.keys {
        0 => String::new(),
        1 => ", one key".to_owned(),
        keys => format!(", {keys} keys"),
    };
    let name = format!("{}, {} × {}{form}{keys}", setting.database.name(), setting.tasks, setting.scenario.name());
    Some((name, line.ratio()?))
}

fn points(lines: &[&Line], axis: Axis, number: impl Fn(&Line) -> Option<f64>) -> Vec<(String, Points)> {
    let mut points: BTreeMap<&str, Points> = BTreeMap::new();
    for line in lines {
        if let Some(number) = number(line) {
            points.entry(&line.contender).or_default().push((f64::from(axis.value(line.setting)), number.max(0.001)));
        }
    }
    points.into_iter().map(|(name, points)| (name.to_owned(), points)).collect()
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

/// Powers of ten, and what lies between them if there are few.
fn marks(bottom: f64, top: f64) -> Vec<f64> {
    let steps: &[f64] = match top / bottom {
        it if it > 300.0 => &[1.0],
        it if it > 10.0 => &[1.0, 2.0, 5.0],
        _ => &[1.0, 2.0, 3.0, 4.0, 5.0, 7.0],
    };
    let powers = (-3..9).flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
    powers.filter(|it| (bottom..=top).contains(it)).collect()
}

fn color_of(name: &str, others: usize) -> RGBColor {
    match name {
        name if name == "lockkit" || name.starts_with("many") => STRONG,
        name if name.contains("lockkit") => RELATED,
        _ => OTHERS[others % OTHERS.len()],
    }
}

/// One curve for each contender, named at its end, with its exponent; both axes are logarithmic.
fn curves(
    path: &Path,
    [title, subtitle]: [&str; 2],
    axis: Axis,
    unit: &str,
    all: &[(String, Points)],
) -> Result<(), Box<dyn StdError>> {
    let root = SVGBackend::new(path, (WIDTH, 460)).into_drawing_area();
    root.fill(&WHITE)?;
    let bold = ("sans-serif", TITLE).into_font().style(FontStyle::Bold);
    root.draw(&Text::new(title.to_owned(), (16, 14), bold))?;
    let grey = OTHERS[0].mix(0.9);
    root.draw(&Text::new(format!("{subtitle}, {unit}"), (16, 46), ("sans-serif", LABEL).into_font().color(&grey)))?;
    let numbers = || all.iter().flat_map(|(_, points)| points);
    let (right, top) = numbers().fold((2.0_f64, 0.01_f64), |(x, y), point| (x.max(point.0), y.max(point.1)));
    let (left, bottom) = numbers().fold((right, top), |(x, y), point| (x.min(point.0), y.min(point.1)));
    let mut values: Vec<f64> = numbers().map(|it| it.0).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .margin_top(76)
        .margin_right(230)
        .x_label_area_size(58)
        .y_label_area_size(66)
        .build_cartesian_2d(
            (left..right).log_scale().with_key_points(values),
            (bottom / 1.5..top * 1.5).log_scale().with_key_points(marks(bottom / 1.5, top * 1.5)),
        )?;
    chart
        .configure_mesh()
        .x_desc(axis.name())
        .x_label_formatter(&|x| short(*x))
        .y_label_formatter(&|y| short(*y))
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.08))
        .label_style(("sans-serif", LABEL))
        .axis_desc_style(("sans-serif", LABEL))
        .draw()?;
    let mut ends = Vec::new();
    let mut others = 0;
    for (name, points) in all {
        let color = color_of(name, others);
        others += usize::from(!name.contains("lockkit"));
        let width = if color == STRONG { 5 } else { 3 };
        chart.draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(width)))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, width, color.filled())))?;
        if let Some(last) = points.last() {
            let at = chart.backend_coord(last);
            ends.push((at, name, format!("exponent {:.2}", exponent(points)), color));
        }
    }
    // Names that would cover each other move down.
    ends.sort_by_key(|it| it.0.1);
    let mut lowest = i32::MIN;
    for ((x, y), name, exponent, color) in ends {
        let y = y.max(lowest);
        lowest = y + 2 * 23;
        for (text, size, below) in [(name, LABEL, 0), (&exponent, LABEL - 4, 20)] {
            let style = ("sans-serif", size).into_font().color(&color).pos(Pos::new(HPos::Left, VPos::Center));
            root.draw(&Text::new(text.clone(), (x + 14, y + below), style))?;
        }
    }
    root.present()?;
    Ok(())
}

/// One horizontal bar for each name, the greatest first, with the least and greatest number; and a line, where one is
/// wanted.
fn rates(path: &Path, title: &str, mut bars: Vec<Bar>, line: Option<f64>) -> Result<(), Box<dyn StdError>> {
    bars.sort_by(|one, other| other.1.median.total_cmp(&one.1.median));
    let height = 78 + 32 * u32::try_from(bars.len())?;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let bold = ("sans-serif", TITLE - 3).into_font().style(FontStyle::Bold);
    root.draw(&Text::new(title.to_owned(), (16, 14), bold))?;
    let right = bars.iter().map(|it| it.1.greatest).fold(0.01, f64::max) * 1.25;
    let count = f64::from(u32::try_from(bars.len())?);
    let longest = bars.iter().map(|it| it.0.chars().count()).max().unwrap_or_default();
    let share = (f64::from(u32::try_from(longest)?) * LETTER / f64::from(WIDTH - 2 * MARGIN)).min(0.6);
    let left = right * share / (1.0 - share);
    let mut chart =
        ChartBuilder::on(&root).margin(MARGIN).margin_top(54).build_cartesian_2d(-left..right, 0.0..count)?;
    if let Some(at) = line {
        chart.draw_series([PathElement::new([(at, 0.0), (at, count)], BLACK.mix(0.35).stroke_width(2))])?;
    }
    let black = || ("sans-serif", LABEL).into_font().color(&BLACK);
    let mut middle = count - 0.5;
    for (name, Spread { least, median, greatest }) in bars {
        let color = if line.is_some() || name.contains("lockkit") { STRONG } else { OTHERS[1] };
        chart.draw_series([Rectangle::new([(0.0, middle - 0.36), (median, middle + 0.36)], color.filled())])?;
        let whisker = BLACK.mix(0.6).stroke_width(2);
        chart.draw_series([PathElement::new([(least, middle), (greatest, middle)], whisker)])?;
        for end in [least, greatest] {
            chart.draw_series([PathElement::new([(end, middle - 0.14), (end, middle + 0.14)], whisker)])?;
        }
        let before = black().pos(Pos::new(HPos::Right, VPos::Center));
        chart.draw_series([Text::new(name, (-right * 0.01, middle), before)])?;
        let label = if line.is_some() && median < 100.0 { format!("{median:.2}") } else { short(median) };
        let after = black().pos(Pos::new(HPos::Left, VPos::Center));
        chart.draw_series([Text::new(label, (greatest + right * 0.015, middle), after)])?;
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
