//! The two runs of an exhibit as a picture: a lane a participant, a row a step.
//!
//! It is readable at 400 pixels, and on light and dark pages: it has no background, and its colours are of middle
//! brightness.

use std::fmt::Write;

use crate::{
    exhibit::Shows,
    run::{Line, Run},
    text::wrapped,
};

const WIDTH: usize = 400;
/// From one lane to the next.
const LANE: usize = 40;
const MARGIN: usize = 4;
const LINE: usize = 16;
/// The width of a character in bold, where the font is wide.
const CHARACTER: usize = 8;

const TEXT: &str = "#768390";
const INSIDE: &str = "#3d8bdb";
const BROKEN: &str = "#e5534b";
const WAITING: &str = "#c08a2b";

/// A file that shows both runs.
pub(crate) fn picture(shows: &Shows) -> String {
    let mut body = String::new();
    let mut y = draw(&mut body, 0, "The recipe", &shows.broken);
    y = draw(&mut body, y + 18, "The same schedule with lockkit", &shows.cured);
    y = legend(&mut body, y);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         font-family=\"system-ui, Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"{TEXT}\">\n{body}</svg>\n"
    )
}

/// Draws a run below this height, and returns where it ends.
fn draw(svg: &mut String, top: usize, title: &str, run: &Run) -> usize {
    let lanes = run.names.len();
    let lane = |at: usize| WIDTH - MARGIN - LANE * (lanes - at) + LANE / 2;
    let _ = writeln!(svg, "<text x=\"4\" y=\"{}\" font-size=\"15\" font-weight=\"bold\">{title}</text>", top + 18);
    for (at, name) in run.names.iter().enumerate() {
        let (x, y) = (lane(at), top + 40);
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" font-weight=\"bold\">{name}</text>");
    }
    let room = (WIDTH - MARGIN - LANE * lanes) / CHARACTER;
    let mut y = top + 46;
    for (number, line) in run.lines.iter().enumerate() {
        let texts = texts(number + 1, line, run, room);
        let height = texts.len() * LINE + 8;
        if line.breach.is_some() {
            let band =
                format!("width=\"{WIDTH}\" height=\"{height}\" rx=\"4\" fill=\"{BROKEN}\" fill-opacity=\"0.16\"");
            let _ = writeln!(svg, "<rect x=\"0\" y=\"{y}\" {band}/>");
        }
        for (at, cell) in line.cells.iter().enumerate() {
            let (x, bottom) = (lane(at), y + height);
            let look = match (cell.inside, cell.waiting) {
                (true, _) if line.inside > 1 => format!("stroke=\"{BROKEN}\" stroke-width=\"9\""),
                (true, _) => format!("stroke=\"{INSIDE}\" stroke-width=\"9\""),
                (_, true) => format!("stroke=\"{WAITING}\" stroke-width=\"3\" stroke-dasharray=\"3 4\""),
                _ => format!("stroke=\"{TEXT}\" stroke-width=\"1\" stroke-opacity=\"0.6\""),
            };
            let _ = writeln!(svg, "<line x1=\"{x}\" y1=\"{y}\" x2=\"{x}\" y2=\"{bottom}\" {look}/>");
            if line.who == Some(at) {
                let middle = y + height / 2;
                let _ = writeln!(svg, "<circle cx=\"{x}\" cy=\"{middle}\" r=\"7\"/>");
            }
        }
        for (at, (text, look)) in texts.iter().enumerate() {
            let baseline = y + LINE * (at + 1);
            let _ = writeln!(svg, "<text x=\"4\" y=\"{baseline}\"{look}>{}</text>", escaped(text));
        }
        y += height;
    }
    y
}

/// What the colours of the lanes mean.
fn legend(svg: &mut String, top: usize) -> usize {
    let y = top + 24;
    let meanings = [(4, INSIDE, "inside"), (84, BROKEN, "not alone inside"), (232, WAITING, "waits")];
    for (x, colour, meaning) in meanings {
        let mark = format!("x=\"{x}\" y=\"{}\" width=\"9\" height=\"11\" fill=\"{colour}\"", y - 10);
        let _ = writeln!(svg, "<rect {mark}/><text x=\"{}\" y=\"{y}\">{meaning}</text>", x + 15);
    }
    y + 8
}

/// The step, what became of its participant and of the lock, and what broke.
fn texts(number: usize, line: &Line, run: &Run, room: usize) -> Vec<(String, String)> {
    let who = line.who.map_or_else(String::new, |it| format!("{}: ", run.names[it]));
    let step = wrapped(&format!("{number}. {who}{}", line.text), room);
    let marks = line.cells.iter().zip(&run.names).filter(|(cell, _)| !cell.mark.is_empty());
    let marks = marks.map(|(cell, name)| format!("{name} {}", cell.mark));
    let waiting = line.who.filter(|it| line.cells[*it].waiting).map(|it| format!("{} waits", run.names[it]));
    let state = (!run.state_title.is_empty()).then(|| format!("{}: {}", run.state_title, line.state));
    let outcome: Vec<_> = marks.chain(waiting).chain(state).collect();
    let outcome = wrapped(&outcome.join(" · "), room);

    let mut texts: Vec<_> = step.lines().map(|it| (it.to_owned(), " font-weight=\"600\"".to_owned())).collect();
    texts.extend(outcome.lines().map(|it| (format!("\u{2003}{it}"), String::new())));
    for broken in line.breach.iter().flat_map(|it| wrapped(it, room).lines().map(str::to_owned).collect::<Vec<_>>()) {
        texts.push((format!("\u{2003}{broken}"), format!(" font-weight=\"bold\" fill=\"{BROKEN}\"")));
    }
    texts
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
