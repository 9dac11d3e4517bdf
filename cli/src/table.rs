//! Leases as a table, or as JSON.

use std::{
    fmt::Write,
    io::IsTerminal,
    time::{Duration, SystemTime},
};

use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use lockkit::{
    Key,
    store::{LeaseInfo, Previous},
};
use serde_json::{Value, json};

/// A lease as JSON, with the keys that the manual names.
pub(crate) fn json(lease: &LeaseInfo) -> Value {
    json!({
        "key": lease.key.as_str(),
        "holder": lease.holder,
        "fence": lease.fence.get(),
        "acquired_at": rfc3339(lease.acquired_at),
        "held_ms": millis(lease.held_for),
        "expires_in_ms": millis(lease.expires_in),
        "ttl_ms": lease.ttl.map(millis),
        "renewals": lease.renewals,
        "state": state(lease),
        "flaw": lease.flaw,
        "expired_ms": null,
    })
}

/// A lease whose holder died, with the same keys.
pub(crate) fn json_of_died((key, died): &(Key, Previous)) -> Value {
    json!({
        "key": key.as_str(),
        "holder": died.holder,
        "fence": died.fence.get(),
        "acquired_at": null,
        "held_ms": null,
        "expires_in_ms": 0,
        "ttl_ms": null,
        "renewals": null,
        "state": "died",
        "flaw": null,
        "expired_ms": millis(died.expired_for),
    })
}

/// `None` before 1970 and after 9999.
fn rfc3339(time: SystemTime) -> Option<String> {
    time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let mut text = String::new();
    write!(text, "{}", humantime::format_rfc3339_millis(time)).ok()?;
    Some(text)
}

/// What is to be expected of the holder. A renewal is due when a third of the ttl has passed.
fn state(lease: &LeaseInfo) -> &'static str {
    match lease.ttl {
        _ if lease.flaw.is_some() => "unreadable",
        _ if lease.is_released => "released",
        Some(ttl) if lease.expires_in < ttl / 2 => "late",
        _ => "held",
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The leases, one a line, and below them those whose holders died.
pub(crate) fn table(leases: &[LeaseInfo], died: &[(Key, Previous)]) -> String {
    let row = |lease: &LeaseInfo| {
        [
            printable(lease.key.as_str()),
            printable(&lease.holder),
            lease.fence.to_string(),
            rounded(lease.held_for),
            rounded(lease.expires_in),
            lease.renewals.to_string(),
            state(lease).to_owned() + &lease.flaw.map(|it| format!(": {it}")).unwrap_or_default(),
        ]
    };
    let row_of_died = |(key, died): &(Key, Previous)| {
        let [held, left, renewed] = [const { String::new() }; 3];
        let state = format!("died {} ago", rounded(died.expired_for));
        [printable(key.as_str()), printable(&died.holder), died.fence.to_string(), held, left, renewed, state]
    };
    let rows = leases.iter().map(row).chain(died.iter().map(row_of_died));
    columns(&["KEY", "HOLDER", "FENCE", "HELD", "LEFT", "RENEWED", "STATE"], rows)
}

/// A table with these headings. On a terminal it is as wide as that.
pub(crate) fn columns<const N: usize>(headings: &[&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    if std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(*headings);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// A time as people say it: in whole seconds, or in milliseconds below one.
pub(crate) fn rounded(time: Duration) -> String {
    let whole = if time < Duration::from_secs(1) {
        Duration::from_millis(millis(time))
    } else {
        Duration::from_secs(time.as_secs())
    };
    humantime::format_duration(whole).to_string()
}

/// Text of somebody else, without what moves the cursor of a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().flat_map(|it| if it.is_control() { it.escape_default().collect() } else { vec![it] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(key: &str) -> LeaseInfo {
        let mut lease = LeaseInfo::new(key.into(), "api-3/811", 7.into(), SystemTime::UNIX_EPOCH);
        (lease.held_for, lease.expires_in, lease.renewals) =
            (Duration::from_millis(65_250), Duration::from_millis(250), 38);
        lease
    }

    #[test]
    fn a_table_has_a_line_for_each_lease_and_nothing_that_moves_the_cursor() {
        let leases = [lease("nightly"), lease("a\u{1b}[2J\nb")];
        let lines: Vec<String> =
            table(&leases, &[]).lines().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "KEY HOLDER FENCE HELD LEFT RENEWED STATE",
                "nightly api-3/811 7 1m 5s 250ms 38 held",
                "a\\u{1b}[2J\\nb api-3/811 7 1m 5s 250ms 38 held",
            ]
        );
    }

    #[test]
    fn a_lease_that_is_not_renewed_in_time_is_late() {
        let mut lease = lease("nightly");
        let states = [400, 600].map(|ttl| {
            lease.ttl = Some(Duration::from_millis(ttl));
            state(&lease)
        });
        lease.is_released = true;
        assert_eq!((states, state(&lease)), (["held", "late"], "released"));
    }

    #[test]
    fn json_has_the_keys_of_the_manual() {
        let expected = json!({
            "key": "a\"b", "holder": "api-3/811", "fence": 7, "acquired_at": "1970-01-01T00:00:00.000Z",
            "held_ms": 65_250, "expires_in_ms": 250, "ttl_ms": null, "renewals": 38, "state": "held", "flaw": null,
            "expired_ms": null,
        });
        assert_eq!(json(&lease("a\"b")), expected);
    }

    #[test]
    fn a_lease_that_cannot_be_read_says_why() {
        let mut lease = lease("nightly");
        lease.flaw = Some("its ttl is negative");
        lease.acquired_at += Duration::from_secs(253_402_300_800);
        let shown = json(&lease);
        assert_eq!((&shown["state"], &shown["flaw"]), (&"unreadable".into(), &"its ttl is negative".into()));
        assert_eq!(shown["acquired_at"], Value::Null, "the year 10,000");
        lease.acquired_at = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(json(&lease)["acquired_at"], Value::Null);
        assert!(table(&[lease], &[]).ends_with("unreadable: its ttl is negative"));
    }
}
