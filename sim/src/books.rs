//! What tasks were told of stocks and rows, to compare it with what the server did.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use lockkit::{Error, Key, Taken};

use crate::{
    plan::{Fault, Plan, What},
    tables::{Answer, Query},
    trade::{self, Deal, Update},
    world::World,
};

/// How long a row may rest, in microseconds, while a process without company writes it: less than a turn lasts.
const REST: u64 = 220_000;

/// How long an update may have run, in microseconds, for its turn not to have passed on: less than a turn lasts.
const TURN: u64 = 240_000;

/// By how much a call may outlast its bound in a calm run: a statement, and the backstop of a wait.
const SLACK: Duration = Duration::from_millis(1200);

/// Longest wait for the answer to a COMMIT.
const COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// What the tasks know.
#[derive(Debug, Default)]
pub(crate) struct Books {
    stocks: BTreeMap<Key, Told>,
    rows: BTreeMap<i64, Told>,
    /// The calls that take: the stock, and the least that was left of it since they began.
    takers: BTreeMap<u64, (Key, u64)>,
    /// The updates of each row that run, with the times at which they began, and when something last happened to it.
    updates: BTreeMap<i64, BTreeMap<u64, u64>>,
    last_use: BTreeMap<i64, u64>,
    /// The updates of a row by a process that are in a further attempt.
    repeated: BTreeMap<(usize, i64), BTreeSet<u64>>,
    /// Whether processes are stopped, and so may be late.
    is_stopped: bool,
    /// Whether one process writes each row, nothing fails, and a task that rests does not wait for the only connection.
    is_alone: bool,
}

/// Of a stock or a row.
#[derive(Debug, Default)]
struct Told {
    put: u64,
    unknown_put: u64,
    /// By segment.
    taken: BTreeMap<u32, u64>,
    unknown: u64,
}

impl Books {
    pub(crate) fn of(plan: &Plan) -> Self {
        let is_long = |it: &What| matches!(it, What::Deal(Deal::Update(update)) if update.pause > 100);
        Self {
            is_stopped: plan.faults.iter().any(|(_, it)| matches!(it, Fault::Stop { .. })),
            is_alone: plan.is_calm()
                && plan.processes.len() == 1
                && plan.settings.connections > 1
                && !plan.has(&is_long),
            ..Self::default()
        }
    }
}

/// Whether an error says that the work may have been done.
fn is_unknown(err: &Error) -> bool {
    matches!(err, Error::OutcomeUnknown { .. } | Error::Database { fault: lockkit::Fault::Unavailable, .. })
}

impl World {
    /// A task calls `take`. Returns the number of the call.
    pub(crate) fn takes(&mut self, key: &Key) -> u64 {
        let (number, left) = (self.number(), self.store.tables.left(key));
        self.books.takers.insert(number, (key.clone(), left));
        number
    }

    /// A call of `take` has returned. `None` if it was dropped.
    pub(crate) fn has_taken(&mut self, number: u64, amount: u64, result: Option<&Result<Taken, Error>>) {
        let Some((key, least)) = self.books.takers.remove(&number) else { return };
        let told = self.books.stocks.entry(key.clone()).or_default();
        match result {
            None => told.unknown += amount,
            Some(Err(err)) if is_unknown(err) => told.unknown += amount,
            Some(Ok(taken)) => {
                self.counts.takes += 1;
                for (segment, pieces) in taken.segments() {
                    *told.taken.entry(segment).or_default() += pieces;
                }
                if taken.amount() != amount {
                    self.violation(format!("a take of {amount} from `{key}` was answered with {taken:?}"));
                }
            }
            Some(Err(Error::SoldOut { .. })) if least >= amount => {
                self.violation(format!("a take of {amount} from `{key}` was refused, though {least} were left"));
            }
            Some(Err(_)) => {}
        }
    }

    /// A transaction has taken these, and was committed.
    pub(crate) fn ordered(&mut self, key: &Key, taken: &[Taken], committed: Option<&Result<(), Error>>) {
        let told = self.books.stocks.entry(key.clone()).or_default();
        match committed {
            Some(Ok(())) => {
                for (segment, pieces) in taken.iter().flat_map(Taken::segments) {
                    *told.taken.entry(segment).or_default() += pieces;
                }
            }
            Some(Err(err)) if !matches!(err, Error::OutcomeUnknown { .. }) => {}
            _ => told.unknown += taken.iter().map(Taken::amount).sum::<u64>(),
        }
    }

    /// A call of `put` has returned. `None` if it was dropped.
    pub(crate) fn has_put(&mut self, key: &Key, amount: u64, result: Option<&Result<(), Error>>) {
        let told = self.books.stocks.entry(key.clone()).or_default();
        match result {
            Some(Ok(())) => told.put += amount,
            Some(Err(err)) if !matches!(err, Error::OutcomeUnknown { .. }) => {}
            _ => told.unknown_put += amount,
        }
    }

    /// A task updates rows. Returns the number of the update.
    pub(crate) fn updates(&mut self, process: usize, rows: &[i64]) -> u64 {
        let (number, at) = (self.number(), self.time_of(process));
        // One of several rows may rest while there is a queue for another.
        if let [row] = rows {
            self.books.updates.entry(*row).or_default().insert(number, at);
        }
        number
    }

    /// An update has returned, or was dropped.
    pub(crate) fn has_updated(&mut self, number: u64, update: &Update, result: Option<&Result<(), Error>>) {
        for row in &update.rows {
            self.books.updates.entry(*row).or_default().remove(&number);
            let told = self.books.rows.entry(*row).or_default();
            match result {
                Some(Ok(())) => told.put += 1,
                Some(Err(err)) if !update.may_have_written(err) => {}
                _ => told.unknown_put += 1,
            }
        }
        self.counts.updates += u64::from(result.is_some_and(Result::is_ok));
    }

