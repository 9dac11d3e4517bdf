//! The fence guard: transactions of several writers in two databases. Each writer has been granted the lease at some
//! time and may be stopped for any time, so all of them run in any order.

use stateright::{Model, Property};

use crate::check::{Protocol, Scope};

/// The value of a resource is the number of transactions that have raised it.
pub const UPDATE: &str = "no update is lost";
/// After a commit with a fence, none with a lower one is committed in this database.
pub const ORDER: &str = "fences commit in order";
/// A transaction of a greater fence passes the guard after the open ones with lower fences have ended.
pub const WAIT: &str = "the guard waits for lower fences";
/// A holder whose fence is the greatest can commit in each database, twice, if all other writers are dead.
pub const AGAIN: &str = "the newest holder can write";

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// There is no guard.
    NoGuard,
    /// A lower fence is not refused.
    LowerIsTaken,
    /// The fence is compared and not kept.
    NotKept,
    /// The value is read before the guard.
    GuardAfterRead,
    /// The guard is a transaction of its own.
    GuardCommits,
    /// The transaction rolls back to a savepoint from before the guard.
    SavepointRolledBack,
    /// The second database is not guarded: its writers have passed the guard of the first one.
    OnlyFirstDatabase,
    /// An operator deletes the fences while a holder of an older lease can still write.
    FencesForgotten,
    /// An equal fence locks its row and does not write it.
    EqualOnlyLocks,
    /// An equal fence is refused.
    EqualIsRefused,
    /// A transaction whose process has died stays open.
    DeadStaysOpen,
}

