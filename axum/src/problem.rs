//! Refusals as HTTP answers: problem details (RFC 9457) that say nothing of keys, tables or SQL.

use axum_core::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{
    HeaderValue, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};

/// The target of every event, which is not the path of a module.
pub(crate) const TARGET: &str = "lockkit_axum";

/// A pause after which a new attempt may succeed, in seconds. The shortest that the header can say.
const PAUSE: HeaderValue = HeaderValue::from_static("1");

/// What a client is told. Its texts are constants, so they need no escapes and give nothing away.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    /// What kind of problem it is, if its status does not say that: a URI, and its title.
    pub(crate) kind: Option<(&'static str, &'static str)>,
    pub(crate) detail: &'static str,
    /// Whether the same request may succeed a moment later.
    pub(crate) may_repeat: bool,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, kind, detail, may_repeat } = self;
        let (uri, title) = kind.unwrap_or(("about:blank", status.canonical_reason().unwrap_or_default()));
        let number = status.as_u16();
        let body = format!(r#"{{"type":"{uri}","title":"{title}","status":{number},"detail":"{detail}"}}"#);
        let mut answer = Response::new(Body::from(body));
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if may_repeat {
            headers.insert(RETRY_AFTER, PAUSE);
        }
        answer
    }
}
