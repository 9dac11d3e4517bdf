//! An axum service for one test.

use std::{net::SocketAddr, time::Duration};

use axum::Router;
use reqwest::{Client, RequestBuilder, Response};
use tokio::{net::TcpListener, task::JoinHandle};

/// A service on loopback, until it is dropped.
pub(crate) struct Server {
    address: SocketAddr,
    serving: JoinHandle<()>,
    client: Client,
}

impl Server {
    pub(crate) async fn of(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.expect("serve") });
        // A request that hangs fails its test.
        let client = Client::builder().timeout(Duration::from_secs(60)).build().expect("a client");
        Self { address, serving, client }
    }

    /// A `POST` to this path.
    pub(crate) fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("http://{}{path}", self.address))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// The members of a problem, after checks of what all of them have in common.
pub(crate) async fn problem(answer: Response) -> (String, String) {
    assert_eq!(answer.headers()["content-type"], "application/problem+json");
    let status = answer.status().as_u16();
    let body = answer.text().await.expect("a body");
    let problem: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(problem["status"], status);
    let text = |name: &str| problem[name].as_str().expect("text").to_owned();
    assert!(text("type") == "about:blank" || text("type").starts_with("https://"), "{body}");
    (text("title"), text("detail"))
}
