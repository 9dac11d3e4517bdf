//! What others wrote or answered: it is read or refused, and no panic. Also addresses with a password. Proptest makes
//! some for the tests, and cargo-fuzz in `fuzz/` looks for more. The functions panic if a property is broken.

use redis::{Client, Value};

use crate::{answer::codes, builder::RedisStoreBuilder, claim, fit::refuse_unfit, look};

/// What stands for the password.
const SECRET: &str = "s3cr3t-9f2c";

/// An answer of a script.
pub fn check_answer(value: &Value) {
    drop(claim::answer(value.clone()));
    drop(codes(1, value.clone()));
    if let Ok((seen, _)) = look::records(value.clone()) {
        // What is shown of it is finite.
        drop(format!("{seen:?}"));
    }
}

/// An answer as it is sent.
pub fn check_wire(bytes: &[u8]) {
    if let Ok(value) = redis::parse_redis_value(bytes) {
        check_answer(&value);
    }
}

/// The answer to INFO.
pub fn check_info(text: &str) {
    drop(refuse_unfit(Ok(text.to_owned())));
}

/// An address whose password has these texts around a secret.
pub fn check_address(scheme: &str, before: &str, after: &str, rest: &str) {
    let client = match Client::open(format!("{scheme}app:{before}{SECRET}{after}@redis1:6379/{rest}")) {
        Ok(client) => client,
        // A password that ends the user's part of the address: then this is a part that the client shows.
        Err(err) => {
            let is_shown = before.contains(['@', '/', '?', '#', '\\']);
            return assert!(is_shown || !format!("{err} {err:?}").contains(SECRET), "{err:?}");
        }
    };
    // A password that ends the user's part of the address: then this is the address.
    let is_host = client.get_connection_info().addr().to_string().contains(SECRET);
    let builder = RedisStoreBuilder::new(client.into());
    let shown = format!("{} {builder:?}", builder.address());
    assert!(is_host || !shown.contains(SECRET), "{shown}");
}

#[cfg(test)]
mod tests {
    use lockkit::store::Token;
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::layout::Layout;

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
            check_answer(&value);
        }

        #[test]
        fn any_lease_in_an_answer_is_read_or_refused(value in leases()) {
            check_answer(&value);
        }

        #[test]
        fn any_info_is_read(
            text in "((redis_version|cluster_enabled|role|maxmemory(_policy)?):([0-9.]{0,6}|\\PC{0,6})\r\n){0,6}",
        ) {
            check_info(&text);
        }

        #[test]
        fn no_address_shows_its_password(
            scheme in "(rediss?|unix|redis\\+unix)://",
            before in "[/@:,?#%a-z0-9.]{0,4}", after in "[/@:,?#%a-z0-9.]{0,4}", rest in "[/@:,?#%&=a-z0-9.]{0,9}",
        ) {
            check_address(&scheme, &before, &after, &rest);
        }
    }
}
