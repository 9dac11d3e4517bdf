//! A request: the look for its answer, the transaction that has the lock of its key, and what is stored in that.

use std::{future::Future, iter::once_with, panic::Location, time::Duration};

use sqlx::Pool;
use tokio::time::{Instant, timeout};

use crate::{
    body::{
        scope::{Lock, Realm, Record, is_under},
        task::{is_answered, no_answer, until},
    },
    policy::Wait,
    sql::{
        AsConnection, Dialect, Granted, Names, Sharing, failed, failed_on_own_table,
        idempotent::{
            answer::Forms,
            fingerprint::Fingerprint,
            ops::{IdempotentOps, StoredAnswer},
        },
        in_step,
        named::{NamedLock, backstop},
        note_answer,
        starved::answers,
        tx::{Opening, PASS_TX, Terms, Tx, check_begun, check_failed, if_alive, refuse_under_own_lock},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

const LOOKING: &str = "looking for the answer";
const BEGINNING: &str = "storing that the work has begun";
const MARKING: &str = "marking where the work begins";
const STORING: &str = "storing the answer";

/// Longest time to store an answer.
pub(super) const STORE_LIMIT: Duration = Duration::from_secs(30);

/// Far longer than an answer is useful, and far from the end of what a clock in microseconds can count.
const LONGEST: Duration = Duration::from_hours(24 * 36_500);

/// How long it is known at least that work has begun and has no answer. A client does not repeat its request for so
/// long.
const BEGUN: Duration = Duration::from_hours(24 * 90);

/// A request that is made of this database.
pub(super) struct Asked<'a, DB: Dialect> {
    pub(super) pool: &'a Pool<DB>,
    pub(super) key: &'a Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) at: &'static Location<'static>,
}

/// The row of a key.
pub(super) enum Found {
    Answer(Vec<u8>),
    Begun(Earlier),
}

/// An attempt at work outside of the database that has begun before.
pub(super) struct Earlier {
    /// When it began, in microseconds since 1970, and how long ago that is.
    pub(super) begun_us: i64,
    pub(super) age_us: i64,
}

/// What a look for an answer has found.
pub(super) enum Looked<DB: Dialect> {
    Answer(Vec<u8>),
    /// No answer, and this transaction has the lock of the key.
    Locked(Tx<DB>, Option<Earlier>),
}

impl<DB: IdempotentOps> Asked<'_, DB> {
    /// Looks for the answer, and begins a transaction that has the lock of the key if there is none.
    pub(super) async fn begin(&self, wait: Wait) -> Result<Looked<DB>> {
        let Self { pool, key, .. } = *self;
        let realm = Realm::answers(pool);
        if is_under(|it| it.realm == realm && it.key == *key) {
            return Err(Error::Reentrant { lock: "the lock of the answer", key: key.clone(), hint: PASS_TX });
        }
        refuse_under_own_lock(pool)?;
        let started = Instant::now();
        loop {
            match self.begin_once(left(wait, started)).await {
                // A deadlock among those who wait. Nothing was done.
                Err(err) if err.is_transient() && started.elapsed() < wait.limit() => {}
                begun => return begun,
            }
        }
    }

    async fn begin_once(&self, wait: Wait) -> Result<Looked<DB>> {
        let Self { pool, key, at, .. } = *self;
        let started = Instant::now();
        let (looking, found) = self.look(wait).await?;
        if let Some(Found::Answer(answer)) = found {
            looking.put_back();
            return Ok(Looked::Answer(answer));
        }
        let terms = Terms { wait: Some(wait), deadline: None, started, at };
        let mut tx = looking.begin(pool, terms).await?;
        let locked = async {
            let granted = if DB::ONE_WRITER {
                // There, the transaction has the one lock of the database.
                Granted::Known
            } else {
                NamedLock::of_answer(key.clone(), wait).locked(&mut tx).await?
            };
            if granted == Granted::New {
                // The new row is that of the answer.
                return Ok(None);
            }
            // Another request may have stored its answer since. The row may be locked, by a session without the lock of
            // the key.
            let Some(looked) = until(backstop(wait), DB::answer_look_locked(tx.for_query(), key)).await else {
                return Err(Error::Contended { key: key.clone(), waited: started.elapsed(), holder: None });
            };
            let looked = looked.map_err(|err| failed_on_own_table::<DB>(LOOKING, Some(key), err));
            self.found(note_answer(&mut tx, looked)?)
        };
        match locked.await {
            Ok(Some(Found::Answer(answer))) => {
                tx.undo().await;
                Ok(Looked::Answer(answer))
            }
            Ok(Some(Found::Begun(earlier))) => Ok(Looked::Locked(tx, Some(earlier))),
            Ok(None) => Ok(Looked::Locked(tx, None)),
            Err(err) => {
                let is_unanswered = tx.is_unanswered();
                tx.undo().await;
                let is_silent = is_unanswered && matches!(err, Error::Contended { .. }) && !answers(pool).await;
                Err(if is_silent { no_answer(LOOKING, Some(key)) } else { err })
            }
        }
    }

    /// The stored answer, if there is one. Takes no lock.
    pub(super) async fn answer(&self, wait: Wait) -> Result<Option<Vec<u8>>> {
        let (looking, found) = self.look(wait).await?;
        looking.put_back();
        Ok(match found {
            Some(Found::Answer(answer)) => Some(answer),
            Some(Found::Begun(_)) | None => None,
        })
    }

    /// Looks outside of a transaction, and returns the connection.
    async fn look(&self, wait: Wait) -> Result<(Opening<DB>, Option<Found>)> {
        let Self { pool, key, .. } = *self;
        if let Some(kept) = Opening::kept(pool)
            && let Some(looked) = if_alive(pool, self.look_on(kept, wait)).await
        {
            return looked;
        }
        self.look_on(Opening::new(pool, LOOKING, Some(key)).await?, wait).await
    }

    /// A lock of the whole table holds up those who only read, too.
    async fn look_on(&self, mut looking: Opening<DB>, wait: Wait) -> Result<(Opening<DB>, Option<Found>)> {
        let (conn, session) = looking.conn();
        let Some(row) = until(backstop(wait), DB::answer_look(conn, session, self.key)).await else {
            return Err(no_answer(LOOKING, Some(self.key)));
        };
        let row = row.map_err(|err| failed_on_own_table::<DB>(LOOKING, Some(self.key), err));
        match row.and_then(|row| self.found(row)) {
            Ok(found) => Ok((looking, found)),
            // Another process has locked the database, even for readers: it is waited for as the wait says.
            Err(Error::Database { fault: Fault::Contended, .. }) if DB::ONE_WRITER => Ok((looking, None)),
            Err(err) => {
                if is_answered(&err) {
                    looking.put_back();
                }
                Err(err)
            }
        }
    }

    /// What is stored for this request.
    fn found(&self, row: Option<StoredAnswer>) -> Result<Option<Found>> {
        let Self { key, fingerprint, .. } = *self;
        let Some(StoredAnswer { fingerprint: of, answer, made_us: begun_us, age_us }) = row else { return Ok(None) };
        if of != fingerprint.as_bytes() {
            return Err(Error::Mismatch { key: key.clone() });
        }
        Ok(Some(answer.map_or(Found::Begun(Earlier { begun_us, age_us }), Found::Answer)))
    }
}

