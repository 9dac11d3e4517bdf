//! Data and names that lockkit did not write: they are refused or left alone, and no panic. Also addresses with a
//! password. Proptest makes some for the tests, and cargo-fuzz in `fuzz/` looks for more. The functions panic if a
//! property is broken.

use lockkit::store::Token;

use crate::{
    builder::{ZooKeeperStoreBuilder, check_root, has_user, shown},
    child::Child,
    key::{escape, unescape},
    layout::{Layout, Place, queue},
    note::{Content, Note},
};

/// What stands for the password.
const SECRET: &str = "s3cr3t-9f2c";

/// The data of a node are lockkit's, and the same when they are written again, or another's.
pub fn check_data(data: &[u8]) {
    if let Some(child) = Child::decode(data) {
        assert_eq!(Child::decode(&child.encode()), Some(child));
    }
    match Content::of(data) {
        Content::Note(note) => {
            assert_eq!(Note::decode(&note.encode()), Some(note.clone()));
            drop(note.previous(i64::MIN, i64::MAX));
        }
        Content::Lock | Content::Foreign => assert_eq!(Note::decode(data), None),
    }
}

/// A child has a place in the queue, or none.
pub fn check_children(names: &[String]) {
    let places = queue(names);
    assert!(places.is_sorted_by_key(|it| it.number) && places.len() <= names.len());
    for place in places {
        let _ = place.token();
    }
}

/// A claim is found in the name of its child.
pub fn check_child(token: [u8; 16], number: u64) {
    let (token, number) = (Token::from_bytes(token), number % (1 << 31));
    for layout in [Layout::Curator, Layout::Kazoo] {
        let place = Place::of(&format!("{}{number:010}", layout.prefix(token))).expect("a place");
        assert_eq!((place.number, place.token()), (number, Some(token)));
    }
}

/// A key is found in the name of its node, and a name is that of one key.
pub fn check_key(key: &str, name: &str) {
    let node = escape(key);
    assert!(!node.contains('/'));
    assert_eq!(unescape(&node).as_deref(), Some(key));
    if let Some(key) = unescape(name) {
        assert_eq!(escape(&key), name);
    }
}

/// Addresses with a password that has these texts around a secret, and a root.
pub fn check_address(scheme: &str, before: &str, after: &str, root: &str) {
    let hosts = format!("{scheme}app:{before}{SECRET}{after}@zk1:2181");
    let _ = has_user(&hosts);
    let builder = ZooKeeperStoreBuilder::new(&hosts).root(root);
    let shown = format!("{} {builder:?}", shown(&hosts));
    assert!(!shown.contains(SECRET), "{shown}");
    drop(check_root(root));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit::Fence;
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::note::Last;

    /// Data of lockkit, with some bytes changed, and any other data.
    fn data() -> impl Strategy<Value = Vec<u8>> {
        let token = Token::from_bytes([7; 16]);
        let last = Last { token, fence: Fence::from(77), holder: "host\nname".to_owned() };
        let child = Child { token, ttl: Duration::from_secs(1), holder: "host".to_owned() };
        let own =
            [child.encode(), Note::Held(last.clone()).encode(), Note::Expired(last).encode(), Note::Free.encode()];
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
            check_data(&data);
        }

        #[test]
        fn any_name_of_a_child_has_a_place_or_none(
            names in vec("(_c_)?(\\PC|[0-9a-f-]){0,40}(-lock-|__lock__|lock-)?(\\PC|[0-9]){0,11}", 0..4),
        ) {
            check_children(&names);
        }

        #[test]
        fn a_claim_is_found_in_the_names_of_its_layout(token in any::<[u8; 16]>(), number in any::<u64>()) {
            check_child(token, number);
        }

        #[test]
        fn a_key_is_found_in_the_name_of_its_node_and_in_no_other(
            key in "[%2f/.a]{1,6}|\\PC{1,20}", name in "[%2f/.a]{0,6}|\\PC*",
        ) {
            check_key(&key, &name);
        }

        #[test]
        fn no_address_shows_its_password(
            before in "[/@:,?#a-z0-9.]{0,4}", after in "[/@:,?#a-z0-9.]{0,4}", scheme in "(tcp://|tcp\\+tls://)?",
            root in "/?[./a-z]{0,5}|\\PC{0,5}",
        ) {
            check_address(&scheme, &before, &after, &root);
        }
    }
}
