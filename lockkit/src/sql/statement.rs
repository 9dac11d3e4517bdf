//! The text of a statement, written as one literal.

/// A statement whose text is formatted at its first use and kept for the life of the process.
///
/// The placeholders in the literal are filled as by [`format!`], with constants or named arguments. They never contain
/// values: a statement binds values.
macro_rules! statement {
    ($text:literal $(, $place:ident = $clause:expr)* $(,)?) => {{
        static TEXT: std::sync::LazyLock<String> =
            std::sync::LazyLock::new(|| format!($text $(, $place = $clause)*));
        let text: &'static str = &TEXT;
        text
    }};
}

pub(super) use statement;
