//! Refusals for clients of gRPC, which read the status in a header of its own.

use axum_core::{body::Body, response::Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Whether these are the headers of a request by gRPC.
pub(super) fn is_call(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|it| it.as_bytes().starts_with(b"application/grpc"))
}

/// The refusal as an answer that has no message and ends with its headers. The codes are those that belong to the
/// status in <https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto>.
pub(super) fn trailers_only(refusal: &Response) -> Response {
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
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(STATUS, HeaderValue::from(code));
    headers.insert(MESSAGE, HeaderValue::from_static(status.canonical_reason().unwrap_or_default()));
    answer
}
