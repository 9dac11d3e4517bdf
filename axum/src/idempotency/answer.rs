//! An answer as it is stored: status, some headers, and the body.

use axum_core::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, response::Parts};
use http_body::Body as _;
use http_body_util::BodyExt;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// `Idempotent-Replayed: true`, as in Stripe's API: the answer was stored by an earlier request.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// An answer that is about to be stored, or was stored.
#[derive(Deserialize)]
#[serde(try_from = "Stored")]
pub(super) struct Answer {
    parts: Parts,
    /// The headers that are stored.
    stored: Vec<HeaderName>,
    body: Result<Bytes, Unstorable>,
}

/// Why an answer cannot be stored.
#[derive(Debug, thiserror::Error)]
enum Unstorable {
    #[error("its body is a stream, of which nobody knows the length: return a whole body, such as text or `Json`")]
    Stream,
    #[error("its body has {bytes} bytes, and `max_answer` allows {most}")]
    TooLarge { bytes: u64, most: usize },
    #[error("its body has failed: {0}")]
    Failed(axum_core::Error),
}

impl Answer {
    pub(super) async fn of(answer: Response, stored: Vec<HeaderName>, most: usize) -> Self {
        let (parts, body) = answer.into_parts();
        Self { parts, stored, body: whole(body, most).await }
    }

    /// The answer of the request that did the work, with all of its headers.
    pub(super) fn into_response(self) -> Response {
        let Self { parts, stored: _, body } = self;
        // One that cannot be stored was refused.
        Response::from_parts(parts, body.map_or_else(|_| Body::empty(), Body::from))
    }

    /// The answer of a request that was repeated.
    pub(super) fn replayed(self) -> Response {
        let mut answer = self.into_response();
        answer.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
        answer
    }
}

/// The bytes of a body whose length is known and allowed.
async fn whole(body: Body, most: usize) -> Result<Bytes, Unstorable> {
    let bytes = body.size_hint().exact().ok_or(Unstorable::Stream)?;
    if usize::try_from(bytes).map_or(true, |it| it > most) {
        return Err(Unstorable::TooLarge { bytes, most });
    }
    Ok(body.collect().await.map_err(Unstorable::Failed)?.to_bytes())
}

/// What is in the table, as JSON.
#[derive(Serialize, Deserialize)]
struct Stored {
    status: u16,
    headers: Vec<(String, Text)>,
    body: Text,
}

impl Serialize for Answer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { parts, stored, body } = self;
        let body = body.as_ref().map_err(ser::Error::custom)?;
        let is_stored = |(name, _): &(&HeaderName, &HeaderValue)| stored.contains(name);
        let headers = parts.headers.iter().filter(is_stored);
        let headers = headers.map(|(name, value)| (name.to_string(), Text(Bytes::copy_from_slice(value.as_bytes()))));
        Stored { status: parts.status.as_u16(), headers: headers.collect(), body: Text(body.clone()) }
            .serialize(serializer)
    }
}

impl TryFrom<Stored> for Answer {
    type Error = http::Error;

    fn try_from(stored: Stored) -> Result<Self, http::Error> {
        let Stored { status, headers, body: Text(body) } = stored;
        let mut answer = http::Response::new(());
        *answer.status_mut() = StatusCode::from_u16(status)?;
        let mut all = HeaderMap::with_capacity(headers.len());
        for (name, Text(value)) in headers {
            all.append(HeaderName::try_from(name)?, HeaderValue::from_maybe_shared(value)?);
        }
        *answer.headers_mut() = all;
        let (parts, ()) = answer.into_parts();
        Ok(Self { parts, stored: Vec::new(), body: Ok(body) })
    }
}

/// Bytes that are text, as a rule: a string then, which people can read in the table, and otherwise an array.
struct Text(Bytes);

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.serialize_bytes(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("text, or an array of bytes")
            }

            fn visit_str<E>(self, text: &str) -> Result<Bytes, E> {
                Ok(Bytes::copy_from_slice(text.as_bytes()))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut bytes: A) -> Result<Bytes, A::Error> {
                let mut all = Vec::new();
                while let Some(byte) = bytes.next_element()? {
                    all.push(byte);
                }
                Ok(all.into())
            }
        }
        deserializer.deserialize_any(Visitor).map(Self)
    }
}
