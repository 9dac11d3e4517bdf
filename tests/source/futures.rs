//! Futures that users can make: each of them is dropped at every await by one test, and `Send` by another.

use std::collections::BTreeSet;

use crate::api::{Entry, Kind, entries};
use crate::code::{Token, code};
use crate::tree::{files, text};

/// Traits that a store or a database implements. Users call what is built on their methods.
const OPERATIONS: [&str; 14] = [
    "AnyTx",
    "Dialect",
    "FenceGuardOps",
    "LeaseOps",
    "LeaseStore",
    "ListenOps",
    "NamedOps",
    "On",
    "RowOps",
    "SessionOps",
    "ShedLockOps",
    "StockOps",
    "VersionOps",
    "Yields",
];

/// The functions that return a future to users: `Type::name`, or `name` of a free one.
///
/// Left out: the tools for tests, and the operations of stores and databases. A type in a module is named without
/// its module.
fn functions<'a>(entries: &'a [Entry]) -> BTreeSet<&'a str> {
    let futures = entries.iter().filter(|it| it.kind != Kind::Other).filter_map(|it| it.path.strip_prefix("lockkit::"));
    let without_module = |name: &'a str| {
        ["store::", "dialect::", "lease::", "version::"].iter().find_map(|it| name.strip_prefix(it)).unwrap_or(name)
    };
    let of_users = |name: &&str| {
        let outer = name.split("::").next().unwrap_or_default();
        outer != "testing" && !OPERATIONS.contains(&outer)
    };
    futures.map(without_module).filter(of_users).collect()
}

/// What the table of a test lacks and has too many: the first argument of its calls of one of `callers` is the name of
/// a function. Names without `::` that are none of a function say what else is tested.
fn complaints(functions: &BTreeSet<&str>, in_table: &BTreeSet<String>) -> Vec<String> {
    let missing = functions.iter().filter(|it| !in_table.contains(**it)).map(|it| format!("`{it}` is missing"));
    let unknown = in_table.iter().filter(|it| it.contains("::") && !functions.contains(it.as_str()));
    missing.chain(unknown.map(|it| format!("`{it}` is no public function that returns a future"))).collect()
}

/// The texts that calls of these functions or macros have as their first argument, or as the first of a tuple there.
fn first_arguments(source: &str, callers: &[&str]) -> BTreeSet<String> {
    let tokens = code(source);
    let calls = tokens.iter().enumerate().filter(|(_, it)| callers.contains(&it.text.as_str()));
    let first = calls.filter_map(|(at, _)| tokens[at + 1..].iter().find(|it| !["!", "("].contains(&it.text.as_str())));
    first.filter(|it| it.is_text()).map(|it| it.text.trim_matches('"').to_owned()).collect()
}

/// The calls `is_send("Type::name", …)` that do not call a function of that name.
fn calls_of_others(source: &str) -> Vec<String> {
    let tokens = code(source);
    let calls = tokens
        .iter()
        .enumerate()
        .filter(|(at, it)| it.text == "is_send" && tokens[at + 2].is_text() && !tokens[at + 2].text.contains(' '));
    let wrong = calls.filter(|(at, _)| {
        let named = tokens[at + 2].text.trim_matches('"').rsplit("::").next().unwrap_or_default();
        let mut depth = 0_usize;
        let call = tokens[at + 1..].iter().take_while(|it| {
            depth += usize::from(it.text == "(");
            depth -= usize::from(it.text == ")");
            depth > 0
        });
        let call: Vec<&Token> = call.collect();
        // What is awaited was made to be able to call the function.
        let last = call.iter().rposition(|it| it.text == "await").map_or(2, |it| it + 1);
        let is_called = |at: usize| {
            call[at].text == named && [":", "("].iter().any(|it| call.get(at + 1).is_some_and(|next| next.text == *it))
        };
        !(last..call.len()).any(is_called)
    });
    wrong.map(|(at, it)| format!("line {}: {} calls another function", it.line, tokens[at + 2].text)).collect()
}

/// Methods of public traits whose futures need not be `Send`.
fn not_send(entries: &[Entry]) -> Vec<&str> {
    let of_root = |path: &&str| !path.starts_with("lockkit::testing");
    let not_send = entries.iter().filter(|it| it.kind == Kind::TraitFuture { is_send: false });
    not_send.map(|it| it.path.as_str()).filter(of_root).collect()
}