/// What is left of the wait.
pub(super) fn left(wait: Wait, started: Instant) -> Wait {
    let left = (wait != Wait::Unbounded).then(|| wait.limit().saturating_sub(started.elapsed()));
    Wait::within(Some(wait), left)
}

/// A request whose work is being done.
#[derive(Debug)]
pub struct Answering {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) keep: Duration,
    pub(super) most: usize,
    /// Whether the answer is stored in the transaction that looked for it, which is marked.
    pub(super) is_marked: bool,
}

impl Answering {
    /// The lock of the key, which the work must not request again.
    pub(crate) fn record<DB: Dialect>(&self, pool: &Pool<DB>) -> Record {
        Record::new(once_with(|| Lock::of(Realm::answers(pool), self.key.clone())))
    }

    /// Marks what is kept if the work ends with an error that is stored.
    pub(super) async fn mark<DB: IdempotentOps>(&self, tx: &mut Tx<DB>) -> Result<()> {
        mark(tx, Some(&self.key)).await
    }

    /// Stores the answer and commits. Rolls back without an answer, or if it cannot be stored. Of work that ends with
    /// an error, only the error is stored. The outer result is an error if nothing was. Callers box it, as `begin`.
    pub(crate) async fn end<DB, T, E>(
        self,
        mut tx: Tx<DB>,
        done: Result<T, E>,
        forms: &Forms<T, E>,
    ) -> Result<Result<T, E>, E>
    where
        DB: IdempotentOps,
        E: From<Error>,
    {
        let Some(text) = forms.written(&done, &self.key, self.most) else {
            tx.undo().await;
            return done.map(Ok);
        };
        let keeps_work = done.is_ok();
        let stored = async {
            let text = text?;
            if !keeps_work {
                let undone = DB::answer_undo(tx.for_query()).await.map_err(check_failed::<DB>);
                note_answer(&mut tx, undone)?;
            }
            self.store(&mut tx, &text).await
        };
        if let Err(err) = self.in_time::<DB, _>(stored).await {
            tx.undo().await;
            return Err(err.into());
        }
        if self.is_marked {
            // The answer was stored because this transaction is open.
            tx.commit_seen_open().await?;
        } else {
            tx.commit().await?;
        }
        Ok(done)
    }

