//! A request that is done once.

use std::{future::Future, time::Duration};

use axum_core::response::{IntoResponse, Response};
use http::{
    HeaderName,
    header::{
        CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE, ETAG, LAST_MODIFIED, LINK, LOCATION,
    },
};
use lockkit::{Answered, Error, Idempotent, Tx, Wait, dialect::IdempotentOps};
use sqlx::Pool;

use super::answer::Answer;

/// Headers that are stored by default: those that belong to the body, or that the client needs to go on.
const STORED: [HeaderName; 8] =
    [CONTENT_TYPE, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_DISPOSITION, ETAG, LAST_MODIFIED, LINK, LOCATION];

/// Largest body of an answer in bytes unless the caller says otherwise.
const MOST: usize = 1 << 20;

/// A request that is done once, made by [`IdempotencyKey`](crate::IdempotencyKey), which has an example.
#[derive(Debug)]
#[must_use = "nothing is done until `run` is awaited"]
pub struct IdempotentRequest {
    request: Idempotent,
    /// It has no user, so it is refused.
    is_nobodys: bool,
    stored: Vec<HeaderName>,
    most: usize,
}

impl IdempotentRequest {
    pub(super) fn new(request: Idempotent, is_nobodys: bool) -> Self {
        // The limit of this type counts the bytes of the body, not those of its JSON.
        Self { request: request.max_answer(usize::MAX), is_nobodys, stored: STORED.to_vec(), most: MOST }
    }

    /// How long the answer is kept. Defaults to 24 h. After that the work is done again. Tell it to your clients.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.request = self.request.keep(keep);
        self
    }

    /// Longest wait for another request with the same key, after which the answer is 409. Defaults to
    /// [`Wait::DEFAULT`], 10 s. Zero answers at once, as the draft has it. A request that waits holds a connection.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.request = self.request.wait(wait);
        self
    }

    /// Stores this header of the answer, too. Set by default: `Content-Type`, `Content-Encoding`, `Content-Language`,
    /// `Content-Disposition`, `ETag`, `Last-Modified`, `Link` and `Location`.
    ///
    /// An answer that is replayed has the stored headers only. Others, such as `Set-Cookie`, are sent to the request
    /// that did the work, and are not kept in the database.
    pub fn store_header(mut self, name: HeaderName) -> Self {
        self.stored.push(name);
        self
    }

    /// Largest body of an answer in bytes. Defaults to 1 MiB.
    ///
    /// Text is stored as it is. Of a body that is not UTF-8, a byte takes up to four in the table.
    pub fn max_answer(mut self, bytes: usize) -> Self {
        self.most = bytes;
        self
    }

    /// Returns the stored answer, or does the work in a transaction, which commits together with its answer.
    ///
    /// `body` returns what a handler may: anything that is [`IntoResponse`]. An `Ok` is stored whatever its status is:
    /// a declined card is an answer, too. Return `Err` for what the client should try again.
    ///
    /// A stored answer costs one statement. `body` must not end the transaction.
    ///
    /// # Errors
    /// - What `body` returns. The transaction is rolled back, and nothing is stored.
    /// - Those of [`Idempotent::run`], which [`LockError`](crate::LockError) answers: [`Error::Contended`] by 409,
    ///   [`Error::Mismatch`] by 422.
    /// - [`Error::OutcomeUnknown`] when the answer to COMMIT was lost. The repeated request finds out what happened.
    /// - [`Error::Answer`] when the answer cannot be stored, because its body is a stream, which has no length, or is
    ///   larger than [`max_answer`](Self::max_answer): the work is rolled back. `LockError` answers it by 500.
    /// - [`Error::InvalidOption`] when [`for_user`](crate::IdempotencyKey::for_user) got an empty name. 500, too.
    ///
    /// # Cancel safety
    /// A dropped future leaves neither the work nor an answer, unless COMMIT was sent; then both are there or none. A
    /// client that disconnects drops it.
    #[track_caller]
    pub fn run<DB, R, E, F>(self, pool: &Pool<DB>, body: F) -> impl Future<Output = Result<Response, E>>
    where
        DB: IdempotentOps,
        R: IntoResponse,
        E: From<Error>,
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<R, E>,
    {
        let Self { request, is_nobodys, stored, most } = self;
        let running = request.run(pool, async move |tx: &mut Tx<DB>| {
            let answer = body(tx).await?.into_response();
            Ok::<_, E>(Answer::of(answer, stored, most).await)
        });
        async move {
            if is_nobodys {
                let reason = "needs the name of a user, and got an empty one: all who have none would share their \
                              answers";
                return Err(Error::invalid_option("for_user", reason).into());
            }
            Ok(match running.await? {
                Answered::Now(answer) => answer.into_response(),
                Answered::Before(answer) => answer.replayed(),
            })
        }
    }
}
