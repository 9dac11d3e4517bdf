//! Key templates: `"order:{user.id}:{kind:?}"`. Pure: text in, pieces out. Its text keeps the rules of `lockkit::Key`,
//! as a test checks.
//!
//! Two captures need text between them with a character that is neither a letter, a digit nor `%`; the first such
//! character is their separator. Separators, `%` and control characters are percent-encoded in every value, so a key
//! can be taken apart again, and a template never makes one key from two sets of values. Other punctuation is not
//! encoded: with one capture there is nothing to tell apart, and the key is the one that `format!` makes.

use std::fmt;

use syn::{Ident, ext::IdentExt, parse::Parser};

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Text that is the same in every key.
    Text(String),
    /// What is captured, with its format after the colon.
    Capture { value: Captured, format: String },
}

/// A captured variable, or what fields and calls make of it: `name.field.call()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Captured {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

/// What follows the name of a captured variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// `.field` or `.0`
    Field(String),
    /// `.call()`
    Call(String),
}

/// A checked template: no two different sets of captured values make one key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Template {
    pub(crate) pieces: Vec<Piece>,
}

/// The longest key, in bytes.
const MAX_KEY_BYTES: usize = 255;

impl Template {
    /// Checks a template; the error says what to write instead.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let pieces = pieces(text)?;
        check_text(&pieces)?;
        check_separators(&pieces)?;
        Ok(Self { pieces })
    }

    /// The key, where nothing is captured.
    pub(crate) fn constant(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [Piece::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// The separators, which are escaped in what is captured.
    pub(crate) fn separators(&self) -> String {
        let mut separators: Vec<char> = gaps(&self.pieces).filter_map(|(_, text, _)| separator(text)).collect();
        separators.sort_unstable();
        separators.dedup();
        separators.into_iter().collect()
    }
}

/// Two neighbouring captures and the text between them.
fn gaps(pieces: &[Piece]) -> impl Iterator<Item = (&Captured, &str, &Captured)> {
    let captures = pieces.iter().enumerate().filter_map(|(at, it)| match it {
        Piece::Text(_) => None,
        Piece::Capture { value, .. } => Some((at, value)),
    });
    captures.clone().zip(captures.skip(1)).map(|((at, left), (_, right))| match &pieces[at + 1] {
        Piece::Text(text) => (left, text.as_str(), right),
        Piece::Capture { .. } => (left, "", right),
    })
}

/// The separator of two captures: the first character between them that is neither a letter, a digit nor `%`, which
/// starts an escape. Both captures escape it, so a key can be taken apart again at its first occurrence.
fn separator(between: &str) -> Option<char> {
    between.chars().find(|it| !it.is_alphanumeric() && *it != '%')
}

fn text(pieces: &[Piece]) -> impl Iterator<Item = &str> {
    pieces.iter().filter_map(|piece| match piece {
        Piece::Text(text) => Some(text.as_str()),
        Piece::Capture { .. } => None,
    })
}

fn pieces(template: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        text.push_str(before);
        if let Some(after) = brace.strip_prefix("{{").or_else(|| brace.strip_prefix("}}")) {
            text.push_str(&brace[..1]);
            rest = after;
            continue;
        }
        if brace.starts_with('}') {
            return Err("this `}` closes nothing; write `}}` for a brace in the key".to_owned());
        }
        let Some((inside, after)) = brace[1..].split_once('}') else {
            return Err("this `{` is not closed; write `{{` for a brace in the key".to_owned());
        };
        if !text.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut text)));
        }
        pieces.push(capture(inside)?);
        rest = after;
    }
    text.push_str(rest);
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    Ok(pieces)
}

fn capture(inside: &str) -> Result<Piece, String> {
    let (value, format) = inside.split_once(':').unwrap_or((inside, ""));
    if value.trim().bytes().all(|it| it.is_ascii_digit()) {
        return Err(format!("a key captures names: write `{{name}}` instead of `{{{inside}}}`"));
    }
    let mut parts = value.split('.').map(str::trim);
    // `type` is one too: it captures `r#type`, as in `format!`.
    let name = parts.next().filter(|it| is_name(it));
    let steps = parts.map(|part| match part.strip_suffix("()") {
        Some(call) => is_name(call).then(|| Step::Call(call.to_owned())),
        None => (is_name(part) || is_number(part)).then(|| Step::Field(part.to_owned())),
    });
    let (Some(name), Some(steps)) = (name, steps.collect()) else {
        return Err(format!(
            "a key captures a name, or its fields and calls without arguments, such as `{{user.id}}` and \
             `{{id.value()}}`; for `{{{inside}}}` write `key = {{ let value = …; lockkit::key!(\"…{{value}}…\") }}`"
        ));
    };
    Ok(Piece::Capture { value: Captured { name: name.to_owned(), steps }, format: format.to_owned() })
}

