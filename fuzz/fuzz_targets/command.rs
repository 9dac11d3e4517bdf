//! The command: its arguments, its URLs, the header `Host` of its page, and what it prints of a lease.
#![no_main]
#![allow(dead_code)]

#[path = "../../cli/src/args.rs"]
mod args;
#[path = "../../cli/src/dotenv.rs"]
mod dotenv;
#[path = "../../cli/src/fuzz.rs"]
mod fuzz;
#[path = "../../cli/src/host.rs"]
mod host;
#[path = "../../cli/src/secret.rs"]
mod secret;
#[path = "../../cli/src/table.rs"]
mod table;
#[path = "../../cli/src/target.rs"]
mod target;

const SCHEMES: [&str; 8] = ["postgres", "postgresql", "mysql", "mariadb", "sqlite", "redis", "rediss", "etcd"];

libfuzzer_sys::fuzz_target!(|given: (u8, &str, &str, &str, [u64; 4])| {
    let (scheme, first, second, third, micros) = given;
    // libFuzzer copies the password that is planted.
    if [first, second, third].iter().any(|it| it.contains("s3cr3t")) {
        return;
    }
    fuzz::check_arguments(first);
    fuzz::check_url(SCHEMES[usize::from(scheme) % SCHEMES.len()], first, second, third);
    fuzz::check_host(first.as_bytes());
    fuzz::check_lease(first, second, micros);
});
