//! Who waits for whom, as data.

use std::collections::{HashMap, HashSet, VecDeque};

use lockkit::Key;
use serde::Serialize;
use sqlx::Result;

use crate::Inspect;

/// The sessions of a database that wait for each other's locks: of rows, names and sessions, and of whole tables.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Waits {
    /// The sessions that wait or are waited for.
    pub sessions: Vec<Session>,
    /// Who waits, the one that has waited longest first.
    pub waits: Vec<Wait>,
    /// What the user may not see, and the statement that grants it.
    pub unseen: Vec<String>,
}

/// A session of the database server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Session {
    /// Its number on the server.
    pub id: i64,
    /// User, address and application.
    pub name: String,
    /// How old its transaction is, in milliseconds, if it has one that the user may see.
    pub transaction_ms: Option<u64>,
    /// What it is doing, in the server's words.
    pub state: String,
    /// Its statement, or on PostgreSQL the last one. Empty if the user may not see it.
    pub statement: String,
    /// The statement that ends it.
    pub end_by: String,
}

/// A session that waits for others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// The number of the session.
    pub waiter: i64,
    /// For how long it has waited, in milliseconds; whole seconds on MySQL and MariaDB.
    pub waits_ms: u64,
    /// What it waits for, with the key of the row where that can be read.
    pub lock: String,
    /// Those who hold it, or are before the waiter. Empty if the server does not say.
    pub holders: Vec<i64>,
}

/// A session in the tree of those who wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line<'w> {
    /// The branches of the tree before it: empty for one that waits for nobody, `├ ` below such a one.
    pub branches: String,
    /// The number of the session.
    pub id: i64,
    /// `None` if it ended meanwhile, or the user may not see it.
    pub session: Option<&'w Session>,
    /// What it waits for.
    pub wait: Option<&'w Wait>,
    /// Who blocks it beside the one above it, and waits for nobody.
    pub also: Vec<i64>,
}

/// The numbers of the sessions that wait or hold what others wait for.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) fn sessions_of(waits: &[Wait]) -> Vec<i64> {
    let mut ids: Vec<i64> = waits.iter().flat_map(|it| it.holders.iter().copied().chain([it.waiter])).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

impl Session {
    /// What it is doing in one line, with at most so many characters of its statement.
    pub fn does(&self, most: usize) -> String {
        let words: Vec<&str> = self.statement.split_whitespace().collect();
        let statement = words.join(" ");
        match statement.char_indices().nth(most) {
            _ if statement.is_empty() => self.state.clone(),
            Some((end, _)) => format!("{}: {}…", self.state, &statement[..end]),
            None => format!("{}: {statement}", self.state),
        }
    }
}

impl Line<'_> {
    /// What it waits for, and who holds that beside the one above it. Empty if it waits for nobody.
    pub fn lock(&self) -> String {
        let mut lock = self.wait.map(|it| it.lock.clone()).unwrap_or_default();
        for id in &self.also {
            lock.push_str(", also held by ");
            lock.push_str(&id.to_string());
        }
        lock
    }
}

impl Waits {
    /// The locks that are waited for now. Where the server knows a named or session lock by a hash only, `keys` has the
    /// keys that it can be.
    ///
    /// # Errors
    ///
    /// The connection failed, or the server refused a statement. What the user may not see is in
    /// [`unseen`](Self::unseen).
    ///
    /// # Cancel safety
    ///
    /// Only reads.
    pub async fn of<DB: Inspect>(conn: &mut DB::Connection, keys: &[Key]) -> Result<Self> {
        DB::waits(conn, keys).await
    }

