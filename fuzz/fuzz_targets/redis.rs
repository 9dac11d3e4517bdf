//! What a Redis server sends: an answer, or the text of INFO.
#![no_main]

use lockkit_redis::fuzz::{check_info, check_wire};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    check_wire(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        check_info(text);
    }
});