/// The model with its bounds.
#[derive(Clone, Debug)]
pub struct Guard {
    bug: Option<Bug>,
    /// The fence of each writer.
    fences: &'static [u8],
    /// How many transactions each writer has.
    transactions: u8,
    /// Whether a transaction reads what was committed when it began, as in REPEATABLE READ. One whose guard finds a row
    /// that was written since then fails.
    snapshots: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Database {
    value: u8,
    /// How many transactions have raised the value.
    raised: u8,
    /// The row of the guard: the fence, by whom it is locked, and how often it was written.
    fence: u8,
    locked: Option<usize>,
    version: u8,
    /// The greatest fence that was committed.
    committed: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Transaction {
    database: usize,
    snapshot: Database,
    is_guarded: bool,
    /// What the guard's row had before.
    before: (u8, u8),
    read: Option<u8>,
    has_written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writer {
    left: u8,
    is_dead: bool,
    open: Option<Transaction>,
}

/// All writers and both databases.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct State {
    databases: [Database; 2],
    writers: Vec<Writer>,
    is_out_of_order: bool,
    is_early: bool,
    has_forgotten: bool,
}

#[derive(Clone, Debug, PartialEq)]
#[doc(hidden)]
pub enum Action {
    Begin { writer: usize, database: usize },
    Guard(usize),
    Read(usize),
    Write(usize),
    Commit(usize),
    Die(usize),
    Forget,
}

impl Guard {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn guard(&self, s: &mut State, writer: usize) -> Option<()> {
        let fence = self.fences[writer];
        let mut open = s.writers[writer].open?;
        let is_off = self.has(Bug::NoGuard) || self.has(Bug::OnlyFirstDatabase) && open.database > 0;
        let row = &mut s.databases[open.database];
        if self.snapshots && row.version != open.snapshot.version {
            // The snapshot is from before the wait.
            s.writers[writer].open = None;
            return Some(());
        }
        let is_refused =
            row.fence > fence && !self.has(Bug::LowerIsTaken) || row.fence == fence && self.has(Bug::EqualIsRefused);
        if is_refused && !is_off {
            s.writers[writer].open = None;
            return Some(());
        }
        open.is_guarded = true;
        open.before = (row.fence, row.version);
        if !is_off {
            let is_written = row.fence != fence || !self.has(Bug::EqualOnlyLocks);
            if is_written && !self.has(Bug::NotKept) {
                (row.fence, row.version) = (row.fence.max(fence), row.version + 1);
            }
            if self.has(Bug::SavepointRolledBack) {
                (row.fence, row.version) = open.before;
            } else if !self.has(Bug::GuardCommits) {
                row.locked = Some(writer);
            }
        }
        let lower = s.writers.iter().enumerate().filter(|(it, _)| self.fences[*it] < fence);
        let mut open_ones = lower.filter_map(|(_, it)| it.open);
        s.is_early |= open_ones.any(|it| it.is_guarded && it.database == open.database);
        s.writers[writer].open = Some(open);
        Some(())
    }

    fn commit(&self, s: &mut State, writer: usize) -> Option<()> {
        let open = s.writers[writer].open.take()?;
        let database = &mut s.databases[open.database];
        database.value = open.read? + 1;
        database.raised += 1;
        s.is_out_of_order |= self.fences[writer] < database.committed;
        database.committed = database.committed.max(self.fences[writer]);
        database.unlock(writer);
        s.writers[writer].left -= 1;
        Some(())
    }

    fn end(&self, s: &mut State, writer: usize) {
        let Some(open) = s.writers[writer].open else { return };
        if self.has(Bug::DeadStaysOpen) {
            return;
        }
        let row = &mut s.databases[open.database];
        if row.locked == Some(writer) {
            (row.fence, row.version) = open.before;
            row.unlock(writer);
        }
        s.writers[writer].open = None;
    }

    /// Whether the newest holder can commit twice in each database, if all writers have died.
    fn can_write(&self, s: &State) -> bool {
        let mut s = s.clone();
        for writer in 0..s.writers.len() {
            self.end(&mut s, writer);
        }
        let newest = self.fences.len() - 1;
        (0..2).all(|database| {
            s.writers[newest] = Writer { left: 2, is_dead: false, open: None };
            (0..2).all(|_| {
                let actions = [
                    Action::Begin { writer: newest, database },
                    Action::Guard(newest),
                    Action::Read(newest),
                    Action::Write(newest),
                    Action::Commit(newest),
                ];
                actions.into_iter().all(|action| {
                    let mut possible = Vec::new();
                    self.actions(&s, &mut possible);
                    let next = if possible.contains(&action) { self.next_state(&s, action) } else { None };
                    next.is_some_and(|it| {
                        s = it;
                        true
                    })
                })
            })
        })
    }
}

impl Database {
    fn unlock(&mut self, writer: usize) {
        self.locked = self.locked.filter(|it| *it != writer);
    }
}

impl Model for Guard {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let writer = Writer { left: self.transactions, is_dead: false, open: None };
        vec![State {
            databases: [Database::default(); 2],
            writers: vec![writer; self.fences.len()],
            is_out_of_order: false,
            is_early: false,
            has_forgotten: false,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for (number, writer) in s.writers.iter().enumerate().filter(|(_, it)| !it.is_dead) {
            let Some(open) = writer.open else {
                if writer.left > 0 {
                    actions.extend((0..2).map(|database| Action::Begin { writer: number, database }));
                }
                continue;
            };
            actions.push(Action::Die(number));
            let may_read = open.is_guarded || self.has(Bug::GuardAfterRead);
            let is_locked = s.databases[open.database].locked.is_some();
            if !open.is_guarded && !is_locked && (open.read.is_some() || !self.has(Bug::GuardAfterRead)) {
                actions.push(Action::Guard(number));
            }
            if may_read && open.read.is_none() {
                actions.push(Action::Read(number));
            }
            if open.is_guarded && open.read.is_some() && !open.has_written {
                actions.push(Action::Write(number));
            }
            if open.has_written {
                actions.push(Action::Commit(number));
            }
        }
        if self.has(Bug::FencesForgotten) && !s.has_forgotten {
            actions.push(Action::Forget);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        match action {
            Action::Begin { writer, database } => {
                let mut snapshot = s.databases[database];
                // What the transaction that has locked the row has written is not committed yet.
                if let Some(before) = snapshot.locked.and_then(|it| s.writers[it].open).map(|it| it.before) {
                    (snapshot.fence, snapshot.version) = before;
                }
                s.writers[writer].open = Some(Transaction {
                    database,
                    snapshot: if self.snapshots { snapshot } else { Database::default() },
                    is_guarded: false,
                    before: (0, 0),
                    read: None,
                    has_written: false,
                });
            }
            Action::Guard(writer) => self.guard(&mut s, writer)?,
            Action::Read(writer) => {
                let open = s.writers[writer].open.as_mut()?;
                let seen = if self.snapshots { open.snapshot } else { s.databases[open.database] };
                open.read = Some(seen.value);
            }
            Action::Write(writer) => s.writers[writer].open.as_mut()?.has_written = true,
            Action::Commit(writer) => self.commit(&mut s, writer)?,
            Action::Die(writer) => {
                s.writers[writer].is_dead = true;
                self.end(&mut s, writer);
            }
            Action::Forget => {
                s.has_forgotten = true;
                for database in s.databases.iter_mut().filter(|it| it.locked.is_none()) {
                    database.fence = 0;
                }
            }
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(UPDATE, |_, s: &State| s.databases.iter().all(|it| it.value == it.raised)),
            Property::always(ORDER, |_, s: &State| !s.is_out_of_order),
            Property::always(WAIT, |_, s: &State| !s.is_early),
            Property::always(AGAIN, |model: &Self, s: &State| model.can_write(s)),
            Property::sometimes("all writers commit in both databases", |model: &Self, s: &State| {
                let commits = u8::try_from(model.fences.len()).unwrap_or(0) * model.transactions;
                s.databases.iter().map(|it| it.raised).sum::<u8>() == commits
                    && s.databases.iter().all(|it| it.raised > 0)
            }),
        ]
    }
}

impl Protocol for Guard {
    type Bug = Bug;

    fn scopes() -> Vec<Scope<Self>> {
        let base = Self { bug: None, fences: &[1, 2, 3], transactions: 1, snapshots: false };
        vec![
            Scope {
                name: "read committed",
                model: base.clone(),
                limits: &[],
                bugs: &[
                    Bug::NoGuard,
                    Bug::LowerIsTaken,
                    Bug::NotKept,
                    Bug::GuardAfterRead,
                    Bug::GuardCommits,
                    Bug::SavepointRolledBack,
                    Bug::OnlyFirstDatabase,
                    Bug::FencesForgotten,
                    Bug::EqualIsRefused,
                    Bug::DeadStaysOpen,
                ],
            },
            Scope {
                name: "snapshots",
                model: Self { fences: &[2, 2, 2], snapshots: true, ..base },
                limits: &[],
                bugs: &[Bug::EqualOnlyLocks],
            },
        ]
    }

    fn with(self, bug: Bug) -> Self {
        Self { bug: Some(bug), ..self }
    }
}
