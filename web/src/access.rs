//! Who may look and who may steal, and the headers of every answer.

use std::{fmt, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};

/// What a request may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nothing: 403.
    None,
    /// Look.
    ReadOnly,
    /// Look, and take leases from their holders.
    Steal {
        /// The operator, for the event `stolen` in the log.
        by: String,
    },
}

/// Whether a request may pass.
#[derive(Clone)]
pub(crate) enum Gate {
    /// The application has not said who may.
    Closed,
    Asks(Arc<dyn Fn(&Parts) -> Access + Send + Sync>),
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Asks(_) => "asks",
        })
    }
}

const CLOSED: &str = "The inspector is closed, because the service does not say who may look. To open it:

    Inspector::new(leases).access(|parts| Access::ReadOnly)

The function gets the head of each request: decide by the user that your authentication has found.
";

/// Inline scripts and styles, other origins, forms and frames are forbidden.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'self'; \
                      form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, HeaderValue); 4] = [
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
];

/// Lets a request pass with its [`Access`] as an extension, or refuses it.
pub(crate) async fn guard(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let access = match gate {
        Gate::Closed => Err(CLOSED),
        Gate::Asks(may) => {
            let (parts, body) = request.into_parts();
            let access = may(&parts);
            request = Request::from_parts(parts, body);
            if access == Access::None { Err("You may not look at the leases of this service.\n") } else { Ok(access) }
        }
    };
    let mut answer = match access {
        Ok(access) => {
            request.extensions_mut().insert(access);
            next.run(request).await
        }
        Err(refusal) => (StatusCode::FORBIDDEN, refusal).into_response(),
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, value);
    }
    answer
}
