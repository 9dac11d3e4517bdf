//! Clients that send the same request again until it is answered.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::http::{StatusCode, header::DATE};
use lockkit_axum::IDEMPOTENT_REPLAYED;
use reqwest::Client;
use tokio::time::{Instant, sleep};

use super::fleet::Addresses;

/// How long a client waits for an answer before it sends its request again.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a client goes on.
const GIVES_UP: Duration = Duration::from_secs(60);

pub(super) struct Clients {
    http: Client,
    addresses: Addresses,
    requests: Cell<u64>,
}

/// An answer, without what belongs to its way: the date, and the mark that it was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) body: Vec<u8>,
}

impl Clients {
    pub(super) fn new(addresses: Addresses) -> Result<Self> {
        let http = Client::builder().timeout(PATIENCE).build()?;
        Ok(Self { http, addresses, requests: Cell::new(0) })
    }

    /// How many requests were sent.
    pub(super) fn requests(&self) -> u64 {
        self.requests.get()
    }

    /// Pays with this key. Returns the answer, and whether it was stored before; `None` if there was none in time.
    pub(super) async fn pay(&self, key: u32) -> Option<(Reply, bool)> {
        let end = Instant::now() + GIVES_UP;
        while Instant::now() < end {
            match self.request(key).await {
                Ok((reply, is_stored)) if !may_be_repeated(reply.status) => return Some((reply, is_stored)),
                // No answer, or one that asks for patience.
                _ => sleep(Duration::from_millis(fastrand::u64(5..50))).await,
            }
        }
        None
    }

    /// Sends the request once, to any process.
    async fn request(&self, key: u32) -> Result<(Reply, bool)> {
        let address = fastrand::choice(self.addresses.borrow().iter().copied()).context("a process")?;
        self.requests.set(self.requests.get() + 1);
        let request = self.http.post(format!("http://{address}/users/{key}/payments"));
        let answer = request.header("idempotency-key", name(key)).json(&i64::from(key)).send().await?;
        let status = answer.status().as_u16();
        let is_stored = answer.headers().contains_key(IDEMPOTENT_REPLAYED);
        let of_answer = answer.headers().iter().filter(|(name, _)| **name != DATE && **name != IDEMPOTENT_REPLAYED);
        let mut headers: Vec<_> =
            of_answer.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
        headers.sort();
        let body = answer.bytes().await?.to_vec();
        Ok((Reply { status, headers, body }, is_stored))
    }
}

/// The key as clients send it.
pub(super) fn name(key: u32) -> String {
    format!("k{key}")
}

/// Whether the same request may be answered otherwise a moment later.
fn may_be_repeated(status: u16) -> bool {
    status == StatusCode::CONFLICT || status >= StatusCode::INTERNAL_SERVER_ERROR.as_u16()
}
