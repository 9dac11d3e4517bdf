//! Data and names that lockkit did not write: they are refused or left alone, and no panic. Also addresses with a
//! password.

use std::time::Duration;

use lockkit::{Fence, store::Token};
use proptest::{collection::vec, prelude::*};

use crate::{
    builder::shown,
    child::Child,
    key::{escape, unescape},
    layout::{Layout, Place, queue},
    note::{Content, Last, Note},
};

/// Data of lockkit, with some bytes changed, and any other data.
fn data() -> impl Strategy<Value = Vec<u8>> {
    let token = Token::from_bytes([7; 16]);
    let last = Last { token, fence: Fence::from(77), holder: "host\nname".to_owned() };
    let child = Child { token, ttl: Duration::from_secs(1), holder: "host".to_owned() };
    let own = [child.encode(), Note::Held(last.clone()).encode(), Note::Expired(last).encode(), Note::Free.encode()];
    let edits = vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..4);
    let changed = (prop::sample::select(own.to_vec()), edits).prop_map(|(mut data, edits)| {
        for (at, byte, how) in edits {
            let at = at.index(data.len() + 1);
            match how {
                0 => data.insert(at, byte),
                1 => data.truncate(at),
                _ => data.iter_mut().skip(at).take(1).for_each(|it| *it = byte),
            }
        }
        data
    });
    prop_oneof![any::<Vec<u8>>(), changed, "lockkit 1\n(\\PC|\n){0,40}".prop_map(String::into_bytes)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_data_are_lockkits_or_anothers(data in data()) {
        if let Some(child) = Child::decode(&data) {
            prop_assert_eq!(Child::decode(&child.encode()), Some(child));
        }
        match Content::of(&data) {
            Content::Note(note) => {
                prop_assert_eq!(Note::decode(&note.encode()), Some(note.clone()));
                drop(note.previous(i64::MIN, i64::MAX));
            }
            Content::Lock | Content::Foreign => prop_assert_eq!(Note::decode(&data), None),
        }
    }

    #[test]
    fn any_name_of_a_child_has_a_place_or_none(
        names in vec("(_c_)?(\\PC|[0-9a-f-]){0,40}(-lock-|__lock__|lock-)?(\\PC|[0-9]){0,11}", 0..4),
    ) {
        for place in queue(&names) {
            let _ = place.token();
        }
    }

    #[test]
    fn a_claim_is_found_in_the_names_of_its_layout(bytes in any::<[u8; 16]>(), number in 0..2_147_483_648_u64) {
        for layout in [Layout::Curator, Layout::Kazoo] {
            let token = Token::from_bytes(bytes);
            let place = Place::of(&format!("{}{number:010}", layout.prefix(token))).expect("a place");
            prop_assert_eq!((place.number, place.token()), (number, Some(token)));
        }
    }

    #[test]
    fn a_key_is_found_in_the_name_of_its_node_and_in_no_other(
        key in "[%2f/.a]{1,6}|\\PC{1,20}", name in "[%2f/.a]{0,6}|\\PC*",
    ) {
        let node = escape(&key);
        prop_assert!(!node.contains('/'));
        prop_assert_eq!(unescape(&node), Some(key));
        if let Some(key) = unescape(&name) {
            prop_assert_eq!(escape(&key), name);
        }
    }

    #[test]
    fn no_address_shows_its_password(
        before in "[/@:,?#a-z0-9.]{0,4}", after in "[/@:,?#a-z0-9.]{0,4}", scheme in "(tcp://|tcp\\+tls://)?",
    ) {
        let hosts = format!("{scheme}app:{before}s3cr3t{after}@zk1:2181");
        prop_assert!(!shown(&hosts).contains("s3cr3t"), "{}", shown(&hosts));
    }
}
