//! The page: three files without a build step, and a table for browsers without JavaScript.

use std::fmt::{self, Write};

use crate::{
    looks::{Row, State, View},
    sessions::{SessionLine, Sessions},
};

const PAGE: &str = include_str!("../page/inspector.html");
pub(crate) const STYLE: &str = include_str!("../page/inspector.css");
pub(crate) const SCRIPT: &str = include_str!("../page/inspector.js");

/// The page with the leases as they are now. `path` is the one that the browser asked for.
pub(crate) fn html(view: &Result<View, String>, contains: &str, may_steal: bool, path: &str) -> String {
    let (mut rows, mut died, mut summary, mut sessions, mut notes) = Default::default();
    let written = match view {
        Ok(view) => write_view(view, &mut summary, [&mut rows, &mut died], &mut sessions, &mut notes),
        Err(problem) => write!(summary, "{}", Escaped(problem)),
    };
    written.expect("BUG: a string can be written to");
    let asked = view.as_ref().ok().and_then(|it| it.sessions.as_ref());
    let hidden = |it| if it { " hidden" } else { "" };
    // The page may be at a path without a slash at its end. Links are relative to that: the service may be behind a
    // proxy that adds to its paths.
    let folder = match path.rsplit('/').next() {
        Some(name) if !name.is_empty() => format!("<base href=\"{}/\">", Escaped(name)),
        _ => String::new(),
    };
    let access = if may_steal { "steal" } else { "look" };
    let contains = Escaped(contains).to_string();
    // In one pass: what is filled in may itself look like a gap.
    let mut parts = PAGE.split("{{");
    let mut page = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (gap, rest) = part.split_once("}}").unwrap_or_default();
        page.push_str(match gap {
            "base" => &folder,
            "access" => access,
            "contains" => &contains,
            "summary" => &summary,
            "rows" => &rows,
            "no deaths" => hidden(died.is_empty()),
            "died" => &died,
            "hidden" => hidden(asked.is_none()),
            "somebody" => hidden(!sessions.is_empty() || !notes.is_empty()),
            "sessions" => &sessions,
            "notes" => &notes,
            other => unreachable!("BUG: the page has a gap `{other}`"),
        });
        page.push_str(rest);
    }
    page
}

fn write_view(
    view: &View,
    summary: &mut String,
    [rows, dead]: [&mut String; 2],
    sessions: &mut String,
    notes: &mut String,
) -> fmt::Result {
    let View { held, waiting, died, more, .. } = view;
    write!(summary, "{held} held, {waiting} waiting, {died} died, {more} more not shown")?;
    view.rows.iter().try_for_each(|row| write_row(if row.state == State::Died { dead } else { rows }, row))?;
    let Some(Sessions { lines, notes: said }) = &view.sessions else { return Ok(()) };
    lines.iter().try_for_each(|line| write_session(sessions, line))?;
    said.iter().try_for_each(|it| write!(notes, "<li>{}</li>", Escaped(it)))
}

fn write_session(out: &mut String, line: &SessionLine) -> fmt::Result {
    let SessionLine { session, waits, lock, transaction, does } = line;
    write!(
        out,
        "<tr><th scope=\"row\">{}</th><td data-label=\"Waits\">{}</td><td data-label=\"For\" class=\"wide\">{}</td>\
         <td data-label=\"Transaction\">{}</td><td data-label=\"Does\" class=\"wide\">{}</td></tr>",
        Escaped(session),
        span(*waits),
        Escaped(lock),
        span(*transaction),
        Escaped(does),
    )
}

fn write_row(out: &mut String, row: &Row) -> fmt::Result {
    let Row { key, state, holder, fence, held, left, ttl, renewals, waiting, here, flaw, .. } = row;
    let here = if *here { " (this process)" } else { "" };
    let (held, left_text) = (span(*held), Span(*left));
    let (class, left) = match state {
        State::Held => (
            "held",
            format!("<progress aria-label=\"Time left\" max=\"{ttl}\" value=\"{left}\"></progress> {left_text}"),
        ),
        State::Unreadable => ("unreadable", format!("unreadable: {}", flaw.unwrap_or_default())),
        State::Kept => ("kept", format!("released, kept for {left_text}")),
        State::Died => ("died", format!("died {left_text} ago")),
        State::Free => ("free", format!("free for {left_text}")),
    };
    write!(
        out,
        "<tr class=\"{class}\"><th scope=\"row\">{}</th><td>{}{here}</td><td>{fence}</td><td>{held}</td><td>{left}</td>\
         <td>{renewals}</td><td>{waiting}</td></tr>",
        Escaped(key),
        Escaped(holder),
    )
}

/// A time that may be unknown.
fn span(time: Option<u64>) -> String {
    time.map(|it| Span(it).to_string()).unwrap_or_default()
}

/// Text in HTML, also within quotes.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|it| match it {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            other => f.write_char(other),
        })
    }
}

/// Milliseconds, rounded down as a person would say them.
struct Span(u64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1_000;
        match seconds {
            0 => write!(f, "{} ms", self.0),
            1..100 => write!(f, "{seconds} s"),
            100..6_000 => write!(f, "{} min", seconds / 60),
            6_000..172_800 => write!(f, "{} h", seconds / 3_600),
            _ => write!(f, "{} d", seconds / 86_400),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_asks_nobody_else() {
        assert!(PAGE.len() + STYLE.len() + SCRIPT.len() < 20_000);
        for file in [PAGE, STYLE, SCRIPT] {
            assert!(!file.contains("://") && !file.contains("innerHTML") && !file.contains(" style="), "{file}");
        }
    }

    #[test]
    fn text_stays_text() {
        assert_eq!(Escaped("<a b='c\"&'>").to_string(), "&lt;a b=&#39;c&quot;&amp;&#39;&gt;");
        let page = html(&Err("{{rows}} <p>".to_owned()), "\"><script>", false, "/x/a\"b");
        assert!(page.contains("{{rows}} &lt;p&gt;") && page.contains("value=\"&quot;&gt;&lt;script&gt;\""), "{page}");
        assert!(page.contains("<base href=\"a&quot;b/\">"), "{page}");
        assert!(!html(&Err(String::new()), "", false, "/x/").contains("<base"));
    }

    #[test]
    fn times_are_short() {
        let said = [0, 999, 1_000, 99_999, 100_000, 5_999_999, 6_000_000, 172_800_000].map(|it| Span(it).to_string());
        assert_eq!(said, ["0 ms", "999 ms", "1 s", "99 s", "1 min", "99 min", "1 h", "2 d"]);
    }
}
