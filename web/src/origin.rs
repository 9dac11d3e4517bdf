//! Whether a request comes from the page itself, and not from a page of another origin.

use axum::http::{HeaderMap, header};

/// A script of another origin cannot set this header without asking the service first, which refuses.
const HEADER: (&str, &str) = ("x-lockkit", "1");

/// Browsers send `Sec-Fetch-Site` over TLS and to loopback addresses. Elsewhere the origin must be the host.
pub(crate) fn is_same(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|it| it.to_str().ok());
    let is_from_page = match text("sec-fetch-site") {
        Some(site) => site == "same-origin",
        None => match (text(header::ORIGIN.as_str()), text(header::HOST.as_str())) {
            (Some(origin), Some(host)) => origin.split_once("://").is_some_and(|(_, it)| it.eq_ignore_ascii_case(host)),
            _ => false,
        },
    };
    is_from_page && text(HEADER.0) == Some(HEADER.1)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_request_must_come_from_the_same_origin_and_say_so() {
        let is_same = |list: &[(&'static str, &'static str)]| {
            is_same(
                &list
                    .iter()
                    .map(|(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value)))
                    .collect(),
            )
        };
        let ours = ("x-lockkit", "1");
        let (site, host) = ("sec-fetch-site", ("host", "shop:8080"));
        assert!(is_same(&[ours, (site, "same-origin")]));
        assert!(is_same(&[ours, host, ("origin", "http://shop:8080")]));
        for refused in [
            &[][..],
            &[ours],
            &[(site, "same-origin")],
            &[("x-lockkit", "0"), (site, "same-origin")],
            &[ours, (site, "cross-site")],
            &[ours, (site, "same-site")],
            &[ours, (site, "none")],
            &[ours, host],
            &[ours, host, ("origin", "null")],
            &[ours, host, ("origin", "http://shop:8081")],
            &[ours, host, ("origin", "http://evil")],
            &[ours, ("origin", "http://shop:8080")],
            &[ours, host, ("origin", "http://shop:8080"), (site, "cross-site")],
        ] {
            assert!(!is_same(refused), "{refused:?}");
        }
    }
}
