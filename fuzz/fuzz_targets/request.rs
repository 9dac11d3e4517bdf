//! A request to the page of `lockkit-web`.
#![no_main]

#[path = "../../tests/web/hostile.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|text: &str| {
    hostile::check_request(text);
});
