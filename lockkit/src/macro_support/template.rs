//! The key of a template. Pure: text in, key out.

use std::fmt::{self, Write};

use crate::value::key::Key;

/// A piece of a key template.
#[derive(Debug)]
pub enum Piece<'a> {
    /// Literal text of the template.
    Text(&'static str),
    /// A captured value.
    Capture(fmt::Arguments<'a>),
}

/// Builds the key of a template with these separators.
///
/// In captured values, `%`, control characters and the separators are percent-encoded. Between two captures of a
/// template there is a separator, so two different sets of captured values never yield the same key.
pub fn key_of(separators: &'static str, pieces: &[Piece<'_>]) -> Key {
    let mut text = String::new();
    for piece in pieces {
        match *piece {
            Piece::Text(literal) => text.push_str(literal),
            Piece::Capture(value) => {
                let mut escaped = Escaped { text: &mut text, separators };
                // If a `Display` returns an error, the text that it has written is kept. `format!` would panic.
                let _ = escaped.write_fmt(value);
            }
        }
    }
    text.into()
}

struct Escaped<'a> {
    text: &'a mut String,
    separators: &'static str,
}

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            if char == '%' || char.is_control() || self.separators.contains(char) {
                for byte in char.encode_utf8(&mut [0; 4]).bytes() {
                    write!(self.text, "%{byte:02X}")?;
                }
            } else {
                self.text.push(char);
            }
        }
        Ok(())
    }
}

/// The values of two captures can be read back from their key. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_template(first: &str, second: &str) {
    let pieces = [Piece::Capture(format_args!("{first}")), Piece::Text("."), Piece::Capture(format_args!("{second}"))];
    let key = key_of(".", &pieces);
    let (one, other) = key.split_once('.').expect("a separator");
    let value = |escaped: &str| {
        let mut bytes = Vec::new();
        let mut rest = escaped;
        while let Some((before, after)) = rest.split_once('%') {
            bytes.extend(before.as_bytes());
            bytes.push(u8::from_str_radix(&after[..2], 16).expect("two digits"));
            rest = &after[2..];
        }
        bytes.extend(rest.as_bytes());
        String::from_utf8(bytes).expect("the text that was captured")
    };
    assert_eq!((&*value(one), &*value(other)), (first, second));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_key_can_be_taken_apart_again(first in "[a.%20E\n]{0,4}|\\PC*", second in "[a.%20E\n]{0,4}|\\PC*") {
            check_template(&first, &second);
        }
    }

    fn two(first: &str, second: &str) -> Key {
        key_of(
            ".",
            &[Piece::Capture(format_args!("{first}")), Piece::Text("."), Piece::Capture(format_args!("{second}"))],
        )
    }

    #[test]
    fn different_captures_never_make_one_key() {
        assert_eq!(two("a", "b"), "a.b");
        assert_ne!(two("a.b", "c"), two("a", "b.c"));
        assert_ne!(two("a%2Eb", "c"), two("a.b", "c"));
        assert_eq!(two("a.b", "c"), "a%2Eb.c");
        assert_eq!(two("a\n", "ключ"), "a%0A.ключ");
    }
}
