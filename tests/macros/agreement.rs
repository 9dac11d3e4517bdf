//! Rules that the attribute checks before lockkit does: both give the same answer. The macro's side is its own source,
//! because a crate of macros exports nothing else.

use std::{collections::HashMap, time::Duration};

use lockkit::{
    __private::{Piece, key_of, retry},
    Error, Key, NamedLock, RowLock,
};

use crate::fixture::Shop;

#[allow(dead_code)]
#[path = "../../lockkit-macros/src/with_lock/duration.rs"]
mod duration;
#[path = "../../lockkit-macros/src/names.rs"]
mod names;
#[allow(dead_code)]
#[path = "../../lockkit-macros/src/with_lock/template.rs"]
mod template;

use names::{fault_of_column, fault_of_table};
use template::Template;

/// Checks that a template of this text alone is a key, if and only if lockkit takes the text.
fn assert_same_key(text: &str) {
    let template = Template::parse(&text.replace('{', "{{").replace('}', "}}"));
    let is_same = template.as_ref().ok().and_then(Template::constant) == Key::new(text).as_deref().ok();
    assert!(is_same, "{text:?}: {template:?}, {:?}", Key::new(text));
}

#[test]
fn the_same_texts_are_keys() {
    assert_same_key("");
    for length in [1, 254, 255, 256] {
        assert_same_key(&"x".repeat(length));
    }
    for length in [127, 128] {
        assert_same_key(&"é".repeat(length));
    }
    for char in ('\0'..='\u{ffff}').chain(['\u{1f511}', '\u{e0001}', char::MAX]) {
        assert_same_key(&format!("a{char}b"));
    }
}

#[test]
fn a_separator_is_taken_if_no_two_pairs_of_values_make_one_key() {
    for separator in
        ["", "x", "9", "é", "%", ":", " ", "-", "_", "x_y", "%:", "::", ":-", " - ", "-%", "{", "\u{301}", "٣", "۔"]
    {
        let doubled = separator.replace('{', "{{");
        let template = Template::parse(&format!("{{a}}{doubled}{{b}}"));
        let is_taken = template.is_ok();
        // Where there is none, to escape all that is no letter or digit does not help.
        let separators = template.map_or_else(
            |_| separator.chars().filter(|it| !it.is_alphanumeric()).collect(),
            |template| template.separators(),
        );
        let (separators, text): (&str, &'static str) = (separators.leak(), separator.to_owned().leak());
        let mut values: Vec<_> = ["", "a", "b", "%", "%25", "25", "25%"].map(str::to_owned).into();
        values.extend([separator.to_owned(), format!("a{separator}"), format!("{separator}b"), separator.repeat(2)]);
        values.extend(separator.chars().flat_map(|it| [it.to_string(), format!("a{it}"), format!("{it}b")]));
        values.sort_unstable();
        values.dedup();
        let mut made = HashMap::new();
        let is_unique = values.iter().flat_map(|a| values.iter().map(move |b| (a, b))).all(|(a, b)| {
            let pieces = [Piece::Capture(format_args!("{a}")), Piece::Text(text), Piece::Capture(format_args!("{b}"))];
            made.insert(key_of(separators, &pieces).as_str().to_owned(), (a, b)).is_none()
        });
        assert_eq!(is_taken, is_unique, "{separator:?}: {made:?}");
    }
}

/// What lockkit has against an identifier.
fn reason<T>(result: &Result<T, Error>) -> Option<&'static str> {
    match result {
        Err(Error::InvalidIdentifier { reason, .. }) => Some(reason),
        _ => None,
    }
}

#[tokio::test]
async fn the_same_names_are_tables_and_columns() {
    let shop = Shop::new().await;
    let long = ["x".repeat(63), "x".repeat(64), format!("{}.{}", "x".repeat(63), "y".repeat(63))];
    let long = long.iter().cloned().chain([format!("{}.y", "x".repeat(64)), format!("x.{}", "y".repeat(64))]);
    let words =
        ["", ".", "t_items", "_x9", "9a", "app.items", "app.", ".items", "a.b.c", "a.9b", "tâble", "a b.c", "app.a-b"];
    let chars = (' '..='\u{17f}').flat_map(|it| [format!("a{it}b"), it.to_string()]);
    for name in words.map(str::to_owned).into_iter().chain(long).chain(chars) {
        let mut tx = lockkit::begin(&shop.db).await.unwrap();
        let locked = RowLock::table(&name).by("item_id", 7_i64).lock(&mut *tx).await;
        assert_eq!(reason(&locked), fault_of_table(&name), "the table {name:?}");
        let locked = RowLock::table("t_items").by(&name, 7_i64).lock(&mut *tx).await;
        assert_eq!(reason(&locked), fault_of_column(&name), "the column {name:?}");
        tx.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn the_same_durations_are_too_short_or_too_long() {
    let shop = Shop::new().await;
    let refused = |err: Error| matches!(err, Error::InvalidOption { .. });
    let year = "8760h";
    assert_eq!(duration::parse(year), Ok(duration::MAX));
    for (text, time) in [
        ("0s", Duration::ZERO),
        ("0.001us", Duration::from_nanos(1)),
        ("49.999999ms", Duration::from_nanos(49_999_999)),
        ("50ms", Duration::from_millis(50)),
        ("30s", Duration::from_secs(30)),
        (year, duration::MAX),
        ("31536000.000000001s", duration::MAX + Duration::from_nanos(1)),
        ("9000h", Duration::from_hours(9000)),
    ] {
        let parsed = duration::parse(text);
        assert!(parsed.as_ref().is_err() || parsed == Ok(time), "{text} is {parsed:?}");
        let fault_of = |fault: fn(Duration) -> Option<&'static str>| parsed.as_ref().ok().map(|it| fault(*it));

        let mut tx = lockkit::begin(&shop.db).await.unwrap();
        let waited = NamedLock::new("k").wait(time).lock(&mut *tx).await;
        tx.rollback().await.unwrap();
        assert_eq!(parsed.is_err(), waited.is_err_and(refused), "wait = {text:?}");

        let lease = shop.leases.lease("k").ttl(time).try_acquire().await;
        let is_refused = fault_of(duration::fault_of_ttl) != Some(None);
        match lease {
            Ok(lease) => {
                assert!(!is_refused, "ttl = {text:?}");
                // Nobody else takes it, but the shortest may be over before a busy machine has heard of it.
                if let Some(lease) = lease {
                    lease.release().await.unwrap();
                }
            }
            // A busy machine may not get an answer within the shortest.
            Err(err) => assert_eq!(refused(err), is_refused, "ttl = {text:?}"),
        }

        let is_refused = fault_of(duration::fault_of_deadline) != Some(None);
        assert_eq!(retry(None, Some(time)).is_err(), is_refused, "deadline = {text:?}");
    }
}
