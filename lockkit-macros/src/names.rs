//! Which texts can be the name of a table or column. Pure; the same rules as `lockkit::sql::ident`, as a test checks.

/// What is wrong with the name of a table, which may have its schema before it.
pub(crate) fn fault_of_table(name: &str) -> Option<&'static str> {
    if name.matches('.').count() > 1 {
        return Some("it has more than a schema and a name; write `app.items`");
    }
    let (schema, table) = name.split_once('.').map_or((None, name), |(schema, table)| (Some(schema), table));
    schema.and_then(fault_of_column).or_else(|| fault_of_column(table))
}

/// What is wrong with the name of a column, or with one part of a table's name.
pub(crate) fn fault_of_column(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if name.len() > 63 {
        Some("it is longer than 63 bytes")
    } else if name.starts_with(|it: char| it.is_ascii_digit()) {
        Some("it starts with a digit")
    } else if name.contains('.') {
        Some("a column is named without its table")
    } else if !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_') {
        Some("only ASCII letters, digits and `_` are allowed")
    } else {
        None
    }
}
