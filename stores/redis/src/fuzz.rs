//! Answers that no script gives: they are errors, and no panic.

use lockkit::store::Token;
use proptest::{collection::vec, prelude::*};
use redis::Value;

use crate::{answer::codes, claim, layout::Layout, look};

/// Any answer of a server, many of them nearly right.
fn answers() -> impl Strategy<Value = Value> {
    let number = prop_oneof![any::<i64>(), -1..3_i64, Just(i64::MAX), Just(i64::MIN)];
    let text = prop_oneof![
        any::<Vec<u8>>(),
        "[0-9a-f-]{0,40}(:1)?".prop_map(String::into_bytes),
        Just(Layout::Token.id(Token::from_bytes([7; 16])).into_bytes()),
    ];
    let leaf = prop_oneof![
        Just(Value::Nil),
        Just(Value::Okay),
        number.prop_map(Value::Int),
        text.prop_map(Value::BulkString),
        any::<String>().prop_map(Value::SimpleString),
        any::<f64>().prop_map(Value::Double),
        any::<bool>().prop_map(Value::Boolean),
    ];
    leaf.prop_recursive(3, 64, 12, |inner| {
        prop_oneof![
            4 => vec(inner.clone(), 0..13).prop_map(Value::Array),
            1 => vec(inner.clone(), 0..4).prop_map(Value::Set),
            1 => vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    })
}

/// A lease as a list answers it, with numbers and texts of any size.
fn leases() -> impl Strategy<Value = Value> {
    let text =
        || prop_oneof![any::<Vec<u8>>(), "[0-9a-f]{32}".prop_map(String::into_bytes)].prop_map(Value::BulkString);
    let number = || prop_oneof![any::<i64>(), Just(i64::MAX), Just(i64::MIN), -1..2_i64].prop_map(Value::Int);
    let texts =
        (text(), text(), number(), text()).prop_map(|(key, id, is_ours, holder)| vec![key, id, is_ours, holder]);
    (texts, vec(number(), 6..8)).prop_map(|(texts, numbers)| {
        let lease = Value::Array([texts, numbers].concat());
        Value::Array(vec![Value::BulkString(Vec::new()), lease])
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_answer_is_read_or_refused(value in answers()) {
        drop(claim::answer(value.clone()));
        drop(codes(1, value.clone()));
        drop(look::records(value));
    }

    #[test]
    fn any_lease_in_an_answer_is_read_or_refused(value in leases()) {
        drop(look::records(value));
    }
}
