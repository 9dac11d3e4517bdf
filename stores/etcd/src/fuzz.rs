//! Values and keys that lockkit did not write: they are refused or left alone, and no panic. Also addresses with a
//! password.

use std::time::Duration;

use lockkit::store::Token;
use proptest::{collection::vec, prelude::*};

use crate::{
    builder::addresses,
    layout::{Record, State, escape, is_own, name_of, name_of_last},
};

/// Values of lockkit, with some bytes changed, and any other values.
fn values() -> impl Strategy<Value = Vec<u8>> {
    let record = |state| Record::now(state, Token::from_bytes([7; 16]), Duration::from_secs(1), "host\nname").text();
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
        if let Some(record) = Record::parse(&value) {
            prop_assert!(is_own(&value));
            let _ = record.age();
            prop_assert_eq!(Record::parse(record.text().as_bytes()), Some(record));
        }
    }

    #[test]
    fn any_key_is_of_a_lease_or_of_none(bytes in any::<Vec<u8>>(), text in "(p/|lockkit/last/p/)(\\PC|[%2f/]){0,9}") {
        for key in [&bytes, text.as_bytes()] {
            drop(name_of("p/", key));
            drop(name_of_last("p/", key));
        }
    }

    #[test]
    fn a_name_is_found_in_its_key(name in "[%25f/.a]{1,6}|\\PC{1,20}") {
        let (key, last) = (format!("p/{}/x", escape(&name)), format!("lockkit/last/p/{}", escape(&name)));
        prop_assert_eq!(name_of("p/", key.as_bytes()), Some((name.as_str().into(), "x")));
        prop_assert_eq!(name_of_last("p/", last.as_bytes()), Some(name.as_str().into()));
    }

    #[test]
    fn no_address_shows_its_password(
        before in "[/@:,?#a-z0-9.]{0,4}", after in "[/@:,?#a-z0-9.]{0,4}", scheme in "(https?://)?",
    ) {
        let endpoint = format!("{scheme}app:{before}s3cr3t{after}@etcd1:2379/x");
        let shown = addresses(&[endpoint]);
        prop_assert!(!shown.contains("s3cr3t"), "{shown}");
        prop_assert!(shown.ends_with("etcd1:2379"), "{shown}");
    }
}