    /// Bounds the statements that store the answer. They wait for nobody, unless the body has left a statement on its
    /// way, or has overlooked that the database ended its transaction.
    pub(super) async fn in_time<DB: Dialect, T>(&self, storing: impl Future<Output = Result<T>>) -> Result<T> {
        let stored = timeout(STORE_LIMIT, in_step::<DB, _>(STORING, Some(&self.key), storing)).await;
        stored.unwrap_or_else(|_| Err(no_answer(STORING, Some(&self.key))))
    }

    /// Stores that the work has begun.
    pub(super) async fn begin<DB: IdempotentOps>(&self, tx: &mut Tx<DB>) -> Result<()> {
        let Self { key, fingerprint, keep, most: _, is_marked: _ } = self;
        let begun = DB::answer_begin(tx.for_query(), key, fingerprint.as_bytes(), (*keep).clamp(BEGUN, LONGEST)).await;
        note_answer(tx, begun.map_err(|err| failed_on_own_table::<DB>(BEGINNING, Some(key), err)))
    }

    /// Takes the lock of the key in a transaction that does not have it.
    pub(super) async fn lock<DB: IdempotentOps>(&self, tx: &mut Tx<DB>) -> Result<()> {
        if DB::ONE_WRITER {
            return Ok(());
        }
        let locked = DB::named_lock(
            tx.for_query(),
            Names::Answers { have_begun: true },
            &self.key,
            Sharing::Alone,
            STORE_LIMIT.into(),
        )
        .await;
        // It is no other request that has the lock then, which `Error::Contended` would say.
        let locked = locked.map(drop).map_err(|err| match DB::fault(&err) {
            Fault::NoTransaction => Error::TransactionEnded { source: err.into() },
            _ => failed_on_own_table::<DB>(STORING, Some(&self.key), err),
        });
        note_answer(tx, locked)
    }

    /// Stores the answer, if the transaction that looked for it is still open. Callers [bound](Self::in_time) it.
    pub(super) async fn store<DB: IdempotentOps>(&self, tx: &mut Tx<DB>, answer: &[u8]) -> Result<()> {
        let Self { key, fingerprint, keep, most: _, is_marked } = self;
        let stored = async {
            let conn = tx.for_query();
            let keep = (*keep).min(LONGEST);
            match DB::answer_store(conn, key, fingerprint.as_bytes(), answer, keep, *is_marked).await {
                Ok(true) => Ok(()),
                Ok(false) => {
                    if DB::CHECKED_LAST {
                        check_begun::<DB>(conn).await?;
                    }
                    Err(Error::TransactionEnded { source: OtherTransaction.into() })
                }
                // The table was there when the mark was made.
                Err(err) if *is_marked && matches!(DB::fault(&err), Fault::NoTransaction | Fault::NoTable) => {
                    Err(check_failed::<DB>(err))
                }
                Err(err) => Err(failed_on_own_table::<DB>(STORING, Some(key), err)),
            }
        };
        let stored = stored.await;
        note_answer(tx, stored)
    }
}

/// Marks the place in the transaction where the work begins.
pub(super) async fn mark<DB: IdempotentOps>(tx: &mut Tx<DB>, key: Option<&Key>) -> Result<()> {
    let marked = DB::answer_mark(tx.for_query()).await;
    note_answer(tx, marked.map_err(|err| failed::<DB>(MARKING, key, err)))
}

/// Fails if the transaction that was marked has ended. Callers [bound](Answering::in_time) it.
pub(super) async fn unmark<DB: IdempotentOps>(tx: &mut Tx<DB>) -> Result<()> {
    let unmarked = DB::answer_unmark(tx.for_query()).await;
    note_answer(tx, unmarked.map_err(check_failed::<DB>))
}

/// Why an answer is not stored.
#[derive(Debug, thiserror::Error)]
#[error("it does not see the row of its lock: it is another transaction, or it finds another table")]
struct OtherTransaction;
