//! What a request is recognized by.

use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::value::key::Key;

/// SHA-256 of a request as JSON, with the fields of its objects in the order of their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Where the key alone says what is requested.
    pub(super) fn none() -> Self {
        Self([0; 32])
    }

    pub(super) fn of(request: &(impl Serialize + ?Sized)) -> serde_json::Result<Self> {
        let mut text = String::new();
        canonical(&mut text, &serde_json::to_value(request)?);
        Ok(Self(Sha256::digest(text).into()))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// A UUID for this request with this key: version 8 of RFC 9562, by SHA-256. The same in each process and release.
    pub(super) fn uuid(&self, key: &Key) -> String {
        // No key has NUL.
        let digest = Sha256::new().chain_update(key.as_bytes()).chain_update([0]).chain_update(self.0).finalize();
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(digest).for_each(|(byte, of)| *byte = of);
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let mut text = String::with_capacity(36);
        for (at, byte) in bytes.iter().enumerate() {
            let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            // Writing to a `String` cannot fail.
            let _ = write!(text, "{dash}{byte:02x}");
        }
        text
    }
}

/// The order of an object's fields in memory depends on a feature of `serde_json` that any crate may switch on.
fn canonical(text: &mut String, value: &Value) {
    match value {
        Value::Array(values) => {
            text.push('[');
            for value in values {
                canonical(text, value);
                text.push(',');
            }
            text.push(']');
        }
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            text.push('{');
            for (name, value) in fields {
                canonical(text, &Value::from(name.as_str()));
                text.push(':');
                canonical(text, value);
                text.push(',');
            }
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => text.push_str(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_order_of_fields_does_not_count_and_all_else_does() {
        #[derive(Serialize)]
        struct One {
            b: Vec<u8>,
            a: Option<&'static str>,
        }
        #[derive(Serialize)]
        struct Other {
            a: Option<&'static str>,
            b: Vec<u8>,
        }
        let of = |it: Value| Fingerprint::of(&it).unwrap();
        let one = Fingerprint::of(&One { b: vec![1, 2], a: Some("x") }).unwrap();
        assert_eq!(one, Fingerprint::of(&Other { a: Some("x"), b: vec![1, 2] }).unwrap());
        assert_eq!(one, of(json!({"a": "x", "b": [1, 2]})));
        let others = [
            json!({"a": "x", "b": [2, 1]}),
            json!({"a": "x", "b": [12]}),
            json!({"a": "x", "b": ["1", "2"]}),
            json!({"a": null, "b": [1, 2]}),
            json!({"a": "x"}),
            json!([{"a": "x"}, {"b": [1, 2]}]),
            json!("{\"a\":\"x\",\"b\":[1,2]}"),
            json!(null),
        ];
        for other in others {
            assert_ne!(one, of(other.clone()), "{other}");
        }
        assert_ne!(Fingerprint::none(), of(json!(null)));
    }

    #[test]
    fn a_uuid_is_the_same_in_every_release_and_another_for_each_key_and_request() {
        let of = |key: &str, request: u32| Fingerprint::of(&request).unwrap().uuid(&Key::from(key));
        assert_eq!(of("pay:7:8e03978e", 1999), "7ffb971b-6be8-8be3-bc7e-c9df9efebe8d");
        assert_ne!(of("pay:7:8e03978e", 1999), of("pay:7:8e03978f", 1999));
        assert_ne!(of("pay:7:8e03978e", 1999), of("pay:7:8e03978e", 2000));
        let uuid = Fingerprint::none().uuid(&Key::from("k"));
        assert_eq!((uuid.len(), uuid.as_bytes()[14]), (36, b'8'));
        assert!(b"89ab".contains(&uuid.as_bytes()[19]), "{uuid}");
    }

    #[test]
    fn a_fingerprint_is_the_same_in_every_release() {
        let request = json!({"to": "a\"b", "cents": 1999, "tags": [], "note": null, "at": {"y": 2.5, "x": -1}});
        let text = r#"{"at":{"x":-1,"y":2.5,},"cents":1999,"note":null,"tags":[],"to":"a\"b",}"#;
        assert_eq!(Fingerprint::of(&request).unwrap().as_bytes(), &Sha256::digest(text)[..]);
    }
}
