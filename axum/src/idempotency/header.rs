//! The syntax of the header. Pure.

use axum_core::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, StatusCode};
use tracing::debug;

use crate::problem::{Problem, TARGET};

pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Where clients can read about the header. RFC 9457 wants a URI for each kind of problem.
const ABOUT: &str = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07";

/// The longest key in bytes: twice that of SHA-256 in hexadecimal digits. It leaves room for the user in
/// [`lockkit::Key::MAX_BYTES`].
pub(super) const MAX_BYTES: usize = 128;

/// Why a request has no usable idempotency key. Answered with 400, and a body as that of
/// [`LockError`](crate::LockError).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.detail())]
#[non_exhaustive]
pub enum IdempotencyKeyRejection {
    /// There is no such header.
    Missing,
    /// There is more than one such header.
    Repeated,
    /// The key has no characters, or only spaces.
    Empty,
    /// The key has more than 128 bytes.
    TooLong,
    /// The value is neither a string in quotes, nor visible ASCII without quotes, commas and semicolons.
    Malformed,
}

impl IdempotencyKeyRejection {
    fn title(self) -> &'static str {
        match self {
            Self::Missing => "Idempotency-Key is missing",
            Self::Repeated => "Idempotency-Key is repeated",
            Self::Empty => "Idempotency-Key is empty",
            Self::TooLong => "Idempotency-Key is too long",
            Self::Malformed => "Idempotency-Key is malformed",
        }
    }

    fn detail(self) -> &'static str {
        match self {
            Self::Missing => "this operation requires the header Idempotency-Key",
            Self::Repeated => "the header Idempotency-Key must be sent once",
            Self::Empty => "the key in the header Idempotency-Key is empty",
            Self::TooLong => "the key in the header Idempotency-Key is longer than 128 characters",
            Self::Malformed => "the header Idempotency-Key must be a string of ASCII characters in double quotes",
        }
    }
}

impl IntoResponse for IdempotencyKeyRejection {
    fn into_response(self) -> Response {
        debug!(target: TARGET, error = %self, status = 400, "request refused");
        let kind = Some((ABOUT, self.title()));
        Problem { status: StatusCode::BAD_REQUEST, kind, detail: self.detail(), may_repeat: false }.into_response()
    }
}

/// The key in the headers of a request.
pub(super) fn key(headers: &HeaderMap) -> Result<String, IdempotencyKeyRejection> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let value = values.next().ok_or(IdempotencyKeyRejection::Missing)?;
    if values.next().is_some() {
        return Err(IdempotencyKeyRejection::Repeated);
    }
    let value = value.to_str().map_err(|_| IdempotencyKeyRejection::Malformed)?.trim();
    let key = match value.strip_prefix('"') {
        Some(rest) => quoted(rest)?,
        None => bare(value)?,
    };
    if key.trim().is_empty() {
        return Err(IdempotencyKeyRejection::Empty);
    }
    if key.len() > MAX_BYTES {
        return Err(IdempotencyKeyRejection::TooLong);
    }
    Ok(key)
}

/// A string of structured fields (RFC 9651, section 3.3.3) after its first quote. The parameters that may follow it
/// have no meaning here, and are ignored.
fn quoted(rest: &str) -> Result<String, IdempotencyKeyRejection> {
    let mut key = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next() {
            Some('"') => break,
            Some('\\') => match chars.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err(IdempotencyKeyRejection::Malformed),
            },
            Some(plain @ ' '..='~') => key.push(plain),
            _ => return Err(IdempotencyKeyRejection::Malformed),
        }
    }
    let after = chars.as_str().trim_start();
    if after.is_empty() || after.starts_with(';') { Ok(key) } else { Err(IdempotencyKeyRejection::Malformed) }
}

/// Without quotes, as most clients send it: those of Stripe's API, for example.
fn bare(value: &str) -> Result<String, IdempotencyKeyRejection> {
    let is_allowed = |it: char| it.is_ascii_graphic() && !matches!(it, '"' | ',' | ';');
    if value.chars().all(is_allowed) { Ok(value.to_owned()) } else { Err(IdempotencyKeyRejection::Malformed) }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn of(values: &[&[u8]]) -> Result<String, IdempotencyKeyRejection> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(IDEMPOTENCY_KEY, HeaderValue::from_bytes(value).unwrap());
        }
        key(&headers)
    }

    #[test]
    fn a_key_is_the_same_with_and_without_quotes() {
        for (value, key) in [
            ("\"8e03978e-40d5\"", "8e03978e-40d5"),
            ("8e03978e-40d5", "8e03978e-40d5"),
            ("  \"a\"  ", "a"),
            (r#""a \" b, \\ ;c""#, r#"a " b, \ ;c"#),
            ("\"a\";v=1; w", "a"),
            ("a:b/c=%_'", "a:b/c=%_'"),
        ] {
            assert_eq!(of(&[value.as_bytes()]).as_deref(), Ok(key), "{value}");
        }
        assert_eq!(of(&[&[b'x'; MAX_BYTES]]).map(|it| it.len()), Ok(MAX_BYTES));
    }

    #[test]
    fn what_is_no_key_is_refused_with_the_reason() {
        use IdempotencyKeyRejection::{Empty, Malformed, Missing, Repeated, TooLong};

        assert_eq!(of(&[]), Err(Missing));
        assert_eq!(of(&[b"a", b"a"]), Err(Repeated));
        for empty in ["", "  ", "\"\"", "\" \""] {
            assert_eq!(of(&[empty.as_bytes()]), Err(Empty), "{empty}");
        }
        assert_eq!(of(&[&[b'x'; MAX_BYTES + 1]]), Err(TooLong));
        for malformed in
            ["\"a", "\"a\"b", "\"a\", \"b\"", r#""\a""#, r#""\"#, "a, b", "a b", "a;b", "a\"", "\"a\tb\"", "ключ"]
        {
            assert_eq!(of(&[malformed.as_bytes()]), Err(Malformed), "{malformed}");
        }
        assert_eq!(of(&[b"\xff"]), Err(Malformed));
    }
}
