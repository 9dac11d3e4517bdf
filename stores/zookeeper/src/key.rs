//! The names of the nodes of keys: which characters are escaped, and how. Pure.

use std::fmt::Write;

/// The name of the node of this key. Two keys never have the same one.
pub(crate) fn escape(key: &str) -> String {
    if matches!(key, "." | "..") {
        // Neither may be the name of a node.
        return key.replace('.', "%2e");
    }
    let mut name = String::with_capacity(key.len());
    let mut bytes = [0; 4];
    for char in key.chars() {
        if is_plain(char) {
            name.push(char);
        } else {
            for byte in char.encode_utf8(&mut bytes).bytes() {
                write!(name, "%{byte:02x}").expect("BUG: writing to a string cannot fail");
            }
        }
    }
    name
}

/// The key whose node has this name. `None` for a node that is not one of a key.
pub(crate) fn unescape(name: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = after.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = after;
    }
    let key = String::from_utf8(bytes).ok()?;
    // One key has one name, so that another client's `%2F` is not taken for ours.
    (escape(&key) == name).then_some(key)
}

/// Whether ZooKeeper takes the character in a name, and it has no meaning here.
fn is_plain(char: char) -> bool {
    // As its `PathUtils.validatePath`, for UTF-16 units: a character above U+FFFF is two units from the refused
    // range.
    !matches!(char, '/' | '%' | '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_readable_and_lead_back_to_their_keys() {
        for (key, name) in [
            ("order:42", "order:42"),
            ("a/b", "a%2fb"),
            ("100%", "100%25"),
            (".", "%2e"),
            ("..", "%2e%2e"),
            ("...", "..."),
            ("é заказ", "é заказ"),
            ("🔑", "%f0%9f%94%91"),
            ("\u{e000}", "%ee%80%80"),
            ("\u{fffd}", "%ef%bf%bd"),
            ("%2f", "%252f"),
        ] {
            assert_eq!(escape(key), name);
            assert_eq!(unescape(name).as_deref(), Some(key));
        }
    }

    #[test]
    fn nodes_that_are_not_those_of_keys_have_no_key() {
        for name in ["%clock", "a%", "a%2", "a%2F", "%61", "%ff", "a/b", "%+1"] {
            assert_eq!(unescape(name), None, "{name}");
        }
    }
}
