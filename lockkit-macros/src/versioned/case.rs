//! The column names that `#[sqlx(rename_all = "…")]` makes of field names, by sqlx's own rules.

/// How a column is named after its field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    Snake,
    Lower,
    Upper,
    ScreamingSnake,
    Camel,
    Pascal,
}

impl Case {
    /// The names of the cases in sqlx. Not `kebab-case`: lockkit takes no column names with `-`.
    pub(crate) const ALL: [(&'static str, Self); 6] = [
        ("snake_case", Self::Snake),
        ("lowercase", Self::Lower),
        ("UPPERCASE", Self::Upper),
        ("SCREAMING_SNAKE_CASE", Self::ScreamingSnake),
        ("camelCase", Self::Camel),
        ("PascalCase", Self::Pascal),
    ];

    /// The column of a field.
    pub(crate) fn column(self, field: &str) -> String {
        let joined = |separator: &str, each: fn(&str) -> String| {
            words(field).iter().map(|it| each(it)).collect::<Vec<_>>().join(separator)
        };
        match self {
            Self::Lower => field.to_lowercase(),
            Self::Upper => field.to_uppercase(),
            Self::Snake => joined("_", str::to_lowercase),
            Self::ScreamingSnake => joined("_", str::to_uppercase),
            Self::Pascal => joined("", capitalized),
            Self::Camel => {
                let words = words(field);
                let mut words = words.iter();
                let first = words.next().map(|it| it.to_lowercase()).unwrap_or_default();
                words.fold(first, |text, it| text + &capitalized(it))
            }
        }
    }
}

/// The words of a name. A word ends at an underscore, between a small and a capital letter, and before the last of
/// several capitals that a small letter follows.
fn words(name: &str) -> Vec<String> {
    let mut words = Vec::new();
    for part in name.split('_').filter(|it| !it.is_empty()) {
        let letters: Vec<char> = part.chars().collect();
        let mut word = String::new();
        // Of the last letter in this word that has a case.
        let mut was_lower = None;
        for (at, letter) in letters.iter().enumerate() {
            let next_is_lower = letters.get(at + 1).is_some_and(|it| it.is_lowercase());
            let starts =
                letter.is_uppercase() && (was_lower == Some(true) || was_lower == Some(false) && next_is_lower);
            if starts && !word.is_empty() {
                words.push(std::mem::take(&mut word));
            }
            word.push(*letter);
            if letter.is_lowercase() || letter.is_uppercase() {
                was_lower = Some(letter.is_lowercase());
            }
        }
        words.push(word);
    }
    words
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|it| it.to_uppercase().to_string()).unwrap_or_default();
    first + &letters.as_str().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_named_as_sqlx_names_them() {
        let of = |field| Case::ALL.map(|(_, case)| case.column(field));
        assert_eq!(of("item_id"), ["item_id", "item_id", "ITEM_ID", "ITEM_ID", "itemId", "ItemId"]);
        assert_eq!(
            of("line2_of_4x"),
            ["line2_of_4x", "line2_of_4x", "LINE2_OF_4X", "LINE2_OF_4X", "line2Of4x", "Line2Of4x"]
        );
        assert_eq!(of("_private__x"), ["private_x", "_private__x", "_PRIVATE__X", "PRIVATE_X", "privateX", "PrivateX"]);
        assert_eq!(of("itemId"), ["item_id", "itemid", "ITEMID", "ITEM_ID", "itemId", "ItemId"]);
        assert_eq!(of("XMLText"), ["xml_text", "xmltext", "XMLTEXT", "XML_TEXT", "xmlText", "XmlText"]);
        assert_eq!(of("aB9C"), ["a_b9c", "ab9c", "AB9C", "A_B9C", "aB9c", "AB9c"]);
    }
}
