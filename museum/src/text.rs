//! Exhibits as text, for the terminal and for the pages.

use std::fmt::Write;

use crate::{
    exhibit::{Exhibit, Shows, Uses},
    run::Run,
    world::Servers,
};

/// Whether the text has colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    Colour,
}

impl Style {
    fn red(self, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Colour => format!("\x1b[1;31m{text}\x1b[0m"),
        }
    }

    fn bold(self, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Colour => format!("\x1b[1m{text}\x1b[0m"),
        }
    }
}

/// The whole exhibit, for a terminal.
pub(crate) fn exhibit(number: usize, exhibit: &Exhibit, shows: &Shows, servers: &Servers, style: Style) -> String {
    let Exhibit { title, recipe, happens, remedy, lockkit, broken, cured, .. } = exhibit;
    let recipe: String = recipe.lines().fold(String::new(), |text, line| text + "    " + line + "\n");
    let mut parts = vec![
        style.bold(&format!("{number} · {title}")),
        recipe,
        style.bold(&format!("The recipe, on {}", broken.place(servers))),
        timeline(&shows.broken, style),
        wrapped(happens, 100),
    ];
    if let (Uses::Toy(reason), true) = (broken.uses, servers.redis.is_some()) {
        parts.push(wrapped(&format!("The recipe runs on the toy only: {reason}."), 100));
    }
    if let Some(elsewhere) = exhibit.elsewhere(servers) {
        parts.push(wrapped(&elsewhere.text(), 100));
    }
    if let (Some(also), Some(run)) = (exhibit.also(servers), &shows.also) {
        parts.extend([wrapped(also.happens, 100), timeline(run, style)]);
    }
    parts.extend([
        format!("{}\n{}", style.bold("What the usual remedy misses"), wrapped(remedy, 100)),
        style.bold(&format!("The same schedule with lockkit, on {}", cured.place(servers))),
        timeline(&shows.cured, style),
        wrapped(lockkit, 100),
    ]);
    parts.join("\n")
}

/// A line a step, a column a participant. What broke stands below its step.
pub(crate) fn timeline(run: &Run, style: Style) -> String {
    let has_state = !run.state_title.is_empty();
    let has_insiders = run.lines.iter().any(|it| it.inside > 0);
    let mut header = vec!["step".to_owned()];
    header.extend(run.names.iter().map(|&it| it.to_owned()));
    header.extend(has_state.then(|| run.state_title.to_owned()));
    header.extend(has_insiders.then(|| "inside".to_owned()));

    let rows = run.lines.iter().enumerate().map(|(at, line)| {
        let who = line.who.map_or("", |it| run.names[it]);
        let mut row = vec![format!("{:>2} {who}  {}", at + 1, line.text)];
        row.extend(line.cells.iter().map(|it| it.text().to_owned()));
        row.extend(has_state.then(|| line.state.clone()));
        row.extend(has_insiders.then(|| line.inside.to_string()));
        row
    });
    let rows: Vec<_> = rows.collect();

    let widths: Vec<_> = (0..header.len())
        .map(|column| rows.iter().chain([&header]).map(|it| it[column].chars().count()).max().unwrap_or(0))
        .collect();
    let write = |row: &[String]| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut text = write(&header) + "\n";
    for (row, line) in rows.iter().zip(&run.lines) {
        match &line.breach {
            Some(breach) => {
                let _ = writeln!(text, "{}\n{}", style.red(&write(row)), style.red(&format!("   ▲ {breach}")));
            }
            None => text = text + &write(row) + "\n",
        }
    }
    text
}

/// The paragraph in lines of at most this many characters.
pub(crate) fn wrapped(paragraph: &str, width: usize) -> String {
    let (mut text, mut line) = (String::new(), String::new());
    for word in paragraph.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            text = text + &line + "\n";
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    text + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        assert_eq!(wrapped("aa bb  cc dddddd e", 5), "aa bb\ncc\ndddddd\ne\n");
    }
}
