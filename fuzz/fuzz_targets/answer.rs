//! An answer that is stored in the database.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &[u8]| lockkit::fuzz::check_answer(text));
