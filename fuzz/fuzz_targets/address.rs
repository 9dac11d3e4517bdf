//! Addresses of the stores, with a password.
#![no_main]

libfuzzer_sys::fuzz_target!(|parts: (u8, &str, &str, &str)| {
    let (scheme, before, after, rest) = parts;
    // libFuzzer copies the password that is planted.
    if [before, after, rest].iter().any(|it| it.contains("s3cr3t")) {
        return;
    }
    let of = |schemes: &[&'static str]| schemes[usize::from(scheme) % schemes.len()];
    lockkit_redis::fuzz::check_address(of(&["redis://", "rediss://", "unix://", ""]), before, after, rest);
    lockkit_zookeeper::fuzz::check_address(of(&["", "tcp://", "tcp+tls://"]), before, after, rest);
    lockkit_etcd::fuzz::check_address(of(&["http://", "https://", ""]), before, after, rest);
});
