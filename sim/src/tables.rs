//! The server's tables of stocks and of rows with versions. Imitates the statements of lockkit on PostgreSQL, READ
//! COMMITTED: which rows each locks, waits for, skips, sees and changes. Knows no time and no network.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use lockkit::{Key, store::Token, testing::simulation::sql::VOID};

/// Identifies a connection.
pub(crate) type ConnId = u64;

/// One message of a connection.
#[derive(Debug, Clone)]
pub(crate) enum Query {
    Connect,
    Ping,
    Begin,
    /// Fails outside of a transaction, and in one that has failed.
    Check,
    Commit,
    RollBack,
    /// Takes from one unlocked segment.
    Take {
        key: Key,
        amount: u64,
        first: [u32; 4],
    },
    /// Takes for the first takers of a batch, if the note has a lower number.
    TakeBatch {
        key: Key,
        sums: Vec<u64>,
        first: [u32; 4],
        note: Token,
        number: i64,
    },
    MakeNote {
        note: Token,
        number: i64,
    },
    VoidNote {
        note: Token,
        number: i64,
    },
    LookAtNote(Token),
    Look(Key),
    /// Locks segments in their order. Waits for this many microseconds at most.
    Lock {
        key: Key,
        segments: RangeInclusive<u32>,
        wait: Option<u64>,
    },
    Make(Key),
    Write(Key, Vec<(u32, u64)>),
    Remove(Key, RangeInclusive<u32>),
    Read(i64),
    /// Writes the value, if the row has this version.
    Save {
        row: i64,
        value: i64,
        expected: i64,
    },
}

impl Query {
    /// Whether its caller has something to find out when the answer is lost.
    pub(crate) fn is_delicate(&self) -> bool {
        matches!(self, Self::TakeBatch { .. } | Self::VoidNote { .. } | Self::Commit)
    }
}

/// What the server answers.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Done,
    Segment(Option<u32>),
    /// The segment, and the number of takers that it has served.
    Portion(Option<(u32, usize)>),
    Note(Option<(i64, (u32, usize))>),
    Segments(Vec<(u32, u64)>),
    /// The version and the value.
    Row(i64, i64),
    Saved(bool),
    Refused(Refusal),
}

/// Why a statement failed. In a transaction, every further one fails too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    LockTimeout,
    Deadlock,
    /// There is no transaction, or it has failed.
    Ended,
    /// The connection has ended.
    Gone,
}

/// What a lock is on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Segment(Key, u32),
    Row(i64),
}

/// A row with a version.
#[derive(Debug, Clone, Copy)]
struct Row {
    version: i64,
    value: i64,
}

/// An open transaction: its locks, and what it has changed. A segment without a quantity is removed.
#[derive(Debug, Default)]
struct Tx {
    has_failed: bool,
    locks: BTreeSet<Place>,
    segments: BTreeMap<(Key, u32), Option<u64>>,
    rows: BTreeMap<i64, Row>,
}

/// The tables.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    segments: BTreeMap<(Key, u32), u64>,
    notes: BTreeMap<Token, (i64, (u32, usize))>,
    rows: BTreeMap<i64, Row>,
    open: BTreeMap<ConnId, Tx>,
    /// Which connection each waits for.
    waits: BTreeMap<ConnId, ConnId>,
    /// The segments that a statement saw before it waited. It locks no other.
    seen: BTreeMap<ConnId, Vec<u32>>,
    conns: BTreeSet<ConnId>,
    /// The pieces that were ever put into each stock, and those that were taken from each segment.
    put: BTreeMap<Key, u64>,
    taken: BTreeMap<(Key, u32), u64>,
    violations: Vec<String>,
}

/// A statement waits for the end of a transaction, or has failed.
enum Stopped {
    Waits,
    Refused(Refusal),
}

type Result<T> = std::result::Result<T, Stopped>;

