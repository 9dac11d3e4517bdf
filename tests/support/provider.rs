//! A provider of payments that does not know a repeated request: each charge is another one. It can be asked for the
//! charges with a reference. What it has done, no transaction of a test undoes.

use std::str::FromStr;
use std::time::Duration;

use lockkit::idempotent::Attempt;
use lockkit::{Answered, Error, Idempotent, Leases};
use sqlx::Pool;

use crate::{Backend, PlainSql, TestDb};

#[derive(Debug)]
pub struct Provider<DB: sqlx::Database>(Pool<DB>);

impl<DB: sqlx::Database> Clone for Provider<DB> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Creates the provider's table, and counts what is in it.
pub async fn create<S: Backend>(db: &TestDb<S>) -> Provider<S::DB> {
    db.execute("CREATE TABLE charges (reference CHAR(36) NOT NULL)").await;
    Provider::at(&db.pool)
}

/// How many charges there are, and for how many references.
///
/// # Panics
/// If a statement fails.
pub async fn charges<S: Backend>(db: &TestDb<S>) -> (i64, i64) {
    let all = db.fetch_i64("SELECT COUNT(*) FROM charges").await.expect("a number");
    (all, db.fetch_i64("SELECT COUNT(DISTINCT reference) FROM charges").await.expect("a number"))
}

impl<DB: PlainSql> Provider<DB> {
    pub fn at(pool: &Pool<DB>) -> Self {
        Self(pool.clone())
    }

    /// Charges, on a connection of its own, and so in a transaction of its own.
    ///
    /// # Panics
    /// If a statement fails.
    pub async fn charge(&self, reference: &str) {
        let mut conn = self.0.acquire().await.expect("acquire a connection");
        DB::execute(&mut conn, &format!("INSERT INTO charges VALUES ('{reference}')")).await.expect("charge");
    }

    /// Whether there is a charge with this reference.
    ///
    /// # Panics
    /// If a statement fails.
    pub async fn has_charged(&self, reference: &str) -> bool {
        let mut conn = self.0.acquire().await.expect("acquire a connection");
        let found = format!("SELECT reference FROM charges WHERE reference = '{reference}'");
        !DB::fetch_texts(&mut conn, &found).await.expect("ask the provider").is_empty()
    }
}

/// What a client makes of an attempt before its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipe {
    /// Asks the provider, as the guide says.
    Asks,
    /// Charges.
    Ignores,
}

impl FromStr for Recipe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "asks" => Ok(Self::Asks),
            "ignores" => Ok(Self::Ignores),
            _ => Err(format!("{text} is no recipe")),
        }
    }
}

/// Pays once for this key, and calls `charged` between the provider's answer and the commit. The answer is the
/// reference.
///
/// # Errors
/// Those of [`Idempotent::outside`].
pub async fn pay<S: Backend>(
    leases: &Leases<Pool<S::DB>>,
    recipe: Recipe,
    key: &str,
    charged: impl AsyncFnOnce(Attempt),
) -> Result<Answered<String>, Error> {
    let provider = Provider::at(leases.store());
    let request = Idempotent::key(key).request(&1999).wait(Duration::from_mins(2));
    let paid = request.outside(leases, async |work| {
        let reference = work.idempotency_key().to_owned();
        let is_first = work.attempt() == Attempt::First || recipe == Recipe::Ignores;
        if is_first || !provider.has_charged(&reference).await {
            provider.charge(&reference).await;
        }
        charged(work.attempt()).await;
        Ok::<_, Error>(reference)
    });
    paid.await
}
