//! Keys, templates of keys, and names of tables.
#![no_main]

use lockkit::fuzz::{check_identifier, check_key, check_prefix, check_template};

libfuzzer_sys::fuzz_target!(|texts: (&str, &str)| {
    let (first, second) = texts;
    check_key(first);
    check_identifier(first);
    check_template(first, second);
    check_prefix(first, second);
});
