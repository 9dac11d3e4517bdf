//! What the command does with texts that others wrote, whatever is in them. Proptest makes some for the tests, and
//! cargo-fuzz in `fuzz/` looks for more. The functions panic if a property is broken.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};

use axum::http::{HeaderMap, HeaderValue, header};
use clap::Parser;
use lockkit::store::LeaseInfo;
use sqlx::{MySql, Postgres, Sqlite};
use url::{Host, Url};

use crate::{
    args::{Args, On},
    host::is_meant,
    secret::Secrets,
    table::{json, table},
    target::{Database, Target},
};

/// What stands for the password.
const SECRET: &str = "s3cr3t-9f2c";

/// A line of arguments: it is understood, or refused.
pub(crate) fn check_arguments(line: &str) {
    drop(Args::try_parse_from(["lockkit"].into_iter().chain(line.split(' '))));
}

/// A URL whose password has these texts around [`SECRET`], and one whose option has them, which ends at a `&`.
pub(crate) fn check_url(scheme: &str, before: &str, after: &str, rest: &str) {
    for url in [
        format!("{scheme}://app:{before}{SECRET}{after}@db:1/{rest}"),
        format!("{scheme}://app@db:1/a?{rest}&password={}{SECRET}&{rest}", before.replace('&', "")),
    ] {
        let mut secrets = Secrets::default();
        if let Err(err) = understood(&url, &mut secrets) {
            let shown = secrets.hidden_in(&format!("{err:#}"));
            assert!(!shown.contains(SECRET), "{shown}");
        }
        // A driver may say all of it.
        let shown = secrets.hidden_in(&url);
        assert!(!shown.contains(SECRET), "{shown}");
    }
}

fn understood(url: &str, secrets: &mut Secrets) -> anyhow::Result<()> {
    let is_database = !url.starts_with("redis");
    let [url, store] = [is_database, !is_database].map(|it| it.then(|| url.to_owned()));
    let target =
        Target::of(&On { url: url.or_else(|| Some("sqlite::memory:".to_owned())), store, no_dotenv: true }, secrets)?;
    if !is_database {
        return target.redis().map(drop);
    }
    match target.kind()? {
        Database::Postgres => target.options::<Postgres>().map(drop),
        Database::MySql => target.options::<MySql>().map(drop),
        Database::Sqlite => target.options::<Sqlite>().map(drop),
    }
}

/// A header `Host` that is meant is an address of this machine, as a browser reads it.
pub(crate) fn check_host(value: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(value) else { return };
    let headers = HeaderMap::from_iter([(header::HOST, value)]);
    if !is_meant(&headers) {
        return;
    }
    let host = headers[header::HOST].to_str().expect("it was read");
    if let Ok(url) = Url::parse(&format!("http://{host}/")) {
        let is_here = match url.host() {
            Some(Host::Domain(name)) => name == "localhost",
            Some(Host::Ipv4(ip)) => IpAddr::from(ip).is_loopback(),
            Some(Host::Ipv6(ip)) => IpAddr::from(ip).is_loopback(),
            None => false,
        };
        assert!(is_here, "{host}");
    }
}

/// A lease has one line in a table, without what moves the cursor of a terminal, and one as JSON.
pub(crate) fn check_lease(key: &str, holder: &str, micros: [u64; 4]) {
    let [acquired, held_for, expires_in, ttl] = micros.map(Duration::from_micros);
    let mut lease = LeaseInfo::new(key.into(), holder, micros[0].into(), SystemTime::UNIX_EPOCH + acquired);
    (lease.held_for, lease.expires_in, lease.ttl) = (held_for, expires_in, Some(ttl));
    let lines = table(std::slice::from_ref(&lease), &[]);
    assert!(lines.lines().count() == 2 && !lines.contains(|it: char| it.is_control() && it != '\n'), "{lines:?}");
    assert_eq!(json(&lease).to_string().lines().count(), 1);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORDS: &str = "((run|explain|doctor|ls|show|steal|check|web|migrate|man|-n|-w|-E|--|--ttl|--query|--pools|\
                         --fence|--bind|--url|--store|--permits|1s|0|12x10|-1|a|\\PC{0,3}) ){0,6}";

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_arguments_are_understood_or_refused(line in WORDS) {
            check_arguments(&line);
        }

        #[test]
        fn no_url_shows_its_password(
            scheme in "postgres|postgresql|mysql|mariadb|sqlite|rediss?|[a-z]{0,3}",
            before in "[/@:,?#%a-z0-9. +]{0,4}", after in "[/@:,?#%a-z0-9. +]{0,4}",
            rest in "(sslmode=|port=|mode=|socket=|protocol=|charset=)?[/@:,?#%&=a-z0-9.]{0,5}",
        ) {
            check_url(&scheme, &before, &after, &rest);
        }

        #[test]
        fn a_host_that_is_meant_is_this_machine(
            host in "(localhost|127\\.0\\.0\\.1|\\[::1\\]|[:@/a.0-9\\[\\]]{0,6}){0,2}(:[0-9]{0,6})?",
        ) {
            check_host(host.as_bytes());
        }

        #[test]
        fn a_lease_has_one_line(
            key in "[\\PC\\x00-\\x20\\x7f-\\xa0]{0,9}", holder in "[\\PC\\x00-\\x20]{0,9}", micros: [u64; 4],
        ) {
            check_lease(&key, &holder, micros);
        }
    }
}
