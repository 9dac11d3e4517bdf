//! Batches: the statements that take for many callers at once, and the result of each caller.
//!
//! A batch forms while a statement is in flight or a connection is waited for ([`batch`](crate::body::batch)). It takes
//! from one segment for as many of the oldest calls as it has enough for. If no unlocked segment has enough for the
//! first call, that call and those that want as much go on alone; so a large call neither starves nor delays small
//! ones, and only a call that is alone gets `Contended`. Errors that prove that nothing was taken also make the calls
//! go on alone.
//!
//! A batch without an answer is settled by its note. On servers, the statement also writes the number of the batch to a
//! row, and takes nothing unless the row has a lower number: both or neither. Without an answer lockkit writes the
//! highest number unless the batch's own is there, and reads the row. The write waits for a statement that is still
//! being executed, and refuses one that arrives later. A batch of one call has no note, and neither has SQLite: an
//! embedded database loses no answers.

use std::time::Duration;

use tokio::{
    task::yield_now,
    time::{Instant, sleep, timeout},
};

use crate::{
    body::batch::{self, Batches, fail, fail_unknown},
    sql::{
        Note, Portion, StockOps,
        pool::{Failed, Reach, call, tried, write},
        pool_state::of_pool,
        stock::{
            Stock, Taken,
            attempt::{DOING, answered},
            notes::{Borrowed, Notes},
            segment::sum,
        },
    },
    value::{
        error::{Error, Fault},
        key::Key,
    },
};

/// The takes of the stocks of a pool.
pub(super) type Takes = Batches<Key, Take, Took>;

type Runner = batch::Runner<Key, Take, Took>;
type Waiter = batch::Waiter<Take, Took>;

/// A take of this many pieces. A batch waits for the lock of the whole database until the first of its waits ends.
#[derive(Debug)]
pub(super) struct Take {
    pub(super) amount: u64,
    pub(super) wait_ends: Option<Instant>,
}

/// The answer of a batch to a take.
#[derive(Debug)]
pub(super) enum Took {
    Taken(Taken),
    SoldOut { left: u64 },
}

/// Longest time to find out whether a batch was executed whose answer was lost.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// Longest time for one attempt at it.
const SETTLE_TRY: Duration = Duration::from_secs(2);

/// Pause between two attempts.
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// Takes batches from the queue until it is empty, or the database does not answer. Then each waiter that is left goes
/// on alone, with its own wait.
pub(super) async fn run<DB: StockOps>(stock: Stock<DB>, runner: Runner) {
    while runner.has_waiters() {
        if !one(&stock, &runner).await {
            return;
        }
        // The callers that were answered may come back at once, and join the next batch.
        yield_now().await;
    }
}

/// What became of a batch.
enum Outcome {
    Took(Portion),
    /// No unlocked segment has enough for the first waiter. `left` is what all segments have.
    TooFew {
        left: u64,
    },
    /// The note, which was there before, is gone. Nothing was taken.
    NoNote,
}