    /// The retry of an update has returned after this long.
    pub(crate) fn retried(&mut self, process: usize, update: &Update, result: &Result<(), Error>, took: Duration) {
        let deadline = Duration::from_millis(update.deadline);
        let waits_for_commit = if update.in_tx { COMMIT_LIMIT } else { Duration::ZERO };
        let limit = deadline + if self.judge.is_calm { SLACK } else { waits_for_commit + SLACK };
        if took > limit && !self.books.is_stopped {
            self.violation(format!("p{process} had an update last {took:?} whose deadline was {deadline:?}"));
        }
        if let Err(err) = result
            && self.judge.is_calm
            && !matches!(err, Error::RetriesExhausted { .. })
        {
            self.violation(format!("p{process} could not update a row in a calm run: {err}"));
        }
    }

    /// An attempt of an update begins, as the retry counts it and as the task does.
    pub(crate) fn attempts(&mut self, process: usize, number: u64, update: &Update, nth: u32, count: u32) {
        // One that stands back is not counted, and there is one at most.
        if nth > update.attempts || count > update.attempts + 1 {
            let most = update.attempts;
            self.violation(format!("attempt {nth} of {most} at an update, the {count}. call"));
        }
        // Its first attempt takes no turn until it reads.
        let [row] = *update.rows else { return };
        if count == 1 || self.books.is_stopped {
            return;
        }
        let now = self.time_of(process);
        let repeated = self.books.repeated.entry((process, row)).or_default();
        let began = self.books.updates.get(&row);
        // A turn that has lasted too long passes on, also during the pause of its holder, who then takes none until it
        // reads.
        let has_turn = |it: &u64| began.and_then(|all| all.get(it)).is_some_and(|began| now < began + TURN);
        let is_alone = !repeated.iter().any(has_turn);
        repeated.insert(number);
        if !is_alone && has_turn(&number) {
            self.violation(format!("two tasks of p{process} write row {row} at once, after conflicts"));
        }
    }

    /// An attempt of an update has ended.
    pub(crate) fn attempted(&mut self, process: usize, number: u64, update: &Update) {
        for row in &update.rows {
            self.books.repeated.entry((process, *row)).or_default().remove(&number);
        }
    }

    /// The server has executed a query, and its caller gets the answer or not.
    pub(crate) fn queried(&mut self, query: &Query, answer: &Answer, is_answered: bool) {
        if let (Query::Save { .. }, Answer::Saved(false)) = (query, answer) {
            self.counts.conflicts += 1;
        }
        if !is_answered {
            self.counts.has_lost(query, answer);
        }
        for (key, least) in self.books.takers.values_mut() {
            *least = (*least).min(self.store.tables.left(key));
        }
        let (Query::Read(row) | Query::Save { row, .. }) = query else { return };
        let last = self.books.last_use.insert(*row, self.now).unwrap_or(0);
        let began = self.books.updates.get(row).and_then(|it| it.values().min().copied()).unwrap_or(self.now);
        let rested = self.now.saturating_sub(last.max(began));
        if self.books.is_alone && rested > REST {
            self.violation(format!("row {row} rested for {} ms while a task was to write it", rested / 1000));
        }
    }

    /// What the tables say at the end: everything acknowledged is there, and no more than that and what was not
    /// answered.
    pub(crate) fn check_books(&mut self) {
        let none = Told::default();
        let mut found = Vec::new();
        for key in trade::stocks().map(|it| Key::from(trade::name(it))) {
            let Told { put, unknown_put, taken, unknown } = self.books.stocks.get(&key).unwrap_or(&none);
            let tables = &self.store.tables;
            let is: BTreeMap<_, _> = tables.taken(&key).collect();
            let (was_put, was_taken) = (tables.put(&key), is.values().sum::<u64>());
            let told = taken.values().sum::<u64>();
            if !(*put..=put + unknown_put).contains(&was_put) {
                found.push(format!("{put} pieces were put into `{key}` and {unknown_put} perhaps, and {was_put} are"));
            }
            if !(told..=told + unknown).contains(&was_taken) {
                found.push(format!("{told} pieces were taken of `{key}` and {unknown} perhaps, and {was_taken} are"));
            }
            if was_put != was_taken + tables.left(&key) {
                let left = tables.left(&key);
                found
                    .push(format!("{was_put} pieces were put into `{key}` and {was_taken} taken, and {left} are left"));
            }
            for (segment, told) in taken {
                let is = is.get(segment).copied().unwrap_or(0);
                if is < *told {
                    found.push(format!("{told} pieces were taken from segment {segment} of `{key}`, and {is} are"));
                }
            }
        }
        for row in trade::rows() {
            let Told { put, unknown_put, .. } = self.books.rows.get(&row).unwrap_or(&none);
            let value = u64::try_from(self.store.tables.value(row)).unwrap_or(0);
            if !(*put..=put + unknown_put).contains(&value) {
                found.push(format!("row {row} was updated {put} times and {unknown_put} perhaps, and has {value}"));
            }
        }
        for what in found {
            self.violation(what);
        }
    }
}

impl Update {
    /// Whether the rows may have been written all the same. A transaction is cut off by no deadline in its commit, and
    /// without an answer to that the error says so.
    fn may_have_written(&self, err: &Error) -> bool {
        let is_alone = !self.in_tx && (is_unknown(err) || matches!(err, Error::RetriesExhausted { .. }));
        is_alone || matches!(err, Error::OutcomeUnknown { .. })
    }
}
