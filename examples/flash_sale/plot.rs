//! Draws the verdicts as a chart: who gave out too much, and how fast each was.

use std::{error::Error as StdError, path::Path};

use anyhow::{Result, anyhow};
use plotters::{
    chart::ChartBuilder,
    coord::Shift,
    element::{PathElement, Rectangle, Text},
    prelude::{DrawingArea, IntoDrawingArea, SVGBackend},
    style::{
        BLACK, Color, FontStyle, IntoFont, RGBColor, WHITE,
        text_anchor::{HPos, Pos, VPos},
    },
};

use crate::verdict::Verdict;

const EXACT: RGBColor = RGBColor(0, 125, 85);
const TOO_MUCH: RGBColor = RGBColor(200, 55, 45);
const SPEED: RGBColor = RGBColor(70, 75, 85);

/// The chart is shown at half of this width in places.
const WIDTH: u32 = 720;

/// Of one bar, and of a title.
const ROW: u32 = 34;
const HEAD: u32 = 60;

const TITLE: u32 = 24;
const LABEL: u32 = 20;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A bar from zero, of parts that end at these numbers.
struct Bar<'a> {
    name: &'a str,
    parts: Vec<(f64, RGBColor)>,
    label: String,
}

/// Writes the chart as an SVG file.
pub(crate) fn plot(path: &Path, server: &str, verdicts: &[Verdict]) -> Result<()> {
    draw(path, server, verdicts).map_err(|err| anyhow!("cannot draw {}: {err}", path.display()))
}

fn draw(path: &Path, server: &str, verdicts: &[Verdict]) -> Result<(), Box<dyn StdError>> {
    let height = HEAD + ROW * u32::try_from(verdicts.len())?;
    let root = SVGBackend::new(path, (WIDTH, 2 * height + 16)).into_drawing_area();
    root.fill(&WHITE)?;
    let (upper, lower) = root.split_vertically(height);

    let mut by_excess: Vec<_> = verdicts.iter().collect();
    by_excess.sort_by_key(|it| std::cmp::Reverse((it.oversold, it.double_wins)));
    let given_out = by_excess.into_iter().map(|it| {
        let rightly = it.given_out.saturating_sub(it.oversold);
        Bar {
            name: it.strategy.name(),
            parts: vec![(exact(it.given_out), TOO_MUCH), (exact(rightly), EXACT)],
            label: label(it),
        }
    });
    let stock = verdicts.iter().map(|it| it.stock).max().unwrap_or(0);
    bars(&upper, &format!("Given out of a stock of {stock}, on {server}"), given_out.collect(), Some(stock))?;

    let mut by_speed: Vec<_> = verdicts.iter().collect();
    by_speed.sort_by(|one, other| other.per_second.total_cmp(&one.per_second));
    let speeds = by_speed.into_iter().map(|it| Bar {
        name: it.strategy.name(),
        parts: vec![(it.per_second, SPEED)],
        label: format!("{:.0}, p99 {:.0} ms", it.per_second, it.p99_ms),
    });
    bars(&lower, "Draws a second, and how long the slowest waited", speeds.collect(), None)?;
    root.present()?;
    Ok(())
}

/// What was given out, and what of it is too much.
fn label(it: &Verdict) -> String {
    let wrong = [(it.oversold, "too many"), (it.double_wins, "double wins")];
    let wrong = wrong.iter().filter(|it| it.0 > 0).map(|(count, what)| format!(", {count} {what}"));
    it.given_out.to_string() + &wrong.collect::<Vec<_>>().concat()
}

/// One horizontal bar below the other, and a line where the bars should end.
fn bars(area: &Area<'_>, title: &str, bars: Vec<Bar<'_>>, line: Option<u64>) -> Result<(), Box<dyn StdError>> {
    let bold = ("sans-serif", TITLE).into_font().style(FontStyle::Bold);
    area.draw(&Text::new(title.to_owned(), (16, 16), bold))?;
    // Room for the names on the left and the labels on the right.
    let longest = bars.iter().flat_map(|it| &it.parts).map(|it| it.0).fold(1.0, f64::max);
    let count = exact(bars.len() as u64);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_top(HEAD - 12)
        .build_cartesian_2d(-0.32 * longest..2.3 * longest, 0.0..count)?;
    let text = |side| ("sans-serif", LABEL).into_font().color(&BLACK).pos(Pos::new(side, VPos::Center));
    let mut middle = count - 0.5;
    for Bar { name, parts, label } in bars {
        let end = parts.iter().map(|it| it.0).fold(0.0, f64::max);
        let parts = parts
            .into_iter()
            .map(|(end, color)| Rectangle::new([(0.0, middle - 0.36), (end, middle + 0.36)], color.filled()));
        chart.draw_series(parts)?;
        chart.draw_series([
            Text::new(name.to_owned(), (-0.02 * longest, middle), text(HPos::Right)),
            Text::new(label, (end + 0.02 * longest, middle), text(HPos::Left)),
        ])?;
        middle -= 1.0;
    }
    if let Some(at) = line.map(exact) {
        chart.draw_series([PathElement::new([(at, 0.0), (at, count)], BLACK.stroke_width(2))])?;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "counts of pieces have far fewer than 53 bits")]
fn exact(count: u64) -> f64 {
    count as f64
}
