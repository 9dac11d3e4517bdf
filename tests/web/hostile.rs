//! Any request: it is answered, and only one of the page itself takes a lease away. The tests make some, and cargo-fuzz
//! in `fuzz/` looks for more. Panics if a property is broken.

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, Method, Request, Uri},
};
use http_body_util::BodyExt;
use lockkit::{Leases, testing::MemoryStore};
use lockkit_web::{Access, Inspector};
use tokio::runtime::Builder;
use tower::ServiceExt;

/// Stands for the fence of the lease `nightly`, which is held.
const FENCE: &str = "FENCE";

/// What no page has as an element.
const ELEMENT: &str = "<planted";

/// A request as text: method and path in the first line, a header in each line after that, an empty line, and the body.
/// Returns whether it has taken the lease away.
pub(crate) fn check_request(text: &str) -> bool {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(answered(text))
}

async fn answered(text: &str) -> bool {
    let leases = Leases::builder(MemoryStore::new()).sweep_every(None).build().expect("settings");
    let lease = leases.lease("nightly").acquire().await.expect("it is free");
    let (head, body) = text.split_once("\n\n").unwrap_or((text, ""));
    let mut lines = head.lines();
    let (method, uri) = lines.next().and_then(|it| it.split_once(' ')).unwrap_or(("GET", "/locks"));
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in lines.filter_map(|it| it.split_once(": ")) {
        request = request.header(name, value);
    }
    // What is no request does not reach a service.
    let body = body.replace(FENCE, &lease.fence().to_string());
    let Ok(request) = request.body(Body::from(body)) else { return false };
    let may_steal = is_of_page(request.method(), request.uri(), request.headers());
    let inspector = Inspector::new(leases.clone()).access(|_| Access::Steal { by: "ann".to_owned() });
    let app: Router = Router::new().nest("/locks", inspector.router());
    let answer = app.oneshot(request).await.expect("an answer");
    if answer.headers().get("content-type").is_some_and(|it| it.as_bytes().starts_with(b"text/html")) {
        assert!(answer.headers().contains_key("content-security-policy"));
        let page = answer.into_body().collect().await.expect("a page").to_bytes();
        assert!(!String::from_utf8_lossy(&page).contains(ELEMENT), "{text}");
    }
    let after = leases.show("nightly").await.expect("an answer");
    let is_taken = after.is_none_or(|it| it.fence != lease.fence());
    assert!(may_steal || !is_taken, "{text}");
    is_taken
}

/// Whether the page itself may have sent it.
fn is_of_page(method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|it| it.to_str().ok());
    let origin = text("origin").and_then(|it| it.split_once("://")).map(|(_, host)| host.to_lowercase());
    let is_of_host = origin.is_some() && origin == text("host").map(str::to_lowercase);
    let is_of_site = text("sec-fetch-site").map_or(is_of_host, |it| it == "same-origin");
    method == Method::POST && uri.path() == "/locks/steal" && text("x-lockkit") == Some("1") && is_of_site
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADERS: &str = "(\n(host: shop|origin: https?://(shop|evil)|x-lockkit: [01]|\
                           sec-fetch-site: (same-origin|same-site|none)|content-type: application/json|\
                           \\PC{0,3}: \\PC{0,3})){0,6}";

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn only_a_request_of_the_page_takes_a_lease_away(
            head in "(POST|GET|[A-Z]{0,3}) /locks(/steal|/leases.json|/)?(\\?contains=(%3Cplanted|[a-z%]{0,4}))?",
            headers in HEADERS,
            body in "\\{\"key\":\"nightly\",\"fence\":\"(FENCE|[0-9]{0,20})\"\\}|\\PC{0,9}",
        ) {
            check_request(&format!("{head}{headers}\n\n{body}"));
        }
    }

    #[test]
    fn the_request_of_the_page_takes_the_lease_away() {
        let request = "POST /locks/steal\nx-lockkit: 1\nsec-fetch-site: same-origin\n\
                       content-type: application/json\n\n{\"key\":\"nightly\",\"fence\":\"FENCE\"}";
        assert!(check_request(request));
        assert!(!check_request(&request.replace("same-origin", "cross-site")));
    }
}
