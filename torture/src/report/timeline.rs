//! A picture of a lane: who held which key when, which of it was committed, and when the fault was there. As SVG.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::event::Answer;
use crate::faults::Mark;
use crate::lane::Lane;

const PIXELS_PER_SECOND: f64 = 70.0;
const LEFT: f64 = 110.0;
const ROW: f64 = 16.0;
/// The width of a letter of a mark.
const LETTER: f64 = 5.5;
/// The width of the legend.
const LEAST_WIDTH: f64 = 480.0;

/// Where a row is below the first one.
fn below(row: usize) -> f64 {
    f64::from(u32::try_from(row).unwrap_or(0)) * ROW
}

const COLOURS: [&str; 8] = ["#4e79a7", "#f28e2b", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#86bcb6"];

/// A lane as it is drawn. Times are seconds from its begin.
#[derive(Debug)]
pub(crate) struct Panel {
    title: String,
    seconds: f64,
    keys: Vec<String>,
    holds: Vec<Hold>,
    marks: Vec<(f64, f64, String)>,
    violations: Vec<(f64, String)>,
}

#[derive(Debug)]
struct Hold {
    key: usize,
    worker: u32,
    from: f64,
    to: f64,
    answer: Option<Answer>,
    text: String,
}

impl Panel {
    pub(crate) fn of(lane: &Lane) -> Self {
        let seconds = |at: u64| crate::oracle::seconds(at.saturating_sub(lane.began).min(lane.ended - lane.began));
        let drawn = || lane.history.sections.iter().filter(|it| !it.kind.is_control());
        let granted = || drawn().flat_map(|it| it.granted.iter().map(move |(key, fence, at)| (it, key, *fence, *at)));
        let keys: BTreeSet<_> = granted().map(|it| it.1.clone()).collect();
        let mut keys: Vec<_> = keys.into_iter().collect();
        keys.sort_by(|one, other| by_number(one).cmp(&by_number(other)));
        let hold = |(section, key, fence, at): (&crate::history::Section, &String, i64, u64)| Hold {
            key: keys.iter().position(|it| it == key).unwrap_or(0),
            worker: section.worker,
            from: seconds(at),
            to: seconds(section.believed_until.max(at)),
            answer: section.answer(),
            text: format!("{key}, worker {}, fence {fence}", section.worker),
        };
        let holds = granted().map(hold).collect();
        let marks = lane.marks.iter().map(|Mark { from, to, text }| (seconds(*from), seconds(*to), text.clone()));
        let violations = lane.violations.iter().filter(|it| it.at > 0);
        Self {
            title: lane.fault.name(),
            seconds: lane.seconds(),
            holds,
            keys,
            marks: marks.collect(),
            violations: violations.map(|it| (seconds(it.at), format!("{}: {}", it.oracle, it.text))).collect(),
        }
    }

    fn height(&self) -> f64 {
        60.0 + below(self.keys.len())
    }

    fn draw(&self, svg: &mut String, top: f64) -> std::fmt::Result {
        let x = |seconds: f64| LEFT + seconds * PIXELS_PER_SECOND;
        let (first, bottom) = (top + 36.0, top + 36.0 + below(self.keys.len()));
        writeln!(svg, r#"<text x="8" y="{:.1}" font-weight="bold">{}</text>"#, top + 14.0, escape(&self.title))?;
        let mut free_from = 0.0;
        for (from, to, text) in &self.marks {
            let width = ((to - from) * PIXELS_PER_SECOND).max(1.5);
            let (left, height, text) = (x(*from), bottom - first, escape(text));
            let paint = r##"fill="#e15759" opacity="0.22""##;
            writeln!(svg, r#"<rect x="{left:.1}" y="{first:.1}" width="{width:.1}" height="{height:.1}" {paint}>"#)?;
            writeln!(svg, "<title>{text}</title></rect>")?;
            // One that would cover the last one is left to the tooltip.
            if left >= free_from {
                free_from = left + LETTER * f64::from(u32::try_from(text.len()).unwrap_or(0));
                let y = first - 4.0;
                writeln!(svg, r##"<text x="{left:.1}" y="{y:.1}" font-size="9" fill="#a33">{text}</text>"##)?;
            }
        }
        for (row, key) in self.keys.iter().enumerate() {
            writeln!(svg, r#"<text x="8" y="{:.1}">{}</text>"#, first + below(row) + 11.0, escape(key))?;
        }
        for hold in &self.holds {
            let (y, width) = (first + below(hold.key), ((hold.to - hold.from) * PIXELS_PER_SECOND).max(0.7));
            let colour = COLOURS[hold.worker as usize % COLOURS.len()];
            // Full where it was committed, pale where it was not.
            let (opacity, height) = if hold.answer == Some(Answer::Committed) { (1.0, 11) } else { (0.45, 7) };
            let paint = format!(r#"fill="{colour}" opacity="{opacity}""#);
            writeln!(
                svg,
                r#"<rect x="{:.1}" y="{:.1}" width="{width:.1}" height="{height}" {paint}><title>{}</title></rect>"#,
                x(hold.from),
                y + 2.0,
                escape(&hold.text)
            )?;
        }
        for (at, text) in &self.violations {
            let x = x(*at);
            let paint = r##"stroke="#d00" stroke-width="2""##;
            writeln!(
                svg,
                r#"<line x1="{x:.1}" y1="{first:.1}" x2="{x:.1}" y2="{bottom:.1}" {paint}><title>{}</title></line>"#,
                escape(text)
            )?;
        }
        let mut second = 0.0;
        while second <= self.seconds {
            writeln!(
                svg,
                r##"<text x="{:.1}" y="{:.1}" font-size="8" fill="#666">{second} s</text>"##,
                x(second),
                bottom + 11.0
            )?;
            second += 1.0;
        }
        Ok(())
    }
}

/// The panels of a database, one below the other.
pub(super) fn svg(database: &str, panels: &[&Panel]) -> String {
    let width = LEFT + 40.0 + panels.iter().map(|it| it.seconds * PIXELS_PER_SECOND).fold(LEAST_WIDTH, f64::max);
    let height = 60.0 + panels.iter().map(|it| it.height()).sum::<f64>();
    let font = r#"font-family="sans-serif" font-size="10""#;
    let holds: usize = panels.iter().map(|it| it.holds.len()).sum();
    let violations: usize = panels.iter().map(|it| it.violations.len()).sum();
    let legend =
        "A colour for each worker; pale and thin: not committed. Pale red: the fault. A red line: a violation.";
    let title = format!("{}: held {holds} times under faults, {violations} violations", escape(database));
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" {font}>
<rect width="100%" height="100%" fill="white"/>
<text x="8" y="22" font-size="16" font-weight="bold">{title}</text>
<text x="8" y="40" font-size="11" fill="#444">{legend}</text>
"##,
    );
    let mut top = 56.0;
    for panel in panels {
        // Writing to a string cannot fail.
        let _ = panel.draw(&mut svg, top);
        top += panel.height();
    }
    svg.push_str("</svg>\n");
    svg
}

/// Orders `own/10` after `own/9`.
fn by_number(key: &str) -> (&str, u32) {
    let (name, number) = key.rsplit_once('/').unwrap_or((key, ""));
    (name, number.parse().unwrap_or(0))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
