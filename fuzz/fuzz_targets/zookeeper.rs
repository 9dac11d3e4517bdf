//! What is in the nodes of ZooKeeper, and their names.
#![no_main]

use lockkit_zookeeper::fuzz::{check_child, check_children, check_data, check_key};

libfuzzer_sys::fuzz_target!(|node: (&[u8], Vec<String>, [u8; 16], u64, &str)| {
    let (data, names, token, number, key) = node;
    check_data(data);
    check_children(&names);
    check_child(token, number);
    check_key(key, names.first().map_or("", String::as_str));
});
