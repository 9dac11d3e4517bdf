//! Key templates: `"order:{user_id}:{kind:?}"`. Pure: text in, pieces out. Its text keeps the rules of `lockkit::Key`, as a
//! test checks.

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Text that is the same in every key.
    Text(String),
    /// A captured variable, with its format after the colon.
    Capture { name: String, format: String },
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

    /// The punctuation of the template, which is escaped in what is captured.
    pub(crate) fn reserved(&self) -> String {
        let mut reserved: Vec<char> = self.text().flat_map(str::chars).filter(|it| !it.is_alphanumeric()).collect();
        reserved.sort_unstable();
        reserved.dedup();
        reserved.into_iter().collect()
    }

    fn text(&self) -> impl Iterator<Item = &str> {
        text(&self.pieces)
    }
}

fn text(pieces: &[Piece]) -> impl Iterator<Item = &str> {
    pieces.iter().filter_map(|it| match it {
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
    let (name, format) = inside.split_once(':').unwrap_or((inside, ""));
    let name = name.trim();
    if name.bytes().all(|it| it.is_ascii_digit()) {
        return Err(format!("a key captures names: write `{{name}}` instead of `{{{inside}}}`"));
    }
    // `type` is one too: it captures `r#type`, as in `format!`.
    let mut chars = name.chars();
    let plain = chars.next().is_some_and(|it| it == '_' || it.is_alphabetic())
        && chars.all(|it| it == '_' || it.is_alphanumeric());
    if !plain {
        return Err(format!(
            "a capture is a plain name, not `{{{inside}}}`: write `key = format!(\"…{{}}…\", {name})`, \
             or take the value as an argument of its own"
        ));
    }
    Ok(Piece::Capture { name: name.to_owned(), format: format.to_owned() })
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

/// Two keys that differ in such a character look the same.
fn is_invisible(char: char) -> bool {
    matches!(char, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Between two captures there must be a character that is escaped in both of them. `%` is not one: it starts an escape.
fn check_separators(pieces: &[Piece]) -> Result<(), String> {
    let mut last = None;
    let mut separated = true;
    for piece in pieces {
        match piece {
            Piece::Text(text) => separated |= text.contains(|it: char| !it.is_alphanumeric() && it != '%'),
            Piece::Capture { name, .. } => {
                if let Some(last) = last.replace(name)
                    && !separated
                {
                    return Err(format!(
                        "put a separator such as `:` between `{{{last}}}` and `{{{name}}}`; without one, two \
                         different pairs of values make the same key"
                    ));
                }
                separated = false;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_text_and_captures() {
        let template = Template::parse("a:{x}-{ y :>5}{{é}}").expect("a template");
        let capture = |name: &str, format: &str| Piece::Capture { name: name.to_owned(), format: format.to_owned() };
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(template.pieces, [text("a:"), capture("x", ""), text("-"), capture("y", ">5"), text("{é}")]);
        assert_eq!(template.reserved(), "-:{}");
        assert_eq!(
            Template::parse("nightly").map(|it| it.constant().map(str::to_owned)),
            Ok(Some("nightly".to_owned()))
        );
        assert_eq!(Template::parse("{x}").map(|it| it.constant().is_none()), Ok(true));
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
            "{self.id}",
            "{l.0}",
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
