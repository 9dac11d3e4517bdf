//! What is in the keys of etcd, and their names.
#![no_main]

use lockkit_etcd::fuzz::{check_key, check_name, check_value};

libfuzzer_sys::fuzz_target!(|kv: (&[u8], &[u8], &str)| {
    let (key, value, name) = kv;
    check_value(value);
    for start in ["", "p/", "p/a/", "lockkit/last/p/"] {
        check_key(&[start.as_bytes(), key].concat(), value);
    }
    check_name(name);
});