impl Tables {
    /// Executes a query. `None` if it must wait for the end of a transaction.
    pub(crate) fn execute(&mut self, conn: ConnId, query: &Query) -> Option<Answer> {
        if let Query::Connect = query {
            self.conns.insert(conn);
        }
        if !self.conns.contains(&conn) {
            return Some(Answer::Refused(Refusal::Gone));
        }
        let has_failed = self.open.get(&conn).is_some_and(|it| it.has_failed);
        let answer = match query {
            Query::RollBack => {
                self.open.remove(&conn);
                Ok(Answer::Done)
            }
            _ if has_failed => Err(Stopped::Refused(Refusal::Ended)),
            Query::Check | Query::Commit if !self.open.contains_key(&conn) => Err(Stopped::Refused(Refusal::Ended)),
            query => self.statement(conn, query),
        };
        match answer {
            Ok(answer) => {
                self.waits.remove(&conn);
                self.seen.remove(&conn);
                Some(answer)
            }
            Err(Stopped::Waits) => None,
            Err(Stopped::Refused(refusal)) => Some(self.refuse(conn, refusal)),
        }
    }

    /// The statement fails, and its transaction with it.
    pub(crate) fn refuse(&mut self, conn: ConnId, refusal: Refusal) -> Answer {
        self.waits.remove(&conn);
        self.seen.remove(&conn);
        if let Some(tx) = self.open.get_mut(&conn) {
            *tx = Tx { has_failed: true, ..Tx::default() };
        }
        Answer::Refused(refusal)
    }

    /// The connection has ended.
    pub(crate) fn end(&mut self, conn: ConnId) {
        self.open.remove(&conn);
        self.waits.remove(&conn);
        self.seen.remove(&conn);
        self.conns.remove(&conn);
    }

    /// The server restarts: all connections end.
    pub(crate) fn restart(&mut self) {
        for conn in std::mem::take(&mut self.conns) {
            self.end(conn);
        }
    }

    fn statement(&mut self, conn: ConnId, query: &Query) -> Result<Answer> {
        Ok(match query {
            Query::Connect | Query::Ping | Query::Check | Query::RollBack => Answer::Done,
            Query::Begin => {
                self.open.insert(conn, Tx::default());
                Answer::Done
            }
            Query::Commit => {
                let tx = self.open.remove(&conn).unwrap_or_default();
                self.apply(tx);
                Answer::Done
            }
            Query::Take { key, amount, first } => Answer::Segment(self.take(conn, key, *amount, *first)),
            Query::TakeBatch { key, sums, first, note, number } => {
                Answer::Portion(self.take_batch(conn, key, sums, *first, (*note, *number)))
            }
            Query::MakeNote { note, number } => {
                self.notes.entry(*note).or_insert((number - 1, (0, 0)));
                Answer::Done
            }
            Query::VoidNote { note, number } => {
                if let Some((last, _)) = self.notes.get_mut(note).filter(|it| it.0 < *number) {
                    *last = VOID;
                }
                Answer::Done
            }
            Query::LookAtNote(note) => Answer::Note(self.notes.get(note).copied()),
            Query::Look(key) => Answer::Segments(self.visible(conn, key)),
            Query::Lock { key, segments, .. } => Answer::Segments(self.lock(conn, key, segments)?),
            Query::Make(key) => {
                self.lock_place(conn, Place::Segment(key.clone(), 0))?;
                if self.quantity(conn, key, 0).is_none() {
                    self.set(conn, key, 0, Some(0));
                }
                Answer::Done
            }
            Query::Write(key, segments) => {
                for (number, quantity) in segments {
                    self.lock_place(conn, Place::Segment(key.clone(), *number))?;
                    self.set(conn, key, *number, Some(*quantity));
                }
                Answer::Done
            }
            Query::Remove(key, segments) => {
                for (number, _) in self.visible(conn, key).into_iter().filter(|it| segments.contains(&it.0)) {
                    self.lock_place(conn, Place::Segment(key.clone(), number))?;
                    self.set(conn, key, number, None);
                }
                Answer::Done
            }
            Query::Read(row) => {
                let Row { version, value } = self.row(conn, *row);
                Answer::Row(version, value)
            }
            Query::Save { row, value, expected } => {
                self.lock_place(conn, Place::Row(*row))?;
                let old = self.row(conn, *row);
                if old.version == *expected && old.value + 1 != *value {
                    self.violations.push(format!("lost update: row {row} has {} and is set to {value}", old.value));
                }
                if old.version == *expected {
                    self.change(conn, |tx| {
                        tx.rows.insert(*row, Row { version: expected + 1, value: *value });
                    });
                }
                Answer::Saved(old.version == *expected)
            }
        })
    }

