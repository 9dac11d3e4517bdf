//! Values and keys that lockkit did not write: they are refused or left alone, and no panic. Also addresses with a
//! password. Proptest makes some for the tests, and cargo-fuzz in `fuzz/` looks for more. The functions panic if a
//! property is broken.

use crate::{
    builder::{EtcdStoreBuilder, addresses},
    layout::{Record, escape, foreign, is_own, name_of, name_of_last},
};

/// What stands for the password.
const SECRET: &str = "s3cr3t-9f2c";

/// A value is a record of lockkit, and the same when it is written again, or another's.
pub fn check_value(value: &[u8]) {
    if let Some(record) = Record::parse(value) {
        assert!(is_own(value));
        let _ = record.age();
        assert_eq!(Record::parse(record.text().as_bytes()), Some(record));
    }
}

/// A key is of one lease, or of none. What is said of another owner's can be shown.
pub fn check_key(key: &[u8], value: &[u8]) {
    let said = foreign(key, value);
    assert!(!said.contains(char::is_control), "{said:?}");
    if let Some((name, last)) = name_of("p/", key) {
        assert_eq!(format!("p/{}/{last}", escape(&name)).as_bytes(), key);
    }
    if let Some(name) = name_of_last("p/", key) {
        assert_eq!(format!("lockkit/last/p/{}", escape(&name)).as_bytes(), key);
    }
}

/// A name is found in its keys.
pub fn check_name(name: &str) {
    if name.is_empty() {
        return;
    }
    let (key, last) = (format!("p/{}/x", escape(name)), format!("lockkit/last/p/{}", escape(name)));
    assert_eq!(name_of("p/", key.as_bytes()), Some((name.into(), "x")));
    assert_eq!(name_of_last("p/", last.as_bytes()), Some(name.into()));
}

/// An address with a password that has these texts around a secret.
pub fn check_address(scheme: &str, before: &str, after: &str, rest: &str) {
    let endpoint = format!("{scheme}app:{before}{SECRET}{after}@etcd1:2379/x");
    let shown = addresses(std::slice::from_ref(&endpoint));
    assert!(shown.ends_with("etcd1:2379"), "{shown}");
    let builder = EtcdStoreBuilder::new(vec![format!("{endpoint}{rest}"), endpoint]).prefix("p/");
    let shown = format!("{shown} {builder:?}");
    assert!(!shown.contains(SECRET), "{shown}");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit::store::Token;
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::layout::State;

    /// Values of lockkit, with some bytes changed, and any other values.
    fn values() -> impl Strategy<Value = Vec<u8>> {
        let record =
            |state| Record::now(state, Token::from_bytes([7; 16]), Duration::from_secs(1), "host\nname").text();
        let own = [State::Waiting, State::Held, State::Nobody, State::Expired].map(record);
        let edits = vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..4);
        let changed = (prop::sample::select(own.to_vec()), edits).prop_map(|(text, edits)| {
            let mut value = text.into_bytes();
            for (at, byte, how) in edits {
                let at = at.index(value.len() + 1);
                match how {
                    0 => value.insert(at, byte),
                    1 => value.truncate(at),
                    _ => value.iter_mut().skip(at).take(1).for_each(|it| *it = byte),
                }
            }
            value
        });
        let numbers = "lockkit1\n(held|expired)\n[0-9a-f]{32}\n[0-9]{0,20}\n[0-9]{0,20}\n-?[0-9]{0,19}\n(\\PC|\n){0,9}";
        prop_oneof![any::<Vec<u8>>(), changed, numbers.prop_map(String::into_bytes)]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_value_is_a_record_or_anothers(value in values()) {
            check_value(&value);
        }

        #[test]
        fn any_key_is_of_one_lease_or_of_none(
            bytes in any::<Vec<u8>>(), text in "(p/|lockkit/last/p/)([a-z]/)?(\\PC|[%25fF/]){0,9}", value in values(),
        ) {
            for key in [&bytes, text.as_bytes()] {
                check_key(key, &value);
            }
        }

        #[test]
        fn a_name_is_found_in_its_key(name in "[%25f/.a]{1,6}|\\PC{1,20}") {
            check_name(&name);
        }

        #[test]
        fn no_address_shows_its_password(
            before in "[/@:,?#a-z0-9.]{0,4}", after in "[/@:,?#a-z0-9.]{0,4}", scheme in "(https?://)?",
            rest in "[/:,?#a-z0-9.]{0,4}",
        ) {
            check_address(&scheme, &before, &after, &rest);
        }
    }
}
