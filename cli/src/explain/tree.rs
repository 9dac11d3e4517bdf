//! The picture as a table, whose first column is a tree.

use std::{fmt::Write, time::Duration};

use lockkit_inspect::Line;

use super::Picture;
use crate::table::{columns, printable, rounded};

const HEADINGS: [&str; 5] = ["SESSION", "WAITS", "FOR", "TRANSACTION", "DOES"];

/// The most characters of a statement.
const STATEMENT: usize = 30;

/// The picture, and below it the statements that end the sessions which block the others.
pub(super) fn tree(picture: &Picture) -> String {
    let mut rows: Vec<_> = picture.waits.lines().iter().map(row).collect();
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
    for session in picture.waits.blockers() {
        _ = write!(text, "\nto end session {}: {}", session.id, session.end_by);
    }
    text
}

fn row(line: &Line<'_>) -> [String; 5] {
    let Line { branches, id, session, wait, .. } = line;
    let name = session.map_or_else(|| "a session that is not listed".to_owned(), |it| printable(&it.name));
    [
        format!("{branches}{id} {name}"),
        wait.map(|it| time(it.waits_ms)).unwrap_or_default(),
        printable(&line.lock()),
        session.and_then(|it| it.transaction_ms).map(time).unwrap_or_default(),
        session.map(|it| printable(&it.does(STATEMENT))).unwrap_or_default(),
    ]
}

fn time(millis: u64) -> String {
    rounded(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use lockkit_inspect::{Session, Wait, Waits};

    use super::*;
    use crate::explain::queue::{Holder, Queue, Ticket};

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
        let mut waits = Waits::default();
        waits.sessions = (1..=4).map(|id| session(id, "UPDATE items\n SET stock = 1")).collect();
        waits.waits = vec![wait(2, 1), wait(3, 2), wait(4, 1)];
        let picture = Picture {
            waits,
            leases: vec![Queue {
                key: "nightly".to_owned(),
                holder: Some(Holder { name: "api-3".to_owned(), fence: 7, held_ms: 60_000, expires_in_ms: 4000 }),
                waiters: vec![Ticket { holder: "api-9".to_owned(), waits_ms: 900 }],
            }],
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
}
