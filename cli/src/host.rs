//! Whether a request was meant for this machine. Pure.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};

/// Whether the browser was told to go to this machine: the name of another web site can be made to point to it. The
/// port may be that of a tunnel.
pub(crate) fn is_meant(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|it| it.is_ascii_digit()) => name,
        _ => host,
    };
    let ip = name.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(name).parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|it| it.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_another_site_is_not_meant() {
        let is_meant = |host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, header::HeaderValue::from_static(host));
            is_meant(&headers)
        };
        for host in ["127.0.0.1:8642", "localhost:9000", "localhost", "[::1]:8642", "127.0.0.1"] {
            assert!(is_meant(host), "{host}");
        }
        for host in ["evil.example:8642", "127.0.0.1.evil.example:8642", "localhost.evil.example", "", "10.0.0.1:8642"]
        {
            assert!(!is_meant(host), "{host}");
        }
        assert!(!super::is_meant(&HeaderMap::new()));
    }
}