    /// Changes something in the open transaction, or in one of this statement alone.
    fn change(&mut self, conn: ConnId, change: impl FnOnce(&mut Tx)) {
        if let Some(tx) = self.open.get_mut(&conn) {
            change(tx);
        } else {
            let mut tx = Tx::default();
            change(&mut tx);
            self.apply(tx);
        }
    }

    fn set(&mut self, conn: ConnId, key: &Key, number: u32, quantity: Option<u64>) {
        self.change(conn, |tx| {
            tx.segments.insert((key.clone(), number), quantity);
        });
    }

    /// Commits. A transaction that leaves less of a stock has taken from it, and one that leaves more has put.
    fn apply(&mut self, Tx { segments, rows, .. }: Tx) {
        self.rows.extend(rows);
        let keys: BTreeSet<_> = segments.keys().map(|(key, _)| key.clone()).collect();
        let before: Vec<_> = keys.into_iter().map(|key| (self.left(&key), key)).collect();
        let mut less = Vec::new();
        for (place, quantity) in segments {
            let old = match quantity {
                Some(quantity) => self.segments.insert(place.clone(), quantity),
                None => self.segments.remove(&place),
            };
            less.push((place, old.unwrap_or(0).saturating_sub(quantity.unwrap_or(0))));
        }
        for (old, key) in before {
            let new = self.left(&key);
            if new > old {
                *self.put.entry(key).or_default() += new - old;
            } else if new < old {
                for (place, taken) in less.iter().filter(|(place, _)| place.0 == key) {
                    *self.taken.entry(place.clone()).or_default() += taken;
                }
            }
        }
    }

    /// The segments that this connection sees.
    fn visible(&self, conn: ConnId, key: &Key) -> Vec<(u32, u64)> {
        let mut numbers: BTreeSet<_> = self.segments.keys().filter(|it| it.0 == *key).map(|it| it.1).collect();
        let own = self.open.get(&conn).into_iter().flat_map(|it| it.segments.keys());
        numbers.extend(own.filter(|it| it.0 == *key).map(|it| it.1));
        numbers.into_iter().filter_map(|it| Some((it, self.quantity(conn, key, it)?))).collect()
    }

    fn quantity(&self, conn: ConnId, key: &Key, number: u32) -> Option<u64> {
        let place = (key.clone(), number);
        let own = self.open.get(&conn).and_then(|it| it.segments.get(&place));
        own.copied().unwrap_or_else(|| self.segments.get(&place).copied())
    }

    fn row(&self, conn: ConnId, row: i64) -> Row {
        let own = self.open.get(&conn).and_then(|it| it.rows.get(&row));
        *own.or_else(|| self.rows.get(&row)).unwrap_or(&Row { version: 1, value: 0 })
    }

    /// The connection other than this one that has locked it.
    fn holder(&self, conn: ConnId, place: &Place) -> Option<ConnId> {
        self.open.iter().find(|(id, it)| **id != conn && it.locks.contains(place)).map(|(id, _)| *id)
    }

