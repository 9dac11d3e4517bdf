//! The name of a lock, checked once. Knows nothing of databases.

use std::{fmt, ops::Deref, sync::Arc};

use crate::value::error::{Error, Result};

/// The name of a lock: printable UTF-8, 1 to 255 bytes, compared byte by byte.
///
/// A key has no control character and no character that shows nothing: no format character of Unicode (such as the soft
/// hyphen and marks of direction), no filler, nothing else that Unicode calls default ignorable. The joiners U+200C and
/// U+200D and the variation selectors U+FE0E and U+FE0F are allowed, because emoji and some scripts need them.
///
/// Text converts into a `Key`, so every function of lockkit with a key takes `impl Into<Key>`. The conversion never
/// fails. If the text is not a valid key, the first operation that uses it returns [`Error::InvalidKey`], before it
/// sends anything to the database. [`Key::new`] returns the error at once.
///
/// The lease table stores keys whole, never shortened or hashed. Keys differ if any byte differs: `"ABC"`, `"abc"` and
/// `"abc "` are three keys on every database.
///
/// A PostgreSQL database whose encoding is not UTF8 can store only the characters of its encoding. On a LATIN1
/// database, a lease or stock with the key `"заказ:42"` fails with [`Error::InvalidKey`]. Named and session locks work,
/// because their keys are hashed there.
///
/// ```
/// use lockkit::Key;
///
/// assert_eq!(Key::new("order:42")?, "order:42");
/// assert!(Key::new("").is_err());
/// assert!(Key::new("two\nlines").is_err());
/// # Ok::<(), lockkit::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    text: Arc<str>,
    fault: Option<&'static str>,
}

impl Key {
    /// The longest key, in bytes of UTF-8.
    pub const MAX_BYTES: usize = 255;

    /// Creates a checked key.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] says what is wrong with `text`.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let key = Self::from(text.as_ref());
        key.check()?;
        Ok(key)
    }

    /// The text of the key.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns an error if the text is not a valid key.
    pub(crate) fn check(&self) -> Result<()> {
        match self.fault {
            None => Ok(()),
            Some(reason) => Err(Error::InvalidKey { key: shown(&self.text), reason }),
        }
    }
}

/// The beginning of a text, with what an operator cannot see as numbers.
fn shown(text: &str) -> String {
    let mut shown = String::new();
    for char in text.chars() {
        if is_invisible(char) {
            shown.extend(char.escape_unicode());
        } else {
            shown.extend(char.escape_debug());
        }
        if shown.len() >= 300 {
            break;
        }
    }
    shown
}

fn fault_of(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        Some("it is empty; give the lock a name")
    } else if text.len() > Key::MAX_BYTES {
        Some("it is longer than 255 bytes; use a shorter name, or a hash of the long part")
    } else if text.chars().any(char::is_control) {
        Some("it contains a control character (such as NUL or a line break)")
    } else if text.chars().any(is_invisible) {
        Some("it contains a character that people cannot see, or that turns the direction of the text")
    } else {
        None
    }
}

/// Whether an operator cannot see the character, so that two different keys would look the same: Unicode's format
/// characters (`Cf`), line and paragraph separators (`Zl`, `Zp`), everything that it calls default ignorable
/// (<https://www.unicode.org/reports/tr44/#Default_Ignorable_Code_Point>, fillers among them), and the blank Braille
/// pattern. Not the joiners and the two selectors that emoji and some scripts need.
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

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self { fault: fault_of(text), text: text.into() }
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<&String> for Key {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl From<&Self> for Key {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

impl Deref for Key {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, f)
    }
}

impl PartialEq<str> for Key {
    fn eq(&self, other: &str) -> bool {
        &*self.text == other
    }
}

impl PartialEq<&str> for Key {
    fn eq(&self, other: &&str) -> bool {
        &*self.text == *other
    }
}

/// Text is a key, or is refused in words that can be shown. Panics otherwise.
#[cfg(any(test, feature = "_fuzz"))]
pub fn check_key(text: &str) {
    let is_shown = |text: &str| !text.chars().any(|it| it.is_control() || is_invisible(it));
    match Key::new(text) {
        Ok(key) => {
            assert_eq!(key.as_str(), text);
            assert!((1..=Key::MAX_BYTES).contains(&text.len()) && is_shown(text), "{text:?}");
        }
        Err(err) => {
            let shown = err.to_string();
            assert!(is_shown(&shown) && shown.len() < 2000, "{shown:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_a_key_or_is_refused_in_words_that_can_be_shown(
            text in "(\\PC|[\\x00-\\x20\u{ad}\u{202e}é🔑]){0,300}",
        ) {
            check_key(&text);
        }
    }

    #[test]
    fn a_key_has_1_to_255_printable_bytes() {
        for good in ["a", "order:42", "заказ:42", "ключ 🔑", "'; DROP TABLE t; --", "%_\\"] {
            assert!(Key::new(good).is_ok(), "{good:?}");
        }
        assert!(Key::new("x".repeat(255)).is_ok());
        for bad in
            ["", "a\0b", "a\nb", "\u{7f}", "\u{85}", "a\u{200b}b", "\u{202e}a", &"x".repeat(256), &"é".repeat(128)]
        {
            assert!(matches!(Key::new(bad), Err(Error::InvalidKey { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_key_has_no_character_that_shows_nothing() {
        for invisible in [
            '\u{ad}',
            '\u{34f}',
            '\u{61c}',
            '\u{115f}',
            '\u{180e}',
            '\u{200b}',
            '\u{2028}',
            '\u{202e}',
            '\u{2060}',
            '\u{2066}',
            '\u{2800}',
            '\u{3164}',
            '\u{feff}',
            '\u{ffa0}',
            '\u{fff9}',
            '\u{1d173}',
            '\u{e0001}',
            '\u{e0061}',
            '\u{e0100}',
        ] {
            assert!(Key::new(format!("a{invisible}b")).is_err(), "{invisible:?}");
        }
        // Joiners and the choice between an emoji and its outline.
        for good in ["👩\u{200d}🔬", "می\u{200c}خواهم", "❤\u{fe0f}", "☎\u{fe0e}", "e\u{301}", "ﷺ"] {
            assert!(Key::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn keys_that_differ_in_any_byte_are_different() {
        assert_ne!(Key::from("abc"), Key::from("abc "));
        assert_ne!(Key::from("abc"), Key::from("ABC"));
        assert_ne!(Key::from("e\u{301}"), Key::from("é"));
        let key = Key::from("abc");
        assert!(key != "ABC" && key != *"ABC");
    }

    #[test]
    fn a_refused_key_is_shown_with_what_people_cannot_see_as_numbers_and_no_longer_than_needed() {
        let shown = |text: &str| match Key::new(text) {
            Err(Error::InvalidKey { key, .. }) => key,
            other => panic!("{other:?}"),
        };
        assert_eq!(shown("two\nlines\u{202e}"), "two\\nlines\\u{202e}");
        assert_eq!(shown(&"x".repeat(1000)), "x".repeat(300));
    }
}
