//! Refusals for clients of gRPC and gRPC-Web, which read the status in a header of its own.

use axum_core::{body::Body, response::Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// The content type of the answer to a request by gRPC or gRPC-Web. `None` for other requests. An answer of gRPC-Web
/// without a message has its status in the headers, too, and the content type of the request:
/// <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md>.
pub(super) fn answered_as(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers.get(CONTENT_TYPE)?;
    let rest = asked.as_bytes().strip_prefix(b"application/grpc")?;
    let ends = |rest: &[u8]| matches!(rest.first(), None | Some(b'+' | b';' | b' '));
    if ends(rest) {
        return Some(HeaderValue::from_static("application/grpc"));
    }
    let web = rest.strip_prefix(b"-web")?;
    (ends(web) || web.strip_prefix(b"-text").is_some_and(ends)).then(|| asked.clone())
}

/// The refusal as an answer that has no message and ends with its headers. The codes are those that belong to the
/// status in <https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto>.
pub(super) fn trailers_only(refusal: &Response, content_type: HeaderValue) -> Response {
    let status = refusal.status();
    let code = match status {
        StatusCode::BAD_REQUEST => 3,            // INVALID_ARGUMENT
        StatusCode::NOT_FOUND => 5,              // NOT_FOUND
        StatusCode::FORBIDDEN => 7,              // PERMISSION_DENIED
        StatusCode::UNPROCESSABLE_ENTITY => 9,   // FAILED_PRECONDITION
        StatusCode::CONFLICT => 10,              // ABORTED
        StatusCode::SERVICE_UNAVAILABLE => 14,   // UNAVAILABLE
        StatusCode::UNAUTHORIZED => 16,          // UNAUTHENTICATED
        status if status.is_client_error() => 2, // UNKNOWN
        _ => 13,                                 // INTERNAL
    };
    let mut answer = Response::new(Body::empty());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert(STATUS, HeaderValue::from(code));
    headers.insert(MESSAGE, HeaderValue::from_static(status.canonical_reason().unwrap_or_default()));
    answer
}