    fn lock_place(&mut self, conn: ConnId, place: Place) -> Result<()> {
        if let Some(holder) = self.holder(conn, &place) {
            let mut next = Some(holder);
            while let Some(other) = next {
                if other == conn {
                    return Err(Stopped::Refused(Refusal::Deadlock));
                }
                next = self.waits.get(&other).copied();
            }
            self.waits.insert(conn, holder);
            return Err(Stopped::Waits);
        }
        if let Some(tx) = self.open.get_mut(&conn) {
            tx.locks.insert(place);
        }
        Ok(())
    }

    fn lock(&mut self, conn: ConnId, key: &Key, segments: &RangeInclusive<u32>) -> Result<Vec<(u32, u64)>> {
        let seen: Vec<_> =
            self.visible(conn, key).into_iter().map(|it| it.0).filter(|it| segments.contains(it)).collect();
        let seen = self.seen.entry(conn).or_insert(seen).clone();
        for number in &seen {
            self.lock_place(conn, Place::Segment(key.clone(), *number))?;
        }
        Ok(seen.iter().filter_map(|it| Some((*it, self.quantity(conn, key, *it)?))).collect())
    }

    /// The unlocked segments with so many pieces, those to try first at the beginning.
    fn unlocked(&self, conn: ConnId, key: &Key, least: u64, first: [u32; 4]) -> Vec<(u32, u64)> {
        let mut unlocked = self.visible(conn, key);
        unlocked.retain(|(number, quantity)| {
            *quantity >= least && self.holder(conn, &Place::Segment(key.clone(), *number)).is_none()
        });
        unlocked.sort_by_key(|(number, _)| (first.iter().position(|it| it == number).unwrap_or(first.len()), *number));
        unlocked
    }

    fn take(&mut self, conn: ConnId, key: &Key, amount: u64, first: [u32; 4]) -> Option<u32> {
        let (number, quantity) = *self.unlocked(conn, key, amount, first).first()?;
        if let Some(tx) = self.open.get_mut(&conn) {
            tx.locks.insert(Place::Segment(key.clone(), number));
        }
        self.set(conn, key, number, Some(quantity - amount));
        Some(number)
    }

    fn take_batch(
        &mut self,
        conn: ConnId,
        key: &Key,
        sums: &[u64],
        first: [u32; 4],
        (note, number): (Token, i64),
    ) -> Option<(u32, usize)> {
        self.notes.get(&note).filter(|it| it.0 < number)?;
        let all = *sums.last()?;
        let mut free = self.unlocked(conn, key, sums[0], first);
        free.sort_by_key(|(_, quantity)| Reverse(*quantity >= all));
        let (segment, quantity) = *free.first()?;
        let takers = sums.iter().filter(|it| **it <= quantity).count();
        self.notes.insert(note, (number, (segment, takers)));
        self.set(conn, key, segment, Some(quantity - sums[takers - 1]));
        Some((segment, takers))
    }
}

/// What the simulation asks of the tables beside its processes.
impl Tables {
    /// The committed pieces of a stock.
    pub(crate) fn left(&self, key: &Key) -> u64 {
        self.segments.iter().filter(|(it, _)| it.0 == *key).map(|(_, quantity)| quantity).sum()
    }

    /// All pieces that were ever put into a stock.
    pub(crate) fn put(&self, key: &Key) -> u64 {
        self.put.get(key).copied().unwrap_or(0)
    }

    /// The pieces that were taken from each segment of a stock.
    pub(crate) fn taken(&self, key: &Key) -> impl Iterator<Item = (u32, u64)> {
        self.taken.iter().filter(move |(it, _)| it.0 == *key).map(|((_, number), taken)| (*number, *taken))
    }

    /// The committed value of a row.
    pub(crate) fn value(&self, row: i64) -> i64 {
        self.rows.get(&row).map_or(0, |it| it.value)
    }

    pub(crate) fn open_transactions(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn take_violations(&mut self) -> Vec<String> {
        std::mem::take(&mut self.violations)
    }
}