fn is_name(text: &str) -> bool {
    // Not all letters may begin a name, and the parser takes spaces and `r#`.
    text.chars().all(|it| it == '_' || it.is_alphanumeric())
        && Ident::parse_any.parse_str(text).is_ok()
        && !matches!(text, "_" | "await")
}

fn is_number(text: &str) -> bool {
    text.parse().is_ok_and(|it: u32| it.to_string() == text)
}

fn check_text(pieces: &[Piece]) -> Result<(), String> {
    if pieces.is_empty() {
        return Err("the key is empty; give the lock a name, such as \"order:{user_id}\"".to_owned());
    }
    if text(pieces).map(str::len).sum::<usize>() > MAX_KEY_BYTES {
        return Err(format!("the key is longer than {MAX_KEY_BYTES} bytes; use a shorter name"));
    }
    if text(pieces).any(|it| it.contains(char::is_control)) {
        return Err("the key contains a control character (such as NUL or a line break); remove it".to_owned());
    }
    if text(pieces).any(|it| it.contains(is_invisible)) {
        return Err(
            "the key contains a character that people cannot see, or that turns the direction of the text; remove it"
                .to_owned(),
        );
    }
    Ok(())
}

/// Two keys that differ in such a character look the same. The rule of `Key`.
fn is_invisible(char: char) -> bool {
    if matches!(char, '\u{200c}' | '\u{200d}' | '\u{fe0e}' | '\u{fe0f}') {
        return false;
    }
    matches!(char,
        '\u{ad}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
        | '\u{890}'..='\u{891}' | '\u{8e2}'
        | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

fn check_separators(pieces: &[Piece]) -> Result<(), String> {
    match gaps(pieces).find(|(_, text, _)| separator(text).is_none()) {
        None => Ok(()),
        Some((left, _, right)) => Err(format!(
            "put a separator such as `:` between `{{{left}}}` and `{{{right}}}`; without one, two different pairs of \
             values make the same key"
        )),
    }
}

impl fmt::Display for Captured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.steps.iter().try_for_each(|step| match step {
            Step::Field(name) => write!(f, ".{name}"),
            Step::Call(name) => write!(f, ".{name}()"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_text_and_captures() {
        let template = Template::parse("a:{x}-{ y :>5}{{é}}").expect("a template");
        let variable = |name: &str| Captured { name: name.to_owned(), steps: Vec::new() };
        let capture = |value: Captured, format: &str| Piece::Capture { value, format: format.to_owned() };
        let text = |text: &str| Piece::Text(text.to_owned());
        let pieces = [text("a:"), capture(variable("x"), ""), text("-"), capture(variable("y"), ">5"), text("{é}")];
        assert_eq!(template.pieces, pieces);
        let steps = ["id", "0"].map(|it| Step::Field(it.to_owned())).into_iter();
        let value =
            Captured { name: "self".to_owned(), steps: steps.chain([Step::Call("value".to_owned())]).collect() };
        assert_eq!(value.to_string(), "self.id.0.value()");
        let template = Template::parse("{ self . id.0.value():?}").expect("a template");
        assert_eq!(template.pieces, [capture(value, "?")]);
        assert_eq!(
            Template::parse("nightly").map(|it| it.constant().map(str::to_owned)),
            Ok(Some("nightly".to_owned()))
        );
        assert_eq!(Template::parse("{x}").map(|it| it.constant().is_none()), Ok(true));
    }

    #[test]
    fn the_separators_are_the_first_punctuation_between_captures() {
        for (template, separators) in [
            ("report-{date}", ""),
            ("{{a}}-{b}.c", ""),
            ("a:{x}-{y}.", "-"),
            ("{a}%::-{b}:{c}", ":"),
            ("{a} - {b}x/{c}", " /"),
            ("a", ""),
        ] {
            assert_eq!(Template::parse(template).map(|it| it.separators()), Ok(separators.to_owned()), "{template}");
        }
    }

    #[test]
    fn what_is_not_a_template_is_refused() {
        let long = "x".repeat(256);
        for bad in [
            "",
            "{",
            "}",
            "{}",
            "{0}",
            "{:?}",
            "{0.id}",
            "{.id}",
            "{l.}",
            "{l.0x}",
            "{l.await}",
            "{l.f(0)}",
            "{l.f()()}",
            "{l.f ()}",
            "{l?.id}",
            "{&l}",
            "{l[0]}",
            "{a b}",
            "{f()}",
            "{r#type}",
            "a\nb",
            "a\u{200b}b",
            &long,
        ] {
            assert!(Template::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn neighbouring_captures_need_a_separator_that_is_escaped() {
        for bad in ["{a}{b}", "{a}x{b}", "{a}9{b}", "{a}%{b}", "{a}é{b}", "x:{a}:{b}{c}"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        for good in ["{a}:{b}", "{a} {b}", "{a}%:{b}", "{a}{{{b}", "{a}x_y{b}", "{a}"] {
            assert!(Template::parse(good).is_ok(), "{good}");
        }
    }
}