    /// The sessions as a tree: those who hold first, and below each those who wait for it. Each session has one line.
    /// One that waits for several is below the nearest to the top: in a queue of a hundred for one row, the first is
    /// below the holder, and all others below that one.
    pub fn lines(&self) -> Vec<Line<'_>> {
        let Tree { tops, below } = self.tree();
        let sessions: HashMap<i64, &Session> = self.sessions.iter().map(|it| (it.id, it)).collect();
        let waits: HashMap<i64, &Wait> = self.waits.iter().map(|it| (it.waiter, it)).collect();
        let waits_not = |id: &i64| waits.get(id).is_none_or(|it| it.holders.is_empty());
        let mut lines = Vec::new();
        // The last is next. With it the one above it, its own branches, and those of the lines below it.
        let mut rest: Vec<(i64, Option<i64>, String, String)> =
            tops.iter().rev().map(|id| (*id, None, String::new(), String::new())).collect();
        while let Some((id, above, branches, indent)) = rest.pop() {
            let wait = waits.get(&id).copied();
            let holders = wait.into_iter().flat_map(|it| &it.holders).copied();
            let also = holders.filter(|it| above.is_some() && Some(*it) != above && waits_not(it)).collect();
            lines.push(Line { branches, id, session: sessions.get(&id).copied(), wait, also });
            let children = below.get(&id).map_or(&[][..], Vec::as_slice);
            for (at, child) in children.iter().enumerate().rev() {
                let (bar, more) = if at + 1 == children.len() { ("└ ", "  ") } else { ("├ ", "│ ") };
                rest.push((*child, Some(id), format!("{indent}{bar}"), format!("{indent}{more}")));
            }
        }
        lines
    }

    /// The sessions at the top of the tree that others wait for.
    pub fn blockers(&self) -> Vec<&Session> {
        let tops: HashSet<i64> = self.tree().tops.into_iter().collect();
        let blocks = |id| self.waits.iter().any(|it| it.holders.contains(&id));
        self.sessions.iter().filter(|it| tops.contains(&it.id) && blocks(it.id)).collect()
    }

    fn tree(&self) -> Tree {
        let mut behind: HashMap<i64, Vec<i64>> = HashMap::new();
        for wait in &self.waits {
            for holder in &wait.holders {
                behind.entry(*holder).or_default().push(wait.waiter);
            }
        }
        let waiting: HashSet<i64> = self.waits.iter().filter(|it| !it.holders.is_empty()).map(|it| it.waiter).collect();
        let holders = self.waits.iter().flat_map(|it| &it.holders).filter(|it| !waiting.contains(it));
        let alone = self.waits.iter().filter(|it| it.holders.is_empty()).map(|it| &it.waiter);
        // Of sessions that wait for each other, the one that has waited longest.
        let others = self.waits.iter().map(|it| &it.waiter);
        let (mut tops, mut below) = (Vec::new(), HashMap::<i64, Vec<i64>>::new());
        let mut placed = HashSet::new();
        let mut next = VecDeque::new();
        let mut place = |next: &mut VecDeque<i64>, placed: &mut HashSet<i64>| {
            while let Some(id) = next.pop_front() {
                for waiter in behind.get(&id).into_iter().flatten() {
                    if placed.insert(*waiter) {
                        below.entry(id).or_default().push(*waiter);
                        next.push_back(*waiter);
                    }
                }
            }
        };
        // All of these at once, so that who waits for several is below the nearest.
        for top in holders.chain(alone) {
            if placed.insert(*top) {
                tops.push(*top);
                next.push_back(*top);
            }
        }
        place(&mut next, &mut placed);
        for top in others {
            if placed.insert(*top) {
                tops.push(*top);
                next.push_back(*top);
                place(&mut next, &mut placed);
            }
        }
        Tree { tops, below }
    }
}

/// The key of the lease for which the owner of this one waits: a ticket of the lease `k` is the lease `k/queue/7`.
/// `None` if it is no ticket.
pub fn waited_for(ticket: &str) -> Option<&str> {
    let (key, number) = ticket.rsplit_once("/queue/")?;
    (!number.is_empty() && number.bytes().all(|it| it.is_ascii_digit())).then_some(key)
}

struct Tree {
    tops: Vec<i64>,
    below: HashMap<i64, Vec<i64>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(waiter: i64, holders: &[i64]) -> Wait {
        Wait { waiter, waits_ms: 0, lock: String::new(), holders: holders.to_vec() }
    }

    fn drawn(waits: Vec<Wait>) -> Vec<String> {
        let waits = Waits { waits, ..Waits::default() };
        let draw = |it: Line<'_>| format!("{}{}{}", it.branches, it.id, it.lock());
        waits.lines().into_iter().map(draw).collect()
    }

    #[test]
    fn those_who_wait_are_below_those_who_hold() {
        assert_eq!(drawn(vec![wait(2, &[1]), wait(3, &[2]), wait(4, &[1])]), ["1", "├ 2", "│ └ 3", "└ 4"]);
        assert_eq!(drawn(vec![wait(2, &[1]), wait(4, &[3])]), ["1", "└ 2", "3", "└ 4"]);
        assert_eq!(drawn(vec![wait(2, &[1, 5]), wait(3, &[2, 1])]), ["1", "├ 2, also held by 5", "└ 3", "5"]);
    }

    #[test]
    fn those_who_wait_for_each_other_are_shown_too() {
        assert_eq!(drawn(vec![wait(1, &[2]), wait(2, &[1]), wait(3, &[2])]), ["1", "└ 2", "  └ 3"]);
        assert_eq!(drawn(vec![wait(1, &[])]), ["1"]);
        assert_eq!(drawn(vec![wait(1, &[1])]), ["1"]);
    }

    /// PostgreSQL names all who are before a waiter.
    #[test]
    fn a_queue_of_hundreds_has_a_line_for_each() {
        let queue = (2..=300).map(|it| wait(it, &(1..it).collect::<Vec<_>>())).collect();
        let lines = drawn(queue);
        assert_eq!((lines.len(), &*lines[0], &*lines[1], &*lines[299]), (300, "1", "├ 2", "└ 300"));
    }

    #[test]
    fn a_blocker_is_at_the_top_and_is_waited_for() {
        let session = |id| Session {
            id,
            name: String::new(),
            transaction_ms: None,
            state: String::new(),
            statement: String::new(),
            end_by: String::new(),
        };
        let sessions = (1..=4).map(session).collect();
        let waits = Waits { sessions, waits: vec![wait(2, &[1]), wait(3, &[2]), wait(4, &[])], unseen: Vec::new() };
        assert_eq!(waits.blockers().iter().map(|it| it.id).collect::<Vec<_>>(), [1]);
    }
}
