//! An error with its causes, as an operator reads it.

use std::error::Error;

/// The text of this error and of its causes. Some errors repeat the text of their cause; it is written once.
///
/// ```
/// use lockkit::{Error, Fault};
///
/// let err = Error::database("listing leases", None, Fault::Other, "permission denied");
/// assert_eq!(lockkit_inspect::with_causes(&err), "database error while listing leases: permission denied");
/// ```
pub fn with_causes(err: &(dyn Error + 'static)) -> String {
    let mut text = err.to_string();
    let mut next = err.source();
    while let Some(source) = next {
        let cause = source.to_string();
        if cause.starts_with(&text) {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use lockkit::{Error, Fault};

    use super::*;

    #[test]
    fn a_cause_is_written_once() {
        let err = |source: &'static str| Error::database("listing leases", None, Fault::Other, source);
        let doing = "database error while listing leases";
        assert_eq!(with_causes(&err("no such column")), format!("{doing}: no such column"));
        assert_eq!(with_causes(&err("listing leases")), doing);
        assert_eq!(with_causes(&err("database error while listing leases of `a`")), format!("{doing} of `a`"));
    }
}