fn api() -> Vec<Entry> {
    entries(&files("lockkit/src", ".rs"))
}

#[test]
fn every_public_async_function_is_dropped_at_every_await() {
    let api = api();
    let functions = functions(&api);
    assert!(functions.len() > 40, "{functions:?}");
    let sources = files("tests/integration/cancellation", ".rs");
    let table =
        sources.iter().flat_map(|(_, source)| first_arguments(source, &["drop_everywhere", "drop_blocked"])).collect();
    let complaints = complaints(&functions, &table);
    assert!(complaints.is_empty(), "tests/integration/cancellation:\n{}", complaints.join("\n"));
    println!("{} public async functions are dropped at every await", functions.len());
}

#[test]
fn every_public_future_is_shown_to_be_send() {
    let api = api();
    let table = text("tests/integration/send.rs");
    let mut complaints = complaints(&functions(&api), &first_arguments(&table, &["is_send"]));
    complaints.extend(calls_of_others(&table));
    assert!(complaints.is_empty(), "tests/integration/send.rs:\n{}", complaints.join("\n"));
    assert_eq!(not_send(&api), [""; 0], "declare these as `-> impl Future<…> + Send`");
}

// ---- the rules, broken ---------------------------------------------------------------------------

#[cfg(test)]
fn planted() -> Vec<Entry> {
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    entries(&[
        file("lib.rs", "mod lease; pub use lease::{begin, later, Lease, LeaseStore, Request, Saves};"),
        file(
            "lease.rs",
            "
            pub async fn begin() {}
            pub async fn inner() {}
            pub fn later() -> impl Future<Output = u8> + Send {}
            impl<S: Store, F: Fn() -> S> Lease<S> where S: Sync { \
                pub async fn lost(&self) { if x {} } async fn private() {} }
            impl<S> Request<S> { pub(crate) async fn ask() {} #[must_use] pub async fn acquire() {} pub fn now() {} }
            impl<S> Request<S> { pub fn run(self) -> Pin<Box<dyn Future<Output = S>>> {} }
            impl Unexported { pub async fn step() {} }
            pub struct Lease<S>(S); pub struct Request<S>(S); pub struct Unexported;
            pub trait LeaseStore { fn look(&self) -> impl Future<Output = ()>; }
            pub trait Saves { fn save(&self) -> impl Future<Output = ()> + Send {} async fn load(); }
            ",
        ),
    ])
}

#[test]
fn the_check_sees_every_function_that_returns_a_future() {
    let entries = planted();
    let all = ["Lease::lost", "Request::acquire", "Request::run", "Saves::load", "Saves::save", "begin", "later"];
    assert_eq!(functions(&entries), BTreeSet::from(all));
    assert_eq!(not_send(&entries), ["lockkit::LeaseStore::look", "lockkit::Saves::load"]);
}

#[test]
fn the_check_sees_a_function_that_is_not_in_the_table_and_a_name_of_none() {
    let functions = BTreeSet::from(["Lease::lost", "Lease::extend", "Request::acquire", "begin"]);
    let table = r#"
        f("begin", x); f(("Request::acquire", "fair"), x); f(&format!("Lease::lost"), x); g("Lease::extend", x);
        f("Lease::lost, too", x); f("Lease::lost_too", x); f("Lease::losing"); f!("a function", x); // f("Lease::lost")
    "#;
    let complaints = complaints(&functions, &first_arguments(table, &["f"]));
    let unknown = ["Lease::losing", "Lease::lost, too", "Lease::lost_too"];
    let unknown = unknown.iter().map(|it| format!("`{it}` is no public function that returns a future"));
    let missing = ["Lease::extend", "Lease::lost"].iter().map(|it| format!("`{it}` is missing"));
    assert_eq!(complaints, missing.chain(unknown).collect::<Vec<_>>());
}

#[test]
fn the_check_sees_a_call_of_another_function() {
    let right =
        r#"is_send("Leases::show", leases.show("k")); is_send("Item::load", Item::load(f(2)).await.load::<u8>());"#;
    assert_eq!(calls_of_others(right), [""; 0]);
    let wrong =
        r#"is_send("Leases::show", leases.list("k")); is_send("Lease::release", lease.release().await.share());"#;
    assert_eq!(calls_of_others(wrong).len(), 2);
}
