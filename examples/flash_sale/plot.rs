//! Draws the verdicts as a chart: who gave out too much, and how fast each was.

use std::{error::Error as StdError, path::Path};

use anyhow::{Result, anyhow};
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    coord::Shift,
    element::{Rectangle, Text},
    prelude::{DrawingArea, IntoDrawingArea, SVGBackend},
    style::{
        BLACK, Color, IntoFont, RGBColor, WHITE,
        text_anchor::{HPos, Pos, VPos},
    },
};

use crate::verdict::Verdict;

const STOCK: RGBColor = RGBColor(176, 184, 196);
const GIVEN_OUT: RGBColor = RGBColor(46, 125, 90);
const OVERSOLD: RGBColor = RGBColor(200, 55, 45);
const DOUBLE_WINS: RGBColor = RGBColor(235, 150, 40);
const SPEED: RGBColor = RGBColor(60, 105, 180);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Bars of one colour, one for each verdict.
struct Series<'a> {
    name: &'static str,
    color: RGBColor,
    values: Vec<f64>,
    label: Box<dyn Fn(usize) -> String + 'a>,
}

/// Writes the chart as an SVG file.
pub(crate) fn plot(path: &Path, server: &str, verdicts: &[Verdict]) -> Result<()> {
    draw(path, server, verdicts).map_err(|err| anyhow!("cannot draw {}: {err}", path.display()))
}

fn draw(path: &Path, server: &str, verdicts: &[Verdict]) -> Result<(), Box<dyn StdError>> {
    let root = SVGBackend::new(path, (960, 780)).into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.titled(&format!("Flash sale on {server}"), ("sans-serif", 28))?;
    let (upper, lower) = root.split_vertically(400);

    let pieces = |name, color, count: fn(&Verdict) -> u64| Series {
        name,
        color,
        values: verdicts.iter().map(|it| exact(count(it))).collect(),
        label: Box::new(move |index| count(&verdicts[index]).to_string()),
    };
    bars(
        &upper,
        "What was given out of the stock",
        "pieces",
        verdicts,
        &[
            pieces("stock", STOCK, |it| it.stock),
            pieces("given out", GIVEN_OUT, |it| it.given_out),
            pieces("oversold", OVERSOLD, |it| it.oversold),
            pieces("double wins", DOUBLE_WINS, |it| it.double_wins),
        ],
    )?;
    bars(
        &lower,
        "How fast",
        "draws per second",
        verdicts,
        &[Series {
            name: "draws per second (median and 99th percentile of the waiting time)",
            color: SPEED,
            values: verdicts.iter().map(|it| it.per_second).collect(),
            label: Box::new(|index| {
                let Verdict { per_second, p50_ms, p99_ms, .. } = &verdicts[index];
                format!("{per_second:.0}/s ({p50_ms:.1} / {p99_ms:.0} ms)")
            }),
        }],
    )?;
    root.present()?;
    Ok(())
}

/// One group of bars for each verdict.
fn bars(
    area: &Area<'_>,
    title: &str,
    unit: &str,
    verdicts: &[Verdict],
    series: &[Series<'_>],
) -> Result<(), Box<dyn StdError>> {
    let groups = exact(verdicts.len() as u64);
    // Room above the bars for their labels and the legend.
    let top = series.iter().flat_map(|it| &it.values).copied().fold(1.0, f64::max) * 1.35;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 19))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(72)
        .build_cartesian_2d(-0.5..groups - 0.5, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_desc("strategy")
        .y_desc(unit)
        .x_labels(verdicts.len())
        .x_label_formatter(&|x| name_at(verdicts, *x))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 15))
        .draw()?;

    let width = 0.8 / exact(series.len() as u64);
    let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Bottom));
    for (number, Series { name, color, values, label }) in series.iter().enumerate() {
        let left = |group: usize| exact(group as u64) - 0.4 + width * exact(number as u64);
        let bars = values.iter().enumerate().map(|(group, value)| {
            Rectangle::new([(left(group) + 0.01, 0.0), (left(group) + width - 0.01, *value)], color.filled())
        });
        chart
            .draw_series(bars)?
            .label(*name)
            .legend(|(x, y)| Rectangle::new([(x, y - 6), (x + 14, y + 6)], color.filled()));
        chart.draw_series(values.iter().enumerate().map(|(group, value)| {
            Text::new(label(group), (left(group) + width / 2.0, value + top * 0.01), style.clone())
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(STOCK)
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}

/// The name of the strategy whose group is centred here.
fn name_at(verdicts: &[Verdict], x: f64) -> String {
    let named = verdicts.iter().enumerate().find(|(group, _)| (exact(*group as u64) - x).abs() < 0.01);
    named.map(|(_, verdict)| verdict.strategy.name().to_owned()).unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "counts of pieces have far fewer than 53 bits")]
fn exact(count: u64) -> f64 {
    count as f64
}
