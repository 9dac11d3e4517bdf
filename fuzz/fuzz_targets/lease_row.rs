//! A row of the table of leases.
#![no_main]

libfuzzer_sys::fuzz_target!(|row: ([i64; 5], Option<i64>, &[u8], &[u8])| {
    let (numbers, ttl_us, token, name) = row;
    lockkit::fuzz::check_lease_row(name, token, numbers, ttl_us);
});