/// Runs one batch. It is formed when the connection is there, so that it includes the takes that arrived meanwhile.
/// Returns `false` if the database did not answer.
async fn one<DB: StockOps>(stock: &Stock<DB>, runner: &Runner) -> bool {
    let Stock { pool, key, .. } = stock;
    let mut noted = Borrowed::new(of_pool::<Notes, _>(pool));
    let mut waiters = Vec::new();
    let mut is_new = true;
    let outcome = write(pool, Reach::TAKE, DOING, Some(key), async |conn, grammar, tries| {
        waiters = runner.next(|calls| sums(calls.map(|it| it.amount)).count());
        let tries = tries.by(waiters.iter().filter_map(|it| it.call.wait_ends).min());
        let sums: Vec<_> = sums(waiters.iter().map(|it| it.call.amount)).collect();
        let first = stock.random_segments();
        let took = match &*sums {
            [] => return Ok(Outcome::TooFew { left: 0 }),
            // A single take needs no note: its caller gets an error when the answer was lost.
            [amount] => {
                let segment =
                    tried!(tries, answered::<DB, _>(DB::stock_take_any(conn, Some(grammar), key, *amount, first)))?;
                segment.map(|segment| Portion { segment, takers: 1 })
            }
            _ => {
                is_new = DB::IS_REMOTE && !noted.is_made;
                if is_new {
                    answered::<DB, _>(DB::stock_note_make(conn, noted.note)).await?;
                    noted.is_made = true;
                }
                tried!(tries, answered::<DB, _>(DB::stock_take_batch(conn, key, &sums, first, noted.note)))?
            }
        };
        if let Some(portion) = took {
            return Ok(Outcome::Took(portion));
        }
        if DB::IS_REMOTE && sums.len() > 1 {
            match answered::<DB, _>(DB::stock_note_look(conn, noted.note)).await? {
                // A proxy has sent the statement again after the answer to it was lost.
                Some((number, portion)) if number == noted.note.number => return Ok(Outcome::Took(portion)),
                None if !is_new => return Ok(Outcome::NoNote),
                _ => {}
            }
        }
        let look = answered::<DB, _>(DB::stock_look(conn, key)).await?;
        Ok(Outcome::TooFew { left: sum(&look.segments) })
    })
    .await;
    match outcome.map_err(Failed::into_error) {
        Ok(Outcome::Took(portion)) => {
            noted.free();
            runner.put_back(answer_first(waiters, portion));
        }
        Ok(Outcome::TooFew { left }) => {
            noted.free();
            runner.put_back(refuse(waiters, left));
        }
        Ok(Outcome::NoNote) => runner.put_back(waiters),
        // No connection.
        Err(err) if waiters.is_empty() => {
            fail(runner.next(|calls| calls.count()), DOING, |_| key.clone(), err);
            return false;
        }
        // The batch was refused, or was not sent because its note could not be made.
        Err(err) if !is_lost(&err) || DB::IS_REMOTE && waiters.len() > 1 && !noted.is_made => {
            noted.free();
            waiters.into_iter().for_each(Waiter::goes_alone);
        }
        Err(err) if DB::IS_REMOTE && waiters.len() > 1 => {
            tokio::spawn(settle(stock.clone(), noted.note, waiters, err));
            return false;
        }
        Err(err) => {
            fail(waiters, DOING, |_| key.clone(), err);
            return false;
        }
    }
    true
}

/// Whether the statement may have been executed although it failed: no server has refused it.
fn is_lost(err: &Error) -> bool {
    match err {
        Error::Database { fault: Fault::Unavailable, .. } => true,
        Error::Database { .. } => !matches!(err.as_sqlx(), Some(sqlx::Error::Database(_))),
        _ => false,
    }
}

/// Answers the first waiters, and returns the others.
fn answer_first(mut waiters: Vec<Waiter>, Portion { segment, takers: first }: Portion) -> Vec<Waiter> {
    let others = waiters.split_off(first.min(waiters.len()));
    for waiter in waiters {
        let taken = Taken::from_one(segment, waiter.call.amount);
        waiter.answer(Took::Taken(taken));
    }
    others
}

/// Refuses the waiters that want more than is left. Those that want no less than the first go on alone, because they
/// may have to wait. Returns the others.
fn refuse(waiters: Vec<Waiter>, left: u64) -> Vec<Waiter> {
    let most = waiters.first().map_or(0, |it| it.call.amount);
    let mut others = Vec::new();
    for waiter in waiters {
        if waiter.call.amount > left {
            waiter.answer(Took::SoldOut { left });
        } else if waiter.call.amount >= most {
            waiter.goes_alone();
        } else {
            others.push(waiter);
        }
    }
    others
}

/// Finds out whether the batch was executed, and answers the waiters. Refuses it first, so that it cannot be executed
/// later.
async fn settle<DB: StockOps>(stock: Stock<DB>, note: Note, waiters: Vec<Waiter>, err: Error) {
    let Stock { pool, key, .. } = &stock;
    let deadline = Instant::now() + SETTLE_LIMIT;
    let executed = loop {
        let asked = call(pool, Reach::POOL, DOING, Some(key), async |conn, _| {
            DB::stock_note_void(conn, note).await?;
            DB::stock_note_look(conn, note).await
        });
        match timeout(SETTLE_TRY, asked).await {
            Ok(Ok(Some((number, portion)))) if number == note.number => break Some(Some(portion)),
            Ok(Ok(Some((Note::VOID, _)))) => break Some(None),
            // Anything else proves nothing: it may have been read on a replica.
            _ if Instant::now() >= deadline => break None,
            _ => sleep(SETTLE_PAUSE).await,
        }
    };
    let others = match executed {
        Some(Some(portion)) => answer_first(waiters, portion),
        Some(None) => waiters,
        None => return fail_unknown(waiters, err),
    };
    others.into_iter().for_each(Waiter::goes_alone);
}

/// The ascending sums of the amounts, as far as they fit in an `i64`.
fn sums(amounts: impl Iterator<Item = u64>) -> impl Iterator<Item = i64> {
    amounts.scan(0_i64, |sum, amount| {
        *sum = sum.checked_add_unsigned(amount)?;
        Some(*sum)
    })
}
