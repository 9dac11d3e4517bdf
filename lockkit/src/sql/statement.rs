//! The text of a statement, written as one literal.

/// A statement whose text is made when it is first run and kept for the life of the process.
///
/// The places in the literal are filled as by [`format!`], with constants or with named arguments. Values are never among
/// them: a statement binds those.
macro_rules! statement {
    ($text:literal $(, $place:ident = $clause:expr)* $(,)?) => {{
        static TEXT: std::sync::LazyLock<String> =
            std::sync::LazyLock::new(|| format!($text $(, $place = $clause)*));
        let text: &'static str = &TEXT;
        text
    }};
}

pub(super) use statement;
