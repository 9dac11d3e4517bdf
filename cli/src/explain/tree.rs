//! The picture as a table, whose first column is a tree.

use std::{fmt::Write, time::Duration};

use super::picture::{Picture, Session};
use crate::table::{columns, printable, rounded};

const HEADINGS: [&str; 5] = ["SESSION", "WAITS", "FOR", "TRANSACTION", "DOES"];

/// The most characters of a statement.
const STATEMENT: usize = 30;

/// The picture, and below it the statements that end the sessions which block the others.
pub(crate) fn tree(picture: &Picture) -> String {
    let mut rows = Vec::new();
    let first = picture.first();
    for id in &first {
        // A session that waits for one whom the server does not name has no line above it.
        let wait = picture.waits.iter().find(|it| it.waiter == *id);
        let wait = wait.map(|it| (it.waits_ms, &*it.lock));
        branch(picture, *id, wait, "", "", &mut vec![*id], &mut rows);
    }
    for queue in &picture.leases {
        let key = format!("lease {}", printable(&queue.key));
        rows.push(match &queue.holder {
            Some(it) => {
                let does = format!("holds it for {}, {} left", time(it.held_ms), time(it.expires_in_ms));
                [format!("{} fence {}", printable(&it.name), it.fence), String::new(), key.clone(), String::new(), does]
            }
            None => [key.clone(), String::new(), String::new(), String::new(), "free".to_owned()],
        });
        for (at, ticket) in queue.waiters.iter().enumerate() {
            let bar = if at + 1 == queue.waiters.len() { "└ " } else { "├ " };
            let name = bar.to_owned() + &printable(&ticket.holder);
            rows.push([name, time(ticket.waits_ms), key.clone(), String::new(), String::new()]);
        }
    }
    let mut text = columns(&HEADINGS, rows);
    for id in first {
        if let Some(session) = session(picture, id).filter(|_| picture.behind(id).next().is_some()) {
            _ = write!(text, "\nto end session {id}: {}", session.end_by);
        }
    }
    text
}

/// A session, and below it those who wait for it.
fn branch(
    picture: &Picture,
    id: i64,
    wait: Option<(u64, &str)>,
    bar: &str,
    below: &str,
    path: &mut Vec<i64>,
    rows: &mut Vec<[String; 5]>,
) {
    let found = session(picture, id);
    let name = found.map_or_else(|| "a session that is not listed".to_owned(), |it| printable(&it.name));
    rows.push([
        format!("{bar}{id} {name}"),
        wait.map(|it| time(it.0)).unwrap_or_default(),
        wait.map(|it| printable(it.1)).unwrap_or_default(),
        found.and_then(|it| it.transaction_ms).map(time).unwrap_or_default(),
        found.map(does).unwrap_or_default(),
    ]);
    let behind: Vec<_> = picture.behind(id).filter(|it| !path.contains(&it.waiter)).collect();
    for (at, wait) in behind.iter().enumerate() {
        let (bar, rest) = if at + 1 == behind.len() { ("└ ", "  ") } else { ("├ ", "│ ") };
        let (bar, rest) = (format!("{below}{bar}"), format!("{below}{rest}"));
        path.push(wait.waiter);
        branch(picture, wait.waiter, Some((wait.waits_ms, &wait.lock)), &bar, &rest, path, rows);
        path.pop();
    }
}

fn session(picture: &Picture, id: i64) -> Option<&Session> {
    picture.sessions.iter().find(|it| it.id == id)
}

fn does(session: &Session) -> String {
    let words: Vec<&str> = session.statement.split_whitespace().collect();
    let statement = printable(&words.join(" "));
    let mut short: String = statement.chars().take(STATEMENT).collect();
    if short.len() < statement.len() {
        short.push('…');
    }
    if short.is_empty() { session.state.clone() } else { format!("{}: {short}", session.state) }
}

fn time(millis: u64) -> String {
    rounded(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::picture::{Holder, Queue, Ticket, Wait};

    fn session(id: i64, statement: &str) -> Session {
        Session {
            id,
            name: format!("shop api-{id}"),
            transaction_ms: Some(2000),
            state: "active".to_owned(),
            statement: statement.to_owned(),
            end_by: format!("KILL {id};"),
        }
    }

    #[test]
    fn those_who_wait_are_below_those_who_hold() {
        let wait = |waiter, holder| Wait {
            waiter,
            waits_ms: 1500,
            lock: format!("items (id={holder})"),
            holders: vec![holder],
        };
        let picture = Picture {
            sessions: (1..=4).map(|id| session(id, "UPDATE items\n SET stock = 1")).collect(),
            waits: vec![wait(2, 1), wait(3, 2), wait(4, 1)],
            leases: vec![Queue {
                key: "nightly".to_owned(),
                holder: Some(Holder { name: "api-3".to_owned(), fence: 7, held_ms: 60_000, expires_in_ms: 4000 }),
                waiters: vec![Ticket { holder: "api-9".to_owned(), waits_ms: 900 }],
            }],
            unseen: Vec::new(),
        };
        let lines: Vec<String> =
            tree(&picture).lines().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "SESSION WAITS FOR TRANSACTION DOES",
                "1 shop api-1 2s active: UPDATE items SET stock = 1",
                "├ 2 shop api-2 1s items (id=1) 2s active: UPDATE items SET stock = 1",
                "│ └ 3 shop api-3 1s items (id=2) 2s active: UPDATE items SET stock = 1",
                "└ 4 shop api-4 1s items (id=1) 2s active: UPDATE items SET stock = 1",
                "api-3 fence 7 lease nightly holds it for 1m, 4s left",
                "└ api-9 900ms lease nightly",
                "to end session 1: KILL 1;",
            ]
        );
    }

    #[test]
    fn sessions_that_wait_for_each_other_end_the_tree() {
        let wait = |waiter, holder| Wait { waiter, waits_ms: 0, lock: String::new(), holders: vec![holder] };
        let picture = Picture { waits: vec![wait(1, 2), wait(2, 1)], ..Picture::default() };
        assert_eq!(tree(&picture).lines().count(), 3);
    }
}
